# SPDX-License-Identifier: Apache-2.0
"""Sharded tables whose sums, rows and gradients travel coded."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from sennit.runtime.kernels import Optimizer, OptimizerSpec
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ConfigError, SennitError
from tests.runtime.sharded_training import coded, rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def coded_as_defined(rank: int, world: int) -> None:
    """What comes back, and the gradient of a row, are those of coding a row as one block."""
    dim = 24
    plain, module = (
        ShardedEmbeddingBags(
            [Table(name="user", rows=64, dim=dim, optimizer=OptimizerSpec(kind=Optimizer.SGD))],
            lr=1.0, gradients="sum", codec=codec,
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
        ShardedEmbeddingBags([table], lr=1, codec=codec)


def dies(rank: int, world: int) -> list[str]:
    """The last rank dies before the backward passes. Returns the survivors' errors."""
    codec = Codec(kind=CodecKind.INT8)
    module = ShardedEmbeddingBags([Table(name="user", rows=100, dim=4, column_shards=2)], lr=1, codec=codec)
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


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_coded_bags_have_the_same_bits_wherever_tables_lie(kept_world: WorldFactory, codec: str) -> None:
    """Whole bags are coded, of each column shard: so neither owner nor world changes them."""
    found = {
        digest
        for world, transport, placement in (
            (1, "shm", "table_wise"),
            (2, "shm", "table_wise"),
            (2, "shm", "column_wise"),
            (3, "udp", "table_wise"),
        )
        for digest, _ in kept_world(world, transport).run(coded, codec=codec, placement=placement)
    }
    assert len(found) == 1
    assert found != {kept_world(1).run(coded, codec=None)[0][0]}


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("codec", ["mx4", "int8", "lossless"])
@pytest.mark.parametrize("world", [1, 2])
def test_codecs_send_fewer_bytes(kept_world: WorldFactory, world: int, codec: str, kind: str) -> None:
    plain = kept_world(world).run(coded, codec=None, kind=kind)
    fewer = kept_world(world).run(coded, codec=codec, kind=kind)
    assert (fewer[0][0] == plain[0][0]) == (codec == "lossless")
    if world == 1:
        assert not any(fewer[0][1].values())
        return
    for (_, before), (_, after) in zip(plain, fewer, strict=True):
        # Ids are not coded but by LOSSLESS, whose bytes are known to the transport alone.
        assert after["all"] < before["all"] * 0.95
        for what in ("sums", "gradients") if kind == "bags" else ("rows", "gradients"):
            ratio = {"mx4": 0.14, "int8": 0.32, "lossless": 1.0}[codec]
            assert after[what] <= before[what] * ratio


def test_a_row_is_a_block(kept_world: WorldFactory) -> None:
    kept_world(2).run(coded_as_defined)


def test_ranks_with_different_codecs_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_codecs)


def test_a_dead_rank_is_named(new_world: WorldFactory) -> None:
    survivor, dead = new_world(2).run(dies)
    assert dead is None
    assert "rank 1" in survivor[0]
    assert len(survivor) == 2
