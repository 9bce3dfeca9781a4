# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,operator"
"""`SlicedReplicas` whose gradients are summed with a codec."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import PhaseClock
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ConfigError
from sennit.transport.oracle import codec_reference
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)
INT8 = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=11)


def through(values: Tensor, first_index: int, seed: int) -> Tensor:
    codec = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=seed)
    codes = codec_reference.encode(codec, values.numpy(), first_index=first_index)
    return torch.from_numpy(codec_reference.decode(codec, codes, len(values)))


class Product(nn.Module):
    """Its gradient is the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128))
        self.narrow = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.weight).sum() + (inputs[:, :64] @ self.narrow.float()).sum()


def inputs_of(step: int) -> Tensor:
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(step))


def as_defined(rank: int, world: int) -> None:
    """Gradients are those of the definition, step by step, and all ranks have the same."""
    clock = PhaseClock()
    replicas = SlicedReplicas(Product(), codec=INT8, clock=clock)
    # The row of float32 has 128 elements of `weight` and the 3 of `unused`, padded to 64.
    lost = [torch.zeros(192) for _ in range(world)]
    for step in range(4):
        replicas.zero_grad()
        inputs = inputs_of(step)
        own = inputs[replicas.slices.own_samples(8)]
        replicas.loss(replicas(own), 1).backward()
        # Two sums a step. That of float32 comes second: its row has the counts, which are complete last.
        seed, parts = INT8.seed + 2 * step + 1, []
        for peer in range(world):
            nodes = [_tree(inputs[node.low : node.high]) for node in replicas.slices.nodes_of(peer)]
            given = torch.zeros(192)
            given[:128] = sum(nodes[1:], nodes[0])
            given += lost[peer]
            parts.append(through(given, peer * 192, seed))
            lost[peer] = given - parts[peer]
        expected = through(sum(parts[1:], parts[0]), world * 192, seed)
        assert torch.equal(replicas.module.weight.grad, expected[:128])
        assert replicas.module.narrow.grad.dtype is torch.bfloat16
        torch.testing.assert_close(replicas.module.narrow.grad, inputs[:, :64].sum(0).bfloat16(), atol=0.3, rtol=0.02)
        assert replicas.module.unused.grad is None
    assert clock.seconds["AllReduce"] > 0
    assert torch.equal(replicas.residuals.state_dict()["lost"]["weight"], lost[rank][:128])


def _tree(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 else _tree(rows[: len(rows) // 2]) + _tree(rows[len(rows) // 2 :])


def goes_on(rank: int, world: int) -> None:
    """A run that stops and goes on has the gradients of one that does not. Freezing keeps what others have lost."""

    def step(replicas: SlicedReplicas, number: int) -> Tensor:
        replicas.zero_grad()
        replicas.loss(replicas(inputs_of(number)[replicas.slices.own_samples(8)]), 1).backward()
        return replicas.module.weight.grad.clone()

    whole, first, second = (SlicedReplicas(Product(), codec=INT8) for _ in range(3))
    before = [step(whole, number) for number in range(3)]
    assert torch.equal(step(first, 0), before[0])
    state: dict[str, Any] = first.residuals.state_dict()
    second.residuals.load_state_dict(state)
    assert all(torch.equal(step(second, number), before[number]) for number in (1, 2))
    whole.module.narrow.requires_grad_(False)
    step(whole, 3)
    kept = whole.residuals.state_dict()
    assert kept["calls"] == 7
    assert kept["lost"]["narrow"].abs().sum() > 0
    # Another world: nothing is lost yet, but no seed comes twice.
    third = SlicedReplicas(Product(), codec=INT8)
    third.residuals.load_state_dict({**state, "world": world + 1})
    assert third.residuals.state_dict() == {"rank": rank, "world": world, "calls": 2, "lost": {}}
    assert not torch.equal(step(third, 1), before[1])


def refuses(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="codec: rank 0 has None, rank 1 has Codec"):
        SlicedReplicas(Product(), codec=INT8 if rank else None)
    for codec, match in (
        (Codec(kind=CodecKind.LOSSLESS), "LOSSLESS for gradients"),
        (Codec(kind=CodecKind.BF16, between_hosts=True), "between hosts alone for gradients"),
    ):
        with pytest.raises(ConfigError, match=match):
            SlicedReplicas(Product(), codec=codec)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_the_definition(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(as_defined)


@pytest.mark.parametrize("world", [1, 2])
def test_error_feedback_survives_a_restart(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(goes_on)


def test_codecs_that_cannot_be_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses)
