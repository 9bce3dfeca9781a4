# SPDX-License-Identifier: Apache-2.0
# TorchRec has no types here:
# mypy: disable-error-code="import-not-found,no-untyped-call"
"""Sharded tables behind the constructors and results of TorchRec's embedding collections, for TorchRec's own tests.

A rank alone, on the CPU. What only TorchRec's module structure has is not there: `embedding_bags[...]`, the device
"meta", `torch.jit.script`, `torch.fx` traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from sennit.runtime.sharded import Pooling, ShardedEmbeddingBags, ShardedEmbeddings, Table
from sennit.transport.errors import ArgumentError, ConfigError

POOLINGS = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


def tables_of(configs: Sequence[BaseEmbeddingConfig], pooling: Pooling | None = None) -> list[Table]:
    """The same tables here. `pooling`: of all of them, in place of the configurations' own."""

    def rows_of(config: BaseEmbeddingConfig) -> Any:
        def fill(rows: Tensor, generator: torch.Generator) -> Tensor:
            # TorchRec's initial values come from torch's default generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator.initial_seed())
                found: Tensor = config.init_fn(rows)
            return found

        return fill

    return [
        Table(
            name=config.name,
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            features=tuple(config.feature_names),
            pooling=POOLINGS[config.pooling] if pooling is None else pooling,
            initial=rows_of(config),
        )
        for config in configs
    ]


class EmbeddingBagCollection(nn.Module):
    """Returns a KeyedTensor. Raises ValueError for tables that cannot be."""

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], is_weighted: bool = False) -> None:
        super().__init__()
        self._is_weighted = is_weighted
        try:
            self.sharded = ShardedEmbeddingBags(tables_of(tables), lr=0.1)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if self._is_weighted != (features.weights_or_none() is not None):
            raise ArgumentError(f"is_weighted is {self._is_weighted}; allowed: as the features")
        found = self.sharded(features, global_batch=features.stride())
        return KeyedTensor.from_tensor_list(list(found), list(found.values()))


class EmbeddingCollection(nn.Module):
    """Returns a JaggedTensor for each output; `need_indices`: with the ids as its weights."""

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], need_indices: bool = False) -> None:
        super().__init__()
        self._need_indices = need_indices
        try:
            self.sharded = ShardedEmbeddings(tables_of(tables, Pooling.NONE), lr=0.1)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = self.sharded(features, global_batch=features.stride())
        given = features.to_dict()
        # Outputs are called FEATURE or FEATURE@TABLE.
        ids_of = {output: given[output.partition("@")[0]] for output in found}
        return {
            output: JaggedTensor(
                values=rows,
                lengths=ids_of[output].lengths(),
                weights=ids_of[output].values() if self._need_indices else None,
            )
            for output, rows in found.items()
        }
