# SPDX-License-Identifier: Apache-2.0
"""Embedding tables: one operator with several implementations (plain torch, native, Triton) that return the same bits.

`EmbeddingEngine` looks up and updates tables; docs/reference/embedding.md defines the arithmetic. `jagged_attention`
is attention over sequences of different lengths; docs/reference/attention.md defines its arithmetic.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.kernels.attention import jagged_attention as jagged_attention
    from sennit.runtime.kernels.batch import Batch as Batch
    from sennit.runtime.kernels.batch import RowSums as RowSums
    from sennit.runtime.kernels.engine import EmbeddingEngine as EmbeddingEngine
    from sennit.runtime.kernels.ids import distinct as distinct
    from sennit.runtime.kernels.ids import split_rows as split_rows
    from sennit.runtime.kernels.int8 import float_rows as float_rows
    from sennit.runtime.kernels.int8 import int8_rows as int8_rows
    from sennit.runtime.kernels.operators import FusedTables as FusedTables
    from sennit.runtime.kernels.optimizers import Decay as Decay
    from sennit.runtime.kernels.optimizers import Optimizer as Optimizer
    from sennit.runtime.kernels.optimizers import OptimizerSpec as OptimizerSpec
    from sennit.runtime.kernels.spec import Bounds as Bounds
    from sennit.runtime.kernels.spec import Pooling as Pooling
    from sennit.runtime.kernels.spec import Precision as Precision
    from sennit.runtime.kernels.spec import Rounding as Rounding
    from sennit.runtime.kernels.spec import ShardSpec as ShardSpec
    from sennit.runtime.kernels.tensor_train import TensorTrainSpec as TensorTrainSpec
    from sennit.runtime.kernels.tensor_train import initialise as initialise

__getattr__ = exporter(
    __name__,
    {
        "jagged_attention": "attention",
        "Batch": "batch",
        "RowSums": "batch",
        "EmbeddingEngine": "engine",
        "distinct": "ids",
        "split_rows": "ids",
        "float_rows": "int8",
        "int8_rows": "int8",
        "FusedTables": "operators",
        "Decay": "optimizers",
        "Optimizer": "optimizers",
        "OptimizerSpec": "optimizers",
        "Bounds": "spec",
        "Pooling": "spec",
        "Precision": "spec",
        "Rounding": "spec",
        "ShardSpec": "spec",
        "TensorTrainSpec": "tensor_train",
        "initialise": "tensor_train",
    },
)
