# SPDX-License-Identifier: Apache-2.0
"""A module on every rank, run slice by slice: the same bits in every world, and the gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from sennit.runtime.replicas import Along
from sennit.runtime.replicas.cutting import CutArguments, join
from sennit.runtime.sharded import Slices

pytestmark = pytest.mark.timeout(240)

CASES = "replica_cases.py"
DEVICE_CASES = "replica_device_cases.py"


@pytest.mark.parametrize("no_sync", [False, True])
def test_a_module_on_a_device_has_the_bits_of_the_host(kept_world: Callable[..., Any], no_sync: bool) -> None:
    """`device_double` fails where host and device are mixed."""
    wanted, _ = kept_world(1).run(DEVICE_CASES, "train_there", no_sync=no_sync)[0]
    for world in (1, 2, 3):
        for found, waits in kept_world(world).run(DEVICE_CASES, "train_there", device="double", no_sync=no_sync):
            assert found == wanted
            assert waits == 3 * 2  # The gradients of a step, and its global loss.


@pytest.mark.gpu
def test_a_module_on_a_gpu_has_the_same_bits_in_every_world(new_world: Callable[..., Any]) -> None:
    wanted = new_world(1).run(DEVICE_CASES, "train_there", device="cuda:0")
    assert new_world(2).run(DEVICE_CASES, "train_there", device="cuda:0") == wanted * 2


@pytest.mark.parametrize(
    "options",
    [{}, {"no_sync": True}, {"autocast": "bfloat16"}, {"autocast": "float16"}],
    ids=["float32", "no_sync", "bfloat16", "float16"],
)
def test_five_steps_have_the_same_bits_in_every_world(
    kept_world: Callable[..., Any], options: dict[str, object]
) -> None:
    worlds = [(1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (8, "shm")]
    if not options:
        worlds.append((3, "udp"))
    found = {world: kept_world(*world).run(CASES, "train", **options) for world in worlds}
    alone = found[1, "shm"][0]
    for world, ranks in found.items():
        assert all(hashes == alone for hashes in ranks), (world, ranks, alone)


@pytest.mark.parametrize("case", ["parts", "loss_outside", "zoo"])
def test_what_models_do_has_the_same_bits_in_every_world(kept_world: Callable[..., Any], case: str) -> None:
    assert len({found for size in (1, 2, 3, 8) for found in kept_world(size).run(CASES, case)}) == 1


def test_a_run_goes_on_with_fewer_ranks(kept_world: Callable[..., Any]) -> None:
    assert len({kept_world(size).run(CASES, "ranks_leave")[0] for size in (1, 3, 4)}) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_plain_torch(kept_world: Callable[..., Any], size: int) -> None:
    kept_world(size).run(CASES, "gradients")


def test_a_compiled_module_gives_the_same_bits(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "compiled")


def test_what_is_refused_is_refused_on_all_ranks(kept_world: Callable[..., Any]) -> None:
    kept_world(3).run(CASES, "refusals")


def test_a_dead_rank_is_named(new_world: Callable[..., Any]) -> None:
    survivor, dead = new_world(2).run(CASES, "dies")
    assert dead is None
    assert "rank 1" in survivor


def test_slices_are_cut_with_their_gradients_and_begin_at_a_cache_line() -> None:
    count = 11
    dense = torch.randn(count, 3, requires_grad=True)
    pooled = torch.randn(2, count, 5)
    scale, whole = torch.tensor(2.0), torch.ones(3)
    slices = Slices(count=4, rank=0, world_size=1)
    arguments = ((dense, [Along({"pooled": pooled}, 1)]), {"scale": scale, "whole": Along(whole, None), "name": "x"})
    cut = CutArguments(arguments, slices, count)
    assert cut.sizes == [2, 3, 3, 3]
    outputs = []
    arrived: list[torch.Tensor] = []
    first = 0
    parts: list[torch.Tensor] = []
    for number, ((part, (nested,)), options) in cut:
        vectors = nested["pooled"]
        parts += [part, vectors]
        last = first + cut.sizes[number]
        assert torch.equal(part, dense[first:last])
        assert torch.equal(vectors, pooled[:, first:last])
        assert options["scale"] is scale
        assert options["whole"] is whole
        assert options["name"] == "x"
        result = part * number
        result.register_hook(arrived.append)
        outputs.append({"many": result, "one": result.sum()})
        first = last
    called = []
    joined = join(outputs, lambda: called.append(True))
    assert joined["one"].shape == (4,)
    weights = torch.randn(count, 3)
    (joined["many"] * weights).sum().backward()
    assert called
    assert dense.grad is not None
    assert torch.equal(dense.grad, weights * torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]).unsqueeze(1))
    assert len(arrived) == 4
    for tensor in arrived + parts:
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_of_all_samples_are_gathered_in_their_order(kept_world: Callable[..., Any], world: int) -> None:
    kept_world(world).run(CASES, "gathered")
