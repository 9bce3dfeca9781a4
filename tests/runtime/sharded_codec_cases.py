# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Sharded tables with codecs: run on each rank by test_sharded_codecs.py."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from sharded_cases import ADAM, CPU, rows_of  # type: ignore[import-not-found]
from torch import Tensor

from sennit.runtime.backend import communicator
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import PhaseClock, ShardedEmbeddingBags, ShardedEmbeddings, Table
from sennit.transport.codecs import EXCHANGE_CODECS, Codec, CodecKind
from sennit.transport.errors import ConfigError, SennitError

CODED_TABLES = (
    Table(name="user", rows=400, dim=32, column_shards=2),
    Table(name="item", rows=300, dim=48, features=("bought", "seen"), optimizer=ADAM),
    Table(name="genre", rows=17, dim=16, pooling=Pooling.MEAN),
)


def coded(
    rank: int,
    world: int,
    codec: str | None,
    placement: Any = "table_wise",
    kind: str = "bags",
    device: torch.device = CPU,
) -> tuple[str, dict[str, int]]:
    """Three steps with a codec: the digest, and the bytes sent by kind, and "all" of the transport."""
    before = communicator().counters().get("shm_bytes_sent", 0)
    tables: tuple[Table, ...] = CODED_TABLES
    if kind == "sequences":
        tables = tuple(dataclasses.replace(table, pooling=Pooling.NONE) for table in tables)
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    chosen = None if codec is None else Codec(kind=EXCHANGE_CODECS[codec])
    clock = PhaseClock()
    options: dict[str, Any] = {"rate": 0.1, "gradients": "sum", "codec": chosen, "clock": clock}
    module = made(tables, placement=placement, device=device, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        part = module.slices.own_samples(24)
        ids = {
            name: (torch.rand(24, 9, generator=generator) * rows).to(torch.int32)[part]
            for name, rows in (("user", 400), ("bought", 300), ("seen", 300), ("genre", 17))
        }
        outputs = list(module(ids).values())
        assert all(vectors.device.type == device.type for vectors in outputs)
        torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])
    module.check()
    assert {"input exchange", "lookup", "sparse update"} <= clock.seconds.keys()
    if world > 1 and placement == "table_wise":
        assert {"AlltoAll forward", "AlltoAll backward"} <= clock.seconds.keys()
    assert all(seconds >= 0 for seconds in clock.seconds.values())
    sent = communicator().counters().get("shm_bytes_sent", 0) - before
    return module.digest(), module.sent_bytes | {"all": sent}


def coded_as_defined(rank: int, world: int) -> None:
    """What comes back, and the gradient of a row, are those of coding a row as one block."""
    dim = 24
    plain, module = (
        ShardedEmbeddingBags(
            [Table(name="user", rows=64, dim=dim, optimizer=OptimizerSpec(kind=Optimizer.SGD))],
            rate=1.0, gradients="sum", codec=codec,
        )
        for codec in (None, Codec(kind=CodecKind.INT8))
    )  # fmt: skip
    row = Codec(kind=CodecKind.INT8, block=dim)

    def through(values: Tensor) -> Tensor:
        flat = values.detach().contiguous().numpy()
        return torch.from_numpy(row.decode(row.encode(flat), flat.size)).view(values.shape)

    ids = {"user": torch.arange(16).view(8, 2) + 16 * rank}
    expected = plain(ids)["user"].detach()
    found = module(ids)["user"]
    assert torch.equal(found.detach(), through(expected))
    assert not torch.equal(found.detach(), expected)
    before = rows_of(module, world)
    gradient = torch.randn(8, dim, generator=torch.Generator().manual_seed(rank))
    found.backward(gradient)
    after = rows_of(module, world)[16 * rank : 16 * rank + 16].view(8, 2, dim)
    start = before[16 * rank : 16 * rank + 16].view(8, 2, dim)
    assert torch.equal(after, start - through(gradient).unsqueeze(1))


def refuses_codecs(rank: int, world: int) -> None:
    table = Table(name="user", rows=10, dim=4)
    codec = Codec(kind=CodecKind.INT8) if rank else None
    with pytest.raises(ConfigError, match=r"codec: rank 0 has None, rank 1 has Codec\(kind=<CodecKind.INT8"):
        ShardedEmbeddingBags([table], rate=1, codec=codec)


def refuses_gloo(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="a codec over gloo; allowed: backend sennit"):
        ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], rate=1, codec=Codec(kind=CodecKind.BF16))
    with pytest.raises(ConfigError, match="a codec over gloo; allowed: backend sennit"):
        SlicedReplicas(torch.nn.Linear(2, 2), codec=Codec(kind=CodecKind.BF16))


def dies(rank: int, world: int) -> list[str]:
    """The last rank dies before the backward passes. Returns the survivors' errors."""
    codec = Codec(kind=CodecKind.INT8)
    module = ShardedEmbeddingBags([Table(name="user", rows=100, dim=4, column_shards=2)], rate=1, codec=codec)
    replicas = SlicedReplicas(torch.nn.Linear(4, 1), codec=codec)
    vectors = module({"user": torch.arange(8)})["user"]
    loss = replicas(vectors.detach()).sum()
    if rank == world - 1:
        os._exit(0)
    errors = []
    for backward in (lambda: vectors.sum().backward(), loss.backward):
        with pytest.raises(SennitError) as caught:
            backward()
        errors.append(str(caught.value))
    assert all(parameter.grad is None for parameter in replicas.parameters())
    return errors
