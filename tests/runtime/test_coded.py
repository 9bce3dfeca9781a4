# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""AllReduce of tensors with codecs, and DDP's gradients through it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend import Options, all_reduce_coded, coded_hook, elastic
from sennit.runtime.backend.process_group import options_of, second_group
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError
from sennit.transport.oracle import codec_reference
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
INT8 = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=11)


def coded(values: torch.Tensor, first_index: int, seed: int = INT8.seed) -> torch.Tensor:
    codec = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=seed)
    data = values.detach().numpy()
    codes = codec_reference.encode(codec, data, first_index=first_index)
    return torch.from_numpy(codec_reference.decode(codec, codes, data.size))


def made(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size))


def in_place(rank: int, world: int) -> None:
    for size in (0, 1, 1_000, 100_003):
        tensor = made(rank, size)
        all_reduce_coded(tensor, INT8)
        parts = [coded(made(peer, size), peer * size) for peer in range(world)]
        assert torch.equal(tensor, coded(sum(parts[1:], parts[0]), world * size))
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.full((5, 7), rank + 1.0, dtype=dtype)
        all_reduce_coded(tensor, Codec(kind=CodecKind.BF16), dist.ReduceOp.MAX)
        assert torch.equal(tensor, torch.full((5, 7), float(world), dtype=dtype))
    for wrong, match in (
        (torch.zeros(4, 4).t(), r"strides \(1, 4\)"),
        (torch.zeros(4, device="meta"), "a tensor on meta"),
        (torch.zeros(4, dtype=torch.int32), "dtype torch.int32; allowed: float32"),
    ):
        with pytest.raises(ArgumentError, match=match):
            all_reduce_coded(wrong, INT8)
    with pytest.raises(ArgumentError, match="reduce op BXOR"):
        all_reduce_coded(torch.zeros(4), INT8, dist.ReduceOp.BXOR)
    with pytest.raises(ArgumentError, match="LOSSLESS in a collective"):
        all_reduce_coded(torch.zeros(4), Codec(kind=CodecKind.LOSSLESS))


def hooked(rank: int, world: int, feedback: bool) -> None:
    """The gradients of DDP are those of the definition, step by step, and all ranks have the same."""
    model = DistributedDataParallel(torch.nn.Linear(300, 1, bias=False), bucket_cap_mb=25)
    model.register_comm_hook(None, coded_hook(INT8, feedback=feedback))
    lost = [torch.zeros(300) for _ in range(world)]
    for step in range(4):
        model.zero_grad()
        inputs = [made(10 * step + peer, 300) for peer in range(world)]
        model(inputs[rank].reshape(1, 300)).sum().backward()
        seed, parts = INT8.seed + step, []
        for peer, gradient in enumerate(inputs):
            given = gradient + lost[peer]
            parts.append(coded(given, peer * 300, seed))
            lost[peer] = given - parts[peer] if feedback else lost[peer]
        expected = coded(sum(parts[1:], parts[0]) / world, world * 300, seed)
        got = next(model.parameters()).grad.reshape(-1)
        np.testing.assert_array_equal(got.numpy(), expected.numpy(), err_msg=f"step {step}")


def _network(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(3)
    widths = (40, 30, 1) if layers == 2 else (40, 1)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in pairwise(widths)))


def _trained(
    rank: int, steps: range, saved: dict[str, Any] | None, *, layers: int = 2, bucket_mb: float = 25
) -> dict[str, Any]:
    """Trains, from what was saved on. Returns weights and the hook's state."""
    model = DistributedDataParallel(_network(layers), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    hook = coded_hook(INT8)
    model.register_comm_hook(None, hook)
    if saved is not None:
        model.module.load_state_dict(saved["weights"])
        hook.load_state_dict(model, saved["hook"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        model(made(100 * step + rank, 4 * 40).reshape(4, 40)).square().sum().backward()
        optimizer.step()
    weights = {name: weight.clone() for name, weight in model.module.state_dict().items()}
    return {"weights": weights, "hook": hook.state_dict(model)}


def resumes(rank: int, world: int, folder: str) -> None:
    """A run that goes on after a checkpoint ends as the one that never stopped. In other buckets nothing is lost."""
    path = Path(folder) / f"rank{rank}.pt"
    # DDP's first step has one bucket, which it orders anew after that. One layer is always in the same place.
    whole = _trained(rank, range(6), None, layers=1)
    torch.save(_trained(rank, range(3), None, layers=1), path)
    resumed = _trained(rank, range(3, 6), torch.load(path), layers=1)
    assert torch.equal(resumed["weights"]["0.weight"], whole["weights"]["0.weight"])
    assert torch.equal(resumed["hook"]["lost"]["0.weight"], whole["hook"]["lost"]["0.weight"])
    assert resumed["hook"]["calls"] == whole["hook"]["calls"] == 6

    saved = _trained(rank, range(3), None)
    lost = saved["hook"]["lost"]
    assert {name: one.shape for name, one in lost.items()} == {"0.weight": (30, 40), "1.weight": (1, 30)}
    assert all(one.any() for one in lost.values())
    # After the first step, a bucket for each layer.
    apart = _trained(rank, range(3, 6), saved, bucket_mb=1e-4)
    assert apart["hook"]["calls"] == saved["hook"]["calls"] + 1 + 2 + 2
    forgetful = _trained(rank, range(3, 6), {**saved, "hook": {**saved["hook"], "lost": {}}}, bucket_mb=1e-4)
    assert not torch.equal(apart["weights"]["0.weight"], forgetful["weights"]["0.weight"])


def rebuilt(rank: int, world: int) -> None:
    """What the first step has lost is in the second one, although DDP has other buckets then."""
    model = DistributedDataParallel(_network(), bucket_cap_mb=1e-4)
    hook = coded_hook(Codec(kind=CodecKind.MX4))
    model.register_comm_hook(None, hook)
    sums = {name: torch.zeros_like(one) for name, one in model.module.named_parameters()}
    for step in range(3):
        model.zero_grad()
        model(made(step, 40).reshape(1, 40)).sum().backward()  # the same on all ranks
        plain = _network()
        plain(made(step, 40).reshape(1, 40)).sum().backward()
        lost = hook.state_dict(model)["lost"]
        for (name, one), (_, exact) in zip(model.module.named_parameters(), plain.named_parameters(), strict=True):
            # All gradients so far are in those that came, and in what is left. Sums of equal numbers are exact here.
            sums[name] += exact.grad - one.grad
            torch.testing.assert_close(sums[name], lost[name], atol=1e-5, rtol=0)


def other_states(rank: int, world: int) -> None:
    """A state that does not fit is refused, and the hook goes on with what it had."""
    state = _trained(rank, range(2), None)["hook"]
    hook, model = coded_hook(INT8), _network()
    hook.load_state_dict(model, state)
    names = state["lost"]
    for wrong, words in (
        ({"rank": rank + 1}, f"of rank {rank + 1} of {world}; allowed: of rank {rank} of {world}"),
        ({"world": world + 1}, f"of rank {rank} of {world + 1}; allowed: of rank {rank} of {world}"),
        ({"lost": {**names, "2.weight": torch.zeros(3)}}, r"of 2.weight, shape \(3,\); allowed: names of the model"),
        ({"lost": {"1.weight": torch.zeros(31)}}, r"of 1.weight, shape \(31,\); allowed: the shape \(1, 30\)"),
    ):
        with pytest.raises(ArgumentError, match=words):
            hook.load_state_dict(model, {**state, "calls": 99, **wrong})
        kept = hook.state_dict(model)
        assert kept["calls"] == state["calls"]
        assert all(torch.equal(kept["lost"][name], lost) for name, lost in names.items())


def converges(rank: int, world: int) -> float:
    """Fifteen values a number, of which each rank keeps what is lost. Returns the loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
    model.register_comm_hook(None, coded_hook(Codec(kind=CodecKind.MX4)))
    target = made(77, 64).reshape(1, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    for step in range(300):
        inputs = made(1_000 + 2 * step + rank, 64 * 32).reshape(32, 64)
        loss = (model(inputs) - inputs @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def differs(rank: int, world: int) -> None:
    """A hook whose seed differs: the backward pass of every rank raises, and says both."""
    model = DistributedDataParallel(torch.nn.Linear(300, 1, bias=False))
    codec = Codec(kind=CodecKind.INT8, stochastic=True, seed=5 + rank)
    model.register_comm_hook(None, coded_hook(codec))
    with pytest.raises(RuntimeError) as caught:
        model(made(rank, 300).reshape(1, 300)).sum().backward()
    assert "seed 5" in str(caught.value), caught.value
    assert "seed 6" in str(caught.value), caught.value


def of_a_group(rank: int, world: int) -> None:
    """All sums of a group with a codec are those of `all_reduce_coded`, and what has no codec stays exact."""
    codec = Codec(kind=CodecKind.INT8, block=64)
    group = dist.new_group(backend="sennit", pg_options=Options(codec=codec))
    for size in (1, 1_000, 100_003):
        for dtype in (torch.float32, torch.bfloat16):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor = made(rank, size).to(dtype)
                expected = tensor.clone()
                dist.all_reduce(tensor, op, group=group)
                all_reduce_coded(expected, codec, op)
                assert torch.equal(tensor, expected)
    numbers = torch.arange(5) + 1_000_003 * rank
    dist.all_reduce(numbers, group=group)
    assert torch.equal(numbers, world * torch.arange(5) + 1_000_003 * (world * (world - 1) // 2))
    exact = torch.full((3,), 1.0001, dtype=torch.float64)
    dist.all_reduce(exact, group=group)
    assert torch.equal(exact, torch.full((3,), 1.0001, dtype=torch.float64) * world)
    dist.destroy_process_group(group)
    for wrong, match in ((INT8, "stochastic rounding for all calls"), (Codec(kind=CodecKind.LOSSLESS), "LOSSLESS")):
        with pytest.raises(ArgumentError, match=match):
            Options(codec=wrong)


def is_coded(group: dist.ProcessGroup | None = None) -> bool:
    tensor = torch.tensor([1_000.0, 1.5])
    dist.all_reduce(tensor, group=group)
    return tensor[1].item() == 0


def kept_codec(rank: int, world: int, *, store: str) -> list[bool]:
    """Groups that are made of a group have its codec, and its other options."""
    options = Options(codec=Codec(kind=CodecKind.INT8), plan_cache_bytes=1 << 18)
    records = dist.FileStore(store, world)
    dist.init_process_group("sennit", store=records, rank=rank, world_size=world, pg_options=options)
    found = [is_coded(), is_coded(second_group())]
    elastic.reconfigure()
    found += [is_coded(), is_coded(second_group())]
    assert options_of(None) == options
    return found


def groups_differ(rank: int, world: int) -> None:
    codec = Codec(kind=(CodecKind.BF16, CodecKind.FP16)[rank])
    group = dist.new_group(backend="sennit", pg_options=Options(codec=codec))
    with pytest.raises(dist.DistBackendError, match=r"as (bf16, .* as fp16|fp16, .* as bf16)"):
        dist.all_reduce(torch.ones(100), group=group)


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "udp")])
def test_a_tensor_is_reduced_in_place(kept_world: WorldFactory, size: int, transport: str) -> None:
    kept_world(size, transport).run(in_place)


@pytest.mark.parametrize("feedback", [False, True])
def test_gradients_of_ddp_are_those_of_the_definition(kept_world: WorldFactory, feedback: bool) -> None:
    kept_world(2).run(hooked, feedback=feedback)


def test_a_run_goes_on_with_what_its_hook_had_kept(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(resumes, folder=str(tmp_path))


def test_feedback_survives_new_buckets(kept_world: WorldFactory) -> None:
    kept_world(2).run(rebuilt)


def test_states_of_another_rank_or_model_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(other_states)


def test_hooks_that_differ_are_refused_in_the_backward_pass(new_world: WorldFactory) -> None:
    new_world(2).run(differs)


def test_feedback_and_a_codec_between_hosts_are_refused_together() -> None:
    from sennit.runtime.backend.coded import coded_hook
    from sennit.transport.codecs import Codec, CodecKind
    from sennit.transport.errors import ArgumentError

    codec = Codec(kind=CodecKind.INT8, between_hosts=True)
    with pytest.raises(ArgumentError, match="error feedback with a codec between hosts alone; allowed: feedback=False"):
        coded_hook(codec)
    assert callable(coded_hook(codec, feedback=False))


def test_a_model_learns_with_four_bits_a_gradient(kept_world: WorldFactory) -> None:
    assert max(kept_world(2).run(converges)) < 1e-3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_may_have_a_codec_for_all_its_sums(kept_world: WorldFactory, size: int) -> None:
    kept_world(size).run(of_a_group)


def test_a_group_made_of_one_with_a_codec_has_it(new_world: WorldFactory, tmp_path: Path) -> None:
    assert new_world(2, backend="").run(kept_codec, store=str(tmp_path / "store")) == [[True] * 4] * 2


def test_ranks_whose_groups_have_other_codecs_are_refused(new_world: WorldFactory) -> None:
    new_world(2).run(groups_differ)
