# SPDX-License-Identifier: Apache-2.0
"""This rank's embedding tables, with initial weights that depend on the seed and the tables' names alone."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.runtime.dlrm.sharding import Table
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import TableSpec
from sennit.runtime.seeds import torch_stream


def embedding_engine(tables: Sequence[Table], *, dim: int, seed: int) -> EmbeddingEngine:
    """The tables that one rank owns, in float32 under row-wise AdaGrad (Neo, Mudigere et al. 2022, section 4.1.4)."""
    engine = EmbeddingEngine(
        [TableSpec(name=table.name, row_count=table.row_count, dim=dim) for table in tables],
        OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD, epsilon=1e-8),
    )
    for table in tables:
        # Naumov et al. 2019, the reference code: uniform within 1 / sqrt(rows).
        bound = table.row_count**-0.5
        engine.weight(table.name).uniform_(-bound, bound, generator=torch_stream(seed, "table", table.name))
    return engine
