# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type,union-attr,index,misc,assignment,operator"
"""A module on every rank, run slice by slice: the same bits in every world, and the gradients of plain torch."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.extent import briefly

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sennit.runtime.replicas import Along, SlicedReplicas
from sennit.runtime.replicas import replicas as replicas_module
from sennit.runtime.replicas.cutting import CutArguments, join
from sennit.runtime.sharded import Slices
from sennit.transport.errors import ArgumentError, ConfigError, MismatchError, SennitError, Unsupported
from tests.runtime import device_double
from tests.runtime.replica_training import FEATURES, VECTORS, WIDTH, Cross, batch, digest, mine, train
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(240)


def gradients(rank: int, world: int) -> None:
    """Results, gradients of parameters and of arguments are those of plain torch on the whole batch."""
    torch.manual_seed(5)
    model = Cross("sum").eval()  # No dropout.
    alone = copy.deepcopy(model)
    replicas = SlicedReplicas(model)
    for count in (64, 61):
        dense, _, labels = batch(count, count)
        part = mine(replicas, count)
        whole = torch.randn(VECTORS, count, WIDTH, requires_grad=True)
        own = whole.detach()[:, part].requires_grad_()
        expected_loss, expected_logits = alone(dense, whole, labels)
        losses, logits = replicas(dense[part], vectors=Along(own, 1), labels=labels[part], global_batch=count)
        (expected_loss / count).backward()
        replicas.loss(losses, count).backward()
        close = torch.testing.assert_close
        close(logits, expected_logits[part])
        close(replicas.global_loss(losses, count), expected_loss / count)
        close(own.grad, whole.grad[:, part])
        # Gradients are added to what is there, in both.
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


class Parts(nn.Module):
    """What a model may do with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.shared.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 1)
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.memory = nn.LSTM(4, 4, batch_first=True)

    def forward(self, given: dict[str, list[Tensor]], scale: Tensor, *, kind: str) -> dict[str, object]:
        x, flag = given["x"]
        y = self.frozen(self.tied(self.shared(x).relu())) * self.narrow * self.wide.float() * scale
        y = y + self.memory(x.unsqueeze(1))[0].squeeze(1)
        loss = y.square().mean()
        if flag.sum() > 0:
            loss = loss + self.sometimes(x).mean()
        return {"loss": loss, "kind": kind, "many": (y.argmax(1), [x[:, 0]])}


def parts(rank: int, world: int) -> str:
    """Shared, frozen, unused, narrow and wide parameters, nested arguments, several passes. Returns a hash."""
    torch.manual_seed(8)
    model = Parts()
    replicas = SlicedReplicas(model, slices=8)
    count = 24
    x = torch.randn(count, 4)
    flag = torch.zeros(count)
    flag[4] = 1  # Slice 1 alone.
    part = mine(replicas, count)
    arguments = ({"x": [x[part], flag[part]]}, torch.tensor(0.5))

    def step() -> Tensor:
        result = replicas(*arguments, kind="one")
        assert result["kind"] == "one"
        largest, (first,) = result["many"]
        assert largest.shape == first.shape == (part.stop - part.start,)
        assert torch.equal(first, x[part, 0])
        return replicas.loss(result["loss"])

    loss = step()
    loss.backward(retain_graph=True)
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert {"sometimes.weight", "shared.weight", "narrow", "wide", "memory.weight_ih_l0"} <= set(once)
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(once["sometimes.weight"], x[3:6].mean(0, keepdim=True) / 8)
    # Again through the same graph, and two forward passes in one backward pass: each adds the same.
    loss.backward()
    (step() + step()).backward()
    for name, parameter in model.named_parameters():
        if name in once:
            torch.testing.assert_close(parameter.grad, 4 * once[name])
    # Gradients kept slice by slice, in one sum.
    model.zero_grad()
    with replicas.no_sync():
        step().backward()
        step().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    step().backward()
    for name, parameter in model.named_parameters():
        if name in once:
            torch.testing.assert_close(parameter.grad, 3 * once[name])
    # What is forgotten is in no sum.
    with replicas.no_sync():
        step().backward()
    replicas.zero_grad()
    step().backward()
    for name, parameter in model.named_parameters():
        if name in once:
            torch.testing.assert_close(parameter.grad, once[name])
    # A backward pass that fails in its middle leaves nothing behind for the next one.
    model.zero_grad()
    failing = [True]

    def fail(gradient: Tensor) -> None:
        if failing:
            failing.clear()
            raise ZeroDivisionError

    own = x[part].requires_grad_()
    own.register_hook(fail)  # It comes after the gradients of parameters.
    loss = replicas.loss(replicas({"x": [own, flag[part]]}, torch.tensor(0.5), kind="one")["loss"])
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in once:
            torch.testing.assert_close(parameter.grad, once[name])
    # A layer is unfrozen, another one frozen.
    model.zero_grad()
    with replicas.no_sync():
        step().backward()
    model.frozen.requires_grad_(True)
    with pytest.raises(ArgumentError, match="parameters changed while no_sync held gradients"):
        step()
    model.frozen.requires_grad_(False)
    step().backward()
    model.zero_grad()
    model.frozen.requires_grad_(True)
    model.memory.requires_grad_(False)
    step().backward()
    assert model.frozen.weight.grad is not None
    assert model.memory.weight_ih_l0.grad is None
    with torch.no_grad():
        assert not replicas(*arguments, kind="two")["loss"].requires_grad
    return digest(*(p.grad for p in model.parameters() if p.grad is not None), *once.values())


def loss_outside(rank: int, world: int) -> str:
    """The loss is no part of the module."""
    torch.manual_seed(5)
    model = nn.Linear(FEATURES, 1)
    replicas = SlicedReplicas(model)
    dense, _, labels = batch(0, 37)
    part = mine(replicas, 37)
    logits = replicas(dense[part], global_batch=37).squeeze(1)
    losses = replicas.each_slice(
        nn.functional.binary_cross_entropy_with_logits, logits, labels[part], reduction="sum", global_batch=37
    )
    replicas.loss(losses, 37).backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(alone(dense).squeeze(1), labels).backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad)
    return digest(model.weight.grad, replicas.global_loss(losses, 37))


class Around(nn.Module):
    """Has a parameter of its own, too."""

    def __init__(self, replicas: SlicedReplicas) -> None:
        super().__init__()
        self.replicas = replicas
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, dense: Tensor) -> Tensor:
        losses: Tensor = self.replicas.each_slice(torch.mean, self.replicas(self.scale * dense))
        return losses


def compiled(rank: int, world: int) -> None:
    """A compiled module inside or around gives the bits of the module."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The compiler's own imports.
        for inner, is_around in ((model, False), (torch.compile(model, backend="aot_eager"), False), (model, True)):
            replicas = SlicedReplicas(inner)
            losses: Any = Around(replicas)
            if is_around:
                losses = torch.compile(losses, backend="aot_eager")
            model.zero_grad()
            for step in range(2):
                replicas.loss(losses(batch(step, 32)[0][mine(replicas, 32)])).backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def refusals(rank: int, world: int) -> None:
    """What a module, its arguments or ranks may not do. Each is refused on all ranks, and the group goes on."""
    last = rank == world - 1
    for wrong, match in (
        (
            lambda: SlicedReplicas(nn.Linear(2, 3 if last else 2, bias=False)),
            rf"weight: rank 0 has .* \(2, 2\) on cpu, rank {world - 1} has .* \(3, 2\)",
        ),
        (
            lambda: SlicedReplicas(nn.Linear(2, 2, dtype=torch.float64 if last else None)),
            r"rank 0 has torch.float32 .* has torch.float64",
        ),
        (lambda: SlicedReplicas(nn.Linear(2, 2, bias=not last)), "parameter bias: rank 0 has .* has nothing"),
        (lambda: SlicedReplicas(nn.Linear(2, 2), slices=16 if last else 8), "slices: rank 0 has 8, .* has 16"),
        (lambda: SlicedReplicas(nn.Linear(2, 2), seed=int(last)), "seed: rank 0 has 0, .* has 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            wrong()
    with pytest.raises(ConfigError, match="a power of two"):
        SlicedReplicas(nn.Linear(2, 2), slices=6)
    with pytest.raises(ArgumentError, match=r"parameter weight on meta; allowed: memory of the host or of a GPU"):
        SlicedReplicas(nn.Linear(2, 2, device="meta"))
    with device_double.Device(), pytest.raises(ArgumentError, match=r"bias on cpu, others on lazy:0; allowed: one"):
        SlicedReplicas(device_double.moved(nn.Linear(2, 2), device_double.DEVICE, ("weight",)))
    with pytest.raises(ArgumentError, match="parameter weight is not initialised"):
        SlicedReplicas(nn.LazyLinear(2))
    torch.set_num_threads(1 + last)
    with pytest.warns(UserWarning, match=r"threads: rank 0 has 1 .* has 2 .* bits may differ"):
        replicas = SlicedReplicas(nn.Linear(2, 2))
    torch.set_num_threads(1)
    with (
        mock.patch.object(replicas_module, "processor_maker", return_value=("AuthenticAMD", "GenuineIntel")[last]),
        pytest.warns(UserWarning, match=r"processor: rank 0 has AuthenticAMD .* has GenuineIntel .* bits may differ"),
    ):
        SlicedReplicas(nn.Linear(2, 2))

    count = 2 * (replicas.slices.own.high - replicas.slices.own.low)
    x = torch.ones(count, 2)
    for wrong, match in (
        (lambda: replicas(x, torch.ones(count + 1, 2)), r"argument \[0\]\[1\] has .* samples along dimension 0"),
        (lambda: replicas(Along(x, 2)), "has no dimension 2"),
        (lambda: replicas(x, x.numpy()[:, 0]), r"a ndarray of shape \(.,\), which is not cut into slices; allowed: te"),
        (lambda: replicas(x, Along([x.numpy()], 0)), r"a ndarray of shape \(., 2\), which is not cut"),
        (lambda: replicas(torch.tensor(1.0)), "no argument is a tensor with samples"),
        (lambda: replicas(x, global_batch=1000), "of a global batch of 1000 its slices"),
        (lambda: replicas(x[:0]), "a global batch of 0 samples for 8 slices leaves rank . without a sample"),
        (lambda: replicas(x, Along(torch.ones(1, requires_grad=True), None)), "goes whole to every slice and requires"),
        (lambda: replicas.loss(torch.ones(count, 2)), r"losses of shape .*; allowed: \(.,\)"),
        (lambda: SlicedReplicas(nn.Sequential(nn.BatchNorm1d(2)))(x), r"0 \(BatchNorm1d\) updates running statistics"),
        (lambda: SlicedReplicas(Counting())(x), "changed its buffer calls"),
        (lambda: SlicedReplicas(Counting(assigns=True))(x), "changed its buffer calls"),
        (lambda: SlicedReplicas(Reentrant())(x.clone().requires_grad_()), "give it use_reentrant=False"),
        (lambda: SlicedReplicas(Uneven())(x), r"slices gave the values \(1, 2.*; allowed: tensors, and values that"),
    ):
        with pytest.raises(SennitError, match=match):
            wrong()
    # Every pass is refused, also where a single slice is wrong.
    hiding = SlicedReplicas(Hidden())
    assert hiding(x).shape == x.shape
    hiding = SlicedReplicas(Hidden())
    late = x.index_fill(0, torch.tensor([count - 1]), 9)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="uses weight, which requires gradients, by a reference"):
            hiding(late)
    # A layer that came later is one of the module's, too.
    grown = SlicedReplicas(nn.Sequential(nn.Linear(2, 2, bias=False)))
    grown(x)
    grown.module.append(nn.Linear(2, 1, bias=False)).requires_grad_(True)
    for parameter in grown.parameters():
        nn.init.ones_(parameter)
    grown.loss(grown.each_slice(torch.mean, grown(x * (rank + 1)))).backward()
    own = replicas.slices.own
    total = torch.tensor(4.0 * (own.high - own.low) * (rank + 1) / replicas.slices.count)
    dist.all_reduce(total)
    torch.testing.assert_close(grown.module[1].weight.grad, (total / 2).expand(1, 2))
    grown.module.append(nn.BatchNorm1d(1))
    with pytest.raises(ConfigError, match="2 \\(BatchNorm1d\\) updates running statistics"):
        grown(x)
    assert SlicedReplicas(nn.BatchNorm1d(2, track_running_stats=False))(x).shape == x.shape
    assert SlicedReplicas(nn.BatchNorm1d(2).eval())(x).shape == x.shape

    sparse = SlicedReplicas(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(Unsupported, match="parameter weight has one; make it dense"):
        sparse.loss(sparse.each_slice(torch.mean, sparse(torch.zeros(count, dtype=torch.int64)))).backward()
    # Slices of three samples on the last rank, of two elsewhere: nothing is changed.
    uneven = torch.ones(count // 2 * 3, 2) if last else x
    with pytest.raises(MismatchError, match=rf"samples in the slices of rank 0 \[2.*rank {world - 1} \[3"):
        replicas.loss(replicas.each_slice(torch.mean, replicas(uneven)), 8).backward()
    assert all(parameter.grad is None for parameter in replicas.parameters())
    # A NaN of one slice is in the sum of all ranks.
    squares = replicas(x * float("nan") if last else x).square()
    replicas.loss(replicas.each_slice(torch.mean, squares)).backward()
    assert all(parameter.grad.isnan().all() for parameter in replicas.parameters())
    # Parameters that one rank changed by itself.
    replicas.digest()
    with torch.no_grad():
        next(replicas.parameters()).add_(last)
    with pytest.raises(SennitError, match=f"parameters or buffers of rank {world - 1} differ from those of rank 0"):
        replicas.digest()


class Counting(nn.Module):
    calls: Tensor

    def __init__(self, *, assigns: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return x


class Hidden(nn.Module):
    """Keeps its parameter in a list, too, and takes it from there for large samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.kept[0] if x.max() > 5 else self.weight)


def dies(rank: int, world: int) -> str:
    """The last rank dies between the forward and the backward pass. Returns the survivors' error."""
    replicas = SlicedReplicas(nn.Linear(2, 2))
    own = replicas.slices.own
    loss = replicas.loss(replicas.each_slice(torch.mean, replicas(torch.ones(own.high - own.low, 2))))
    if rank == world - 1:
        os._exit(0)
    with pytest.raises(SennitError) as caught:
        loss.backward()
    assert all(parameter.grad is None for parameter in replicas.parameters())
    return f"{type(caught.value).__name__}: {caught.value}"


class Reentrant(nn.Module):
    """Runs its layer again in the backward pass, outside of the slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> object:
        return checkpoint(self.layer, x, use_reentrant=True)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> object:
        self.calls += 1
        return self.calls, x


class Zoo(nn.Module):
    """Layers of many kinds, as wide as real ones: wide enough for the libraries' blocked kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64, padding_idx=0)
        self.bags = nn.EmbeddingBag(50, 64, mode="mean")
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        self.memory = nn.GRU(64, 64, batch_first=True)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.BatchNorm1d(64, track_running_stats=False)]
        )
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(64, 512))
        self.top = nn.Sequential(nn.GELU(), nn.Linear(512, 512), nn.SiLU(), nn.Dropout(0.3), nn.Linear(512, 10))

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        x = self.memory(x)[0][:, -1] + self.bags(words)
        x = self.norms[2](self.norms[1](x).tanh())
        loss: Tensor = nn.functional.cross_entropy(checkpoint(self.top, self.scaled(x), use_reentrant=False), labels)
        return loss


def zoo(rank: int, world: int) -> str:
    """Trains on slices of 2 and 3 samples and of 33. Returns a hash."""
    torch.manual_seed(2)
    replicas = SlicedReplicas(Zoo())
    optimizer = torch.optim.AdamW(replicas.parameters(), lr=0.01)
    for step, count in enumerate((264, 21)):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(50, (count, 9), generator=generator)
        labels = torch.randint(10, (count,), generator=generator)
        part = mine(replicas, count)
        optimizer.zero_grad()
        replicas.loss(replicas(words[part], labels[part], global_batch=count)).backward()
        torch.nn.utils.clip_grad_norm_(replicas.parameters(), 0.1)
        optimizer.step()
    return digest(*replicas.parameters())


def ranks_leave(rank: int, world: int) -> str:
    """A run goes on with fewer ranks at each step, in groups of their own. Returns a hash of rank 0's parameters."""
    torch.manual_seed(5)
    model = Cross("sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    passes = 0
    for step, count in enumerate((40, 51, 23)):
        members = list(range(max(world - step, 1)))
        group = dist.new_group(members)
        if rank in members:
            replicas = SlicedReplicas(model, group=group)
            replicas.passes = passes
            dense, ids, labels = batch(step, count)
            part = mine(replicas, count)
            vectors = torch.ones(30, WIDTH)[ids[:, part]]
            losses, _ = replicas(dense[part], Along(vectors, 1), labels[part], global_batch=count)
            optimizer.zero_grad()
            replicas.loss(losses, count).backward()
            optimizer.step()
            passes = replicas.passes
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.barrier()
    return digest(*model.parameters()) if rank == 0 else ""


def goes_on(rank: int, world: int) -> None:
    """A state has the number of passes, so other replicas go on with the random numbers of these."""
    dropped = [SlicedReplicas(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))) for _ in range(2)]
    x = torch.ones(16, 8)[mine(dropped[0], 16)]
    first = dropped[0](x)
    dropped[1].load_state_dict(dropped[0].state_dict())
    found, resumed = (replicas(x) for replicas in dropped)
    assert torch.equal(found, resumed)
    assert not torch.equal(first, found)
    again = pickle.loads(pickle.dumps(dropped[0]))
    following = [replicas(x) for replicas in (dropped[0], again)]
    assert torch.equal(*following)
    for replicas, losses in zip((dropped[0], again), following, strict=True):
        replicas.loss(replicas.each_slice(torch.mean, losses)).backward()
    pairs = zip(dropped[0].parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def gathered(rank: int, world: int) -> None:
    """Results of all samples, in their order, where slices have one size and where they have not."""
    replicas = SlicedReplicas(nn.Linear(1, 1))
    for count in (16, 37):
        whole = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(count), requires_grad=True)
        numbers = torch.arange(count)
        own = replicas.slices.own_samples(count)
        for every in (whole, whole.transpose(1, 2), numbers, numbers.to(torch.float64)):
            found = replicas.gathered(every[own], None if count == 16 else count)
            assert torch.equal(found, every)
            assert found.dtype is every.dtype
            assert not found.requires_grad
    with pytest.raises(ArgumentError, match="hold the samples"):
        replicas.gathered(whole[own][1:], 37)
    # A last batch of an evaluation, which has no samples for some ranks.
    model = Cross("mean").eval()
    replicas = SlicedReplicas(model)
    for count in (1, 2):
        dense, ids, labels = batch(count, count)
        part = mine(replicas, count)
        vectors = torch.ones(30, WIDTH)[ids]
        with torch.no_grad():
            losses, logits = replicas(dense[part], Along(vectors[:, part], 1), labels[part], global_batch=count)
            torch.testing.assert_close(replicas.gathered(logits, count), model(dense, vectors, labels)[1])
            assert losses.shape == replicas.each_slice(torch.mean, logits, global_batch=count).shape
        assert losses.shape == (sum(replicas.slices.sizes(replicas.slices.own, count)),)


def train_there(rank: int, world: int, device: str = "cpu", no_sync: bool = False) -> tuple[list[str], int]:
    """Three steps on `device` ("double": device_double). Returns hashes, and how often a step waited for it."""
    with device_double.Device() if device == "double" else contextlib.nullcontext() as double:
        there = device_double.DEVICE if device == "double" else torch.device(device)
        torch.manual_seed(5 if rank == 0 else rank)
        replicas = SlicedReplicas(device_double.moved(Cross("sum"), there), seed=3)
        optimizer = torch.optim.SGD(replicas.parameters(), lr=0.01, foreach=False)
        found, waits = [], 0
        for step, count in enumerate((104, 8, 37)):
            part = mine(replicas, count)
            dense, _, labels = batch(step, count)
            vectors = torch.randn(VECTORS, count, WIDTH, generator=torch.Generator().manual_seed(step))
            arguments = dense[part].to(there), Along(vectors[:, part].to(there), 1), labels[part].to(there)
            waits -= double.waits.total() if double else 0
            optimizer.zero_grad()
            if no_sync:
                with replicas.no_sync():
                    replicas.loss(replicas(*arguments, global_batch=count)[0], count).backward()
            losses = replicas(*arguments, global_batch=count)[0]
            replicas.loss(losses, count).backward()
            optimizer.step()
            total = replicas.global_loss(losses, count)
            waits += double.waits.total() if double else 0
            assert total.device.type == next(replicas.parameters()).grad.device.type == there.type
            found += [replicas.digest(), digest(total.cpu())]
    return found, waits


@pytest.mark.parametrize("no_sync", briefly([False, True], [True]))
def test_a_module_on_a_device_has_the_bits_of_the_host(kept_world: WorldFactory, no_sync: bool) -> None:
    """`device_double` fails where host and device are mixed."""
    wanted, _ = kept_world(1).run(train_there, no_sync=no_sync)[0]
    for world in (1, 3):
        for found, waits in kept_world(world).run(train_there, device="double", no_sync=no_sync):
            assert found == wanted
            assert waits == 3 * 2  # The gradients of a step, and its global loss.


@pytest.mark.gpu
def test_a_module_on_a_gpu_has_the_same_bits_in_every_world(new_world: WorldFactory) -> None:
    wanted = new_world(1).run(train_there, device="cuda:0")
    assert new_world(2).run(train_there, device="cuda:0") == wanted * 2


@pytest.mark.parametrize(
    "options",
    briefly([{}, {"no_sync": True}, {"autocast": "bfloat16"}, {"autocast": "float16"}], [{}, {"autocast": "bfloat16"}]),
    ids=["float32", "no_sync", "bfloat16", "float16"],
)
def test_five_steps_have_the_same_bits_in_every_world(kept_world: WorldFactory, options: dict[str, object]) -> None:
    worlds = [(1, "shm"), (2, "shm"), (3, "udp"), (8, "shm")]
    found = {world: kept_world(*world).run(train, **options) for world in worlds}
    alone = found[1, "shm"][0]
    for world, ranks in found.items():
        assert all(hashes == alone for hashes in ranks), (world, ranks, alone)


@pytest.mark.parametrize("case", [parts, loss_outside, zoo])
def test_what_models_do_has_the_same_bits_in_every_world(kept_world: WorldFactory, case: Callable[..., Any]) -> None:
    assert len({found for size in (1, 2, 3, 8) for found in kept_world(size).run(case)}) == 1


def test_a_run_goes_on_with_fewer_ranks(kept_world: WorldFactory) -> None:
    assert len({kept_world(size).run(ranks_leave)[0] for size in (1, 3, 4)}) == 1


def test_a_state_has_the_passes(kept_world: WorldFactory) -> None:
    kept_world(2).run(goes_on)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_plain_torch(kept_world: WorldFactory, size: int) -> None:
    kept_world(size).run(gradients)


def test_a_compiled_module_gives_the_same_bits(kept_world: WorldFactory) -> None:
    kept_world(2).run(compiled)


def test_what_is_refused_is_refused_on_all_ranks(kept_world: WorldFactory) -> None:
    kept_world(3).run(refusals)


def test_a_dead_rank_is_named(new_world: WorldFactory) -> None:
    survivor, dead = new_world(2).run(dies)
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


def jagged(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, *lengths]).cumsum(0))


def test_nested_tensors_are_cut_between_sequences() -> None:
    lengths = [2, 0, 1, 4, 3, 0, 5]
    rows = torch.randn(sum(lengths), 3, requires_grad=True)
    cut = CutArguments((jagged(rows, lengths), torch.ones(7)), Slices(count=4, rank=0, world_size=1), 7)
    assert cut.sizes == [1, 2, 2, 2]
    outputs, begin, first = [], 0, 0
    for number, ((part, _)) in cut:
        samples = cut.sizes[number]
        count = sum(lengths[first : first + samples])
        assert part.offsets().diff().tolist() == lengths[first : first + samples]
        assert torch.equal(part.values(), rows[begin : begin + count])
        assert part.values().data_ptr() % 64 == 0
        outputs.append(jagged(part.values() * number, part.offsets().diff().tolist()))
        begin, first = begin + count, first + samples
    joined = join(outputs, None)
    assert joined.offsets().diff().tolist() == lengths
    factors = torch.tensor([0] * 2 + [1] * 1 + [2] * 7 + [3] * 5).unsqueeze(1)
    assert torch.equal(joined.values(), rows * factors)
    weights = torch.randn(len(rows), 3)
    (joined.values() * weights).sum().backward()
    assert torch.equal(rows.grad, weights * factors)


def test_nested_tensors_that_cannot_be_cut_are_refused() -> None:
    slices = Slices(count=2, rank=0, world_size=1)
    whole = jagged(torch.randn(6, 2), [2, 1, 3])
    narrow = torch.nested.narrow(
        torch.randn(3, 4, 2), 1, torch.tensor([0, 1, 0]), torch.tensor([2, 1, 4]), torch.jagged
    )
    for wrong, what in (
        (narrow, "allowed: nested tensors of layout torch.jagged that are contiguous"),
        (whole.transpose(1, 2), "nested along another dimension than 1"),
        (Along(whole, 1), "has its samples along dimension 1; allowed: 0"),
    ):
        with pytest.raises(ArgumentError, match=what):
            CutArguments((wrong,), slices, None)
    with pytest.raises(ArgumentError, match="allowed: nested tensors"):
        join([whole, torch.ones(2, 2)], None)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_of_all_samples_are_gathered_in_their_order(kept_world: WorldFactory, world: int) -> None:
    kept_world(world).run(gathered)
