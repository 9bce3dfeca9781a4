# SPDX-License-Identifier: Apache-2.0
"""Memory tiers of embedding tables: rows in a file or in DRAM, and a cache of rows in front of them.

`RowStore` keeps rows, `RowCache` caches them, `TieredTables` trains on both; docs/reference/embedding-store.md.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.memory.cache import CachedBatch as CachedBatch
    from sennit.runtime.memory.cache import RowCache as RowCache
    from sennit.runtime.memory.errors import CorruptStore as CorruptStore
    from sennit.runtime.memory.errors import ForeignStore as ForeignStore
    from sennit.runtime.memory.large_buffers import keep_large_buffers as keep_large_buffers
    from sennit.runtime.memory.layout import RowPart as RowPart
    from sennit.runtime.memory.layout import StoreLayout as StoreLayout
    from sennit.runtime.memory.store import FileAccess as FileAccess
    from sennit.runtime.memory.store import RowStore as RowStore
    from sennit.runtime.memory.tiered import PrefetchedBatch as PrefetchedBatch
    from sennit.runtime.memory.tiered import TieredTables as TieredTables

__getattr__ = exporter(
    __name__,
    {
        "CachedBatch": "cache",
        "RowCache": "cache",
        "CorruptStore": "errors",
        "ForeignStore": "errors",
        "keep_large_buffers": "large_buffers",
        "RowPart": "layout",
        "StoreLayout": "layout",
        "FileAccess": "store",
        "RowStore": "store",
        "PrefetchedBatch": "tiered",
        "TieredTables": "tiered",
    },
)
