# SPDX-License-Identifier: Apache-2.0
"""Sharded training whose bits do not depend on the ranks: tables in shards, and the global batch in slices.

Slices, row shards and column shards decide bits, and belong to the model. Where they lie belongs to the run. The dense
part of a model is in `sennit.runtime.replicas`.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.sharded.agreement import PeerInputError as PeerInputError
    from sennit.runtime.sharded.clipping import clip_grad_norm_ as clip_grad_norm_
    from sennit.runtime.sharded.features import Features as Features
    from sennit.runtime.sharded.features import GradientError as GradientError
    from sennit.runtime.sharded.features import IdError as IdError
    from sennit.runtime.sharded.files import TableStore as TableStore
    from sennit.runtime.sharded.handle import TableHandle as TableHandle
    from sennit.runtime.sharded.memory_limits import memory_limits as memory_limits
    from sennit.runtime.sharded.module import ShardedEmbeddingBags as ShardedEmbeddingBags
    from sennit.runtime.sharded.module import ShardedEmbeddings as ShardedEmbeddings
    from sennit.runtime.sharded.outputs import KeyedVectors as KeyedVectors
    from sennit.runtime.sharded.phases import PhaseClock as PhaseClock
    from sennit.runtime.sharded.placement import Placement as Placement
    from sennit.runtime.sharded.placement import place as place
    from sennit.runtime.sharded.placement import placed as placed
    from sennit.runtime.sharded.sampler import SliceSampler as SliceSampler
    from sennit.runtime.sharded.sent import Pending as Pending
    from sennit.runtime.sharded.sent import Sent as Sent
    from sennit.runtime.sharded.shards import Evicted as Evicted
    from sennit.runtime.sharded.slices import Slices as Slices
    from sennit.runtime.sharded.tables import Bounds as Bounds
    from sennit.runtime.sharded.tables import Decay as Decay
    from sennit.runtime.sharded.tables import DynamicIds as DynamicIds
    from sennit.runtime.sharded.tables import Eviction as Eviction
    from sennit.runtime.sharded.tables import Home as Home
    from sennit.runtime.sharded.tables import Homes as Homes
    from sennit.runtime.sharded.tables import Optimizer as Optimizer
    from sennit.runtime.sharded.tables import OptimizerSpec as OptimizerSpec
    from sennit.runtime.sharded.tables import Pooling as Pooling
    from sennit.runtime.sharded.tables import Precision as Precision
    from sennit.runtime.sharded.tables import Rounding as Rounding
    from sennit.runtime.sharded.tables import Table as Table
    from sennit.runtime.sharded.torchrec import from_torchrec as from_torchrec
    from sennit.runtime.sharded.wire import Codec as Codec

__getattr__ = exporter(
    __name__,
    {
        "PeerInputError": "agreement",
        "clip_grad_norm_": "clipping",
        "Features": "features",
        "GradientError": "features",
        "IdError": "features",
        "TableStore": "files",
        "TableHandle": "handle",
        "memory_limits": "memory_limits",
        "ShardedEmbeddingBags": "module",
        "ShardedEmbeddings": "module",
        "PhaseClock": "phases",
        "KeyedVectors": "outputs",
        "Placement": "placement",
        "place": "placement",
        "placed": "placement",
        "SliceSampler": "sampler",
        "Pending": "sent",
        "Sent": "sent",
        "Evicted": "shards",
        "Slices": "slices",
        "Bounds": "tables",
        "Decay": "tables",
        "DynamicIds": "tables",
        "Eviction": "tables",
        "Home": "tables",
        "Homes": "tables",
        "Optimizer": "tables",
        "OptimizerSpec": "tables",
        "Pooling": "tables",
        "Precision": "tables",
        "Rounding": "tables",
        "Table": "tables",
        "from_torchrec": "torchrec",
        "Codec": "wire",
    },
)
