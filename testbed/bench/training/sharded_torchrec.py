# SPDX-License-Identifier: Apache-2.0
"""TorchRec as a peer of `sennit bench sharded`: its DistributedModelParallel over gloo, tables by fbgemm on the CPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.sharded import Features, Table
from sennit.runtime.sharded.initial import fill
from sennit.runtime.sharded.tables import Shard
from sennit.transport.errors import Unsupported

HINT = "torch 2.13 takes fbgemm-gpu-cpu 1.8.0 and torchrec 1.9.2, each installed with pip's --no-deps"


def torchrec_step(
    tables: Sequence[Table], dense: nn.Module, *, rate: float
) -> Callable[[Tensor, Features, Tensor], float]:
    """A step of TorchRec, tables table-wise, from the initial rows that ours have. Raises `Unsupported` without it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        import torchrec
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ShardingEnv
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except (ImportError, OSError) as error:
        raise Unsupported("torchrec", f"cannot be imported ({error}); {HINT}") from None

    class Model(nn.Module):
        """The dense part on TorchRec's tables."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = torchrec.EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=table.name,
                        embedding_dim=table.dim,
                        num_embeddings=table.rows,
                        feature_names=list(table.features),
                    )
                    for table in tables
                ],
            )
            self.dense = dense

        def forward(self, values: Tensor, ids: Any, labels: Tensor) -> Tensor:
            found = self.tables(ids)
            vectors = [found[table.features[0]] for table in tables]
            loss: Tensor = self.dense(values, labels, *vectors)
            return loss

    gloo = dist.new_group(backend="gloo")
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": rate})
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables},
    ).collective_plan(model, [sharder], gloo)
    parallel = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(gloo), device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    numbers = {table.name: number for number, table in enumerate(tables)}
    for name, value in parallel.state_dict().items():
        if hasattr(value, "local_shards"):
            table = name.split(".")[-2]
            for shard in value.local_shards():
                fill(shard.tensor, tables, Shard(numbers[table], 0, 0), seed=0)
    own = [parameter for name, parameter in parallel.named_parameters() if ".dense." in f".{name}"]
    optimizer = torch.optim.Adagrad(own, lr=rate, foreach=False)
    keys = [table.features[0] for table in tables]

    def step(values: Tensor, features: Features, labels: Tensor) -> float:
        ids = KeyedJaggedTensor(keys=keys, values=features.values, lengths=features.lengths.flatten())
        loss = parallel(values, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
