# SPDX-License-Identifier: Apache-2.0
"""Weights of 16 bits in a store and 32 bits in the cache before it, rounded once, when a row is written back.

Updates that are too small for fp16 or bf16 add up while a row is in the cache. Neo (Mudigere et al., ISCA 2022, section
4.1.4) has such a cache before half-precision tables. docs/reference/embedding-store.md says when a row is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sennit.runtime.kernels.spec import Precision, Rounding, ShardSpec
from sennit.runtime.memory import _memory
from sennit.runtime.memory.store import RowStore
from sennit.transport.errors import ArgumentError


def widened(
    store: RowStore, tables: Sequence[ShardSpec], *, rounding: Rounding, seed: int, write_backs: int = 0
) -> RowStore:
    """A view of `store` whose weights, the first part of its rows, are float32. Close it before `store`.

    `tables`, in the store's order, have one dim and the precision of the store, fp16 or bf16. Random numbers depend on
    `seed`, each table's name and global rows, and the number of the write-back. `write_backs` counts earlier ones.
    """
    kinds = {(table.dim, table.precision) for table in tables}
    if len(kinds) != 1 or tables[0].precision is Precision.FP32:
        raise ArgumentError(f"tables of {len(kinds)} dims and precisions; allowed: 1, of fp16 or bf16")
    native = _memory.narrow_store(
        store.native,
        [(table.row_count, table.first_row, table.stream) for table in tables],
        tables[0].dim,
        tables[0].precision is Precision.BF16,
        rounding is Rounding.STOCHASTIC,
        seed,
        write_backs,
    )
    first, *others = store.layout.parts
    return RowStore(native, replace(store.layout, parts=(replace(first, dtype="float32"), *others)))
