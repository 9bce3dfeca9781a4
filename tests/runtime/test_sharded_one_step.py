# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="arg-type,no-untyped-call"
"""One backward pass is one optimizer step of the rows, whichever lookups it reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sennit.runtime.backend.process_group import second_group
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Pooling
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import (
    Features,
    PeerInputError,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    TableStore,
    clip_grad_norm_,
)
from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.errors import ArgumentError, ConfigError, Unsupported
from tests.extent import briefly
from tests.runtime.sharded_training import rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)

ROWS, DIM, SAMPLES, EACH, RATE = 30, 4, 16, 3, 0.1
SGD = OptimizerSpec(kind=Optimizer.SGD)
ADAM = OptimizerSpec(kind=Optimizer.ADAM)
# Those of torch that leave rows without gradients alone, as ours do.
THEIRS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAGRAD: torch.optim.Adagrad,
    Optimizer.ADAM: torch.optim.SparseAdam,
}


def tables(spec: OptimizerSpec = SGD, *, names: tuple[str, ...] = ("user",), pooling: Pooling = Pooling.SUM) -> Any:
    def initial(rows: Tensor, generator: torch.Generator) -> None:
        rows.normal_(generator=generator)

    options: dict[str, Any] = {"rows": ROWS, "dim": DIM, "row_shards": 4, "initial": initial}
    return [Table(name=name, optimizer=spec, pooling=pooling, **options) for name in names]


def bags(
    spec: OptimizerSpec = SGD, *names: str, placement: str = "row_wise", gradients: str | None = "sum"
) -> ShardedEmbeddingBags:
    made = tables(spec, names=names or ("user",))
    return ShardedEmbeddingBags(made, lr=RATE, gradients=gradients, placement=placement)


def ids_of(number: int) -> Tensor:
    """[SAMPLES, EACH]: the ids of all ranks in a lookup. Rows repeat in it, and in others."""
    return (torch.arange(SAMPLES * EACH).view(SAMPLES, EACH) * (7 + number) + number) % (ROWS - 3)


def own(module: ShardedTables, whole: Tensor) -> Tensor:
    """This rank's samples."""
    return whole[module.slices.own_samples(len(whole))]


def looked_up(module: ShardedTables, given: Any) -> Tensor:
    """The results of the first table. `given`: its ids, or what a module takes."""
    found: Tensor = module({"user": given} if isinstance(given, Tensor) else given)["user"]
    return found


class Later:
    """A call of another thread."""

    def __init__(self, call: Future[Any]) -> None:
        self._call = call

    @property
    def is_done(self) -> bool:
        return self._call.done()

    def result(self) -> Any:
        return self._call.result(timeout=60)


@contextlib.contextmanager
def beside(module: ShardedTables, world: int) -> Iterator[list[str]]:
    """Inside, lookups and updates run in another thread. Yields their names."""
    names: list[str] = []
    group = second_group(None) if world > 1 else None
    with ThreadPoolExecutor(1) as thread:

        def run(name: str, call: Callable[[], Any]) -> Later:
            names.append(name)
            return Later(thread.submit(call))

        module.overlap(run, group)
        try:
            yield names
        finally:
            module.overlap(None)
    if group is not None:
        dist.destroy_process_group(group)


def three_lookups(
    rank: int, world: int, kind: str, placement: str, optimizer: str, in_thread: bool, folder: str | None = None
) -> str:
    """Three lookups in each of three losses, against torch's own tables with all samples. Returns the digest.

    `folder`: where tables are in files.
    """
    spec = OptimizerSpec(kind=Optimizer(optimizer))
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    store = None if folder is None else TableStore(folder=Path(folder), memory_bytes=200_000)
    module = made(tables(spec, pooling=pooling), lr=RATE, gradients="sum", placement=placement, store=store)
    reference = nn.Parameter(rows_of(module, world))
    steps = THEIRS[spec.kind]([reference], lr=RATE)
    sparse = spec.kind is Optimizer.ADAM
    part = module.slices.own_samples(SAMPLES)

    def theirs(number: int, weights: Tensor | None) -> Tensor:
        if kind == "sequences":
            return nn.functional.embedding(ids_of(number), reference, sparse=sparse)
        options: dict[str, Any] = {"mode": "sum", "sparse": sparse}
        return nn.functional.embedding_bag(ids_of(number), reference, per_sample_weights=weights, **options)

    def ours(number: int, weights: Tensor | None) -> Tensor:
        mine = ids_of(number)[part]
        if weights is None:
            return looked_up(module, mine).view(len(mine), -1)
        lengths = torch.full((1, len(mine)), EACH)
        return looked_up(module, Features(lengths=lengths, values=mine.flatten(), weights=weights))

    def loss(look_up: Callable[[int, Tensor | None], Tensor], first: int, weights: list[Tensor | None]) -> Tensor:
        one, two, three = (look_up(first + number, weights[number]) for number in range(3))
        return (one * two + 0.25 * three * three).sum()

    with beside(module, world) if in_thread else contextlib.nullcontext():
        for step in range(3):
            given: list[Tensor | None] = [None, None, None]
            if kind == "weighted":
                # The last lookup has none: a weight of 1 is what that means.
                given[:2] = [(ids_of(place) * 0.1 - 1).requires_grad_() for place in (5, 6)]
            mine = [None if one is None else one.detach()[part].flatten().requires_grad_() for one in given]
            steps.zero_grad()
            loss(theirs, 3 * step, given).backward()
            steps.step()
            loss(ours, 3 * step, mine).backward()
            for found, wanted in zip(mine, given, strict=True):
                if found is not None and wanted is not None:
                    assert found.grad is not None
                    assert wanted.grad is not None
                    torch.testing.assert_close(found.grad, wanted.grad[part].flatten(), rtol=1e-4, atol=1e-4)
            module.check()
            torch.testing.assert_close(rows_of(module, world), reference.detach(), rtol=1e-4, atol=1e-4)
    assert module.state_dict()["steps"].tolist() == [3]
    digest = module.digest()
    module.close()
    return digest


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    briefly(
        [("bags", "sgd"), ("bags", "adam"), ("weighted", "adagrad"), ("sequences", "adam")],
        [("weighted", "adagrad"), ("sequences", "adam")],
    ),
)
def test_all_lookups_of_a_loss_make_one_step(
    kept_world: WorldFactory, kind: str, optimizer: str, tmp_path: Path
) -> None:
    ways = [(1, "table_wise", False), (1, "row_wise", True), (2, "row_wise", False), (2, "data_parallel", True)]
    arguments: dict[str, Any] = {"kind": kind, "optimizer": optimizer}
    found = {
        digest
        for world, placement, in_thread in [*ways, (4, "row_wise", True)]
        for digest in kept_world(world).run(three_lookups, placement=placement, in_thread=in_thread, **arguments)
    }
    assert len(found) == 1
    arguments |= {"placement": "row_wise", "in_thread": kind == "bags", "folder": str(tmp_path)}
    assert set(kept_world(2).run(three_lookups, **arguments)) == found


def outside_of_the_loss(rank: int, world: int, kind: str, placement: str) -> None:
    """Neither rows nor states of a table that no rank's loss depends on move. One rank's loss is enough."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    both = [*tables(ADAM, names=("user", "item"), pooling=pooling), *tables(SGD, names=("shop",), pooling=pooling)]
    module = made(both, lr=RATE, gradients="sum", placement=placement)
    mine = own(module, ids_of(1))

    def changed(*names: str) -> list[str]:
        before = {key: one.clone() for key, one in module.state_dict().items()}
        found = module({"user": mine, "item": mine, "shop": mine})
        torch.autograd.backward([found[name].sum() for name in names])
        module.check()
        moved = [key for key, one in module.state_dict().items() if not torch.equal(one, before[key])]
        return sorted({"steps" if key == "steps" else key.split("/")[0] for key in moved})

    everything: list[Any] = [None] * world

    def of_all(*names: str) -> set[str]:
        dist.all_gather_object(everything, changed(*names))
        return set().union(*everything)

    assert of_all("user", "item", "shop") == {"user", "item", "shop", "steps"}
    assert of_all("user") == {"user", "steps"}
    assert module.state_dict()["steps"].tolist() == [2, 2, 1]
    assert of_all("shop") == {"shop", "steps"}
    assert module.state_dict()["steps"].tolist() == [2, 2, 2]
    assert of_all(*(("user", "item") if rank == 0 else ("user",))) == {"user", "item", "steps"}
    # Some lookups of a step have blocks of a table, and others none.
    first, last = (module({"user": mine, "item": mine, "shop": mine}) for _ in range(2))
    (first["user"].sum() + last["item"].sum() + last["user"].sum()).backward()
    module.check()
    assert module.state_dict()["steps"].tolist() == [4, 4, 2]
    module.digest()


@pytest.mark.parametrize("placement", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_table_outside_of_the_loss_does_not_move(kept_world: WorldFactory, kind: str, placement: str) -> None:
    kept_world(2).run(outside_of_the_loss, kind=kind, placement=placement)


class Wrapped(nn.Module):
    """Tables and a dense layer, as DDP takes them."""

    def __init__(self, embeddings: ShardedEmbeddingBags) -> None:
        super().__init__()
        self.embeddings, self.top = embeddings, nn.Linear(DIM, 1)
        nn.init.ones_(self.top.weight)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.top(looked_up(self.embeddings, ids))
        return found


def accumulated(rank: int, world: int, how: str, in_thread: bool) -> None:
    """Passes inside `no_sync` update nothing. The next one takes one step with all, or `zero_grad` forgets them."""
    module = bags(ADAM, gradients=None)
    first, last = own(module, ids_of(1)), own(module, ids_of(2))
    model: Any = Wrapped(module)
    held: Callable[[], contextlib.AbstractContextManager[None]] = module.no_sync
    if how == "DDP":
        model = DistributedDataParallel(model)
        held = model.no_sync
    elif how == "replicas":
        replicas = SlicedReplicas(model.top)
        held, model = replicas.no_sync, lambda ids: replicas(looked_up(module, ids))

    def passed(ids: Tensor, *, holds: bool) -> None:
        with held() if holds else contextlib.nullcontext():
            model(ids).sum().backward()

    before = rows_of(module, world)
    with beside(module, world) if in_thread else contextlib.nullcontext():
        passed(first, holds=True)
        assert torch.equal(rows_of(module, world), before)
        passed(last, holds=False)
        assert module.state_dict()["steps"].tolist() == [1]
        both = rows_of(module, world)
        used = torch.cat([ids_of(1).flatten(), ids_of(2).flatten()]).unique()
        assert (both != before).any(1).nonzero().flatten().tolist() == used.tolist()
        # What is forgotten is in no step.
        for forget in (module.optimizer.zero_grad, module.zero_grad):
            passed(torch.full_like(first, ROWS - 1), holds=True)
            forget()
            passed(last, holds=False)
            module.check()
            assert torch.equal(rows_of(module, world)[-1], before[-1])
    assert module.state_dict()["steps"].tolist() == [3]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("how", ["tables", "DDP", "replicas"])
def test_no_sync_holds_tables_too(kept_world: WorldFactory, how: str, in_thread: bool) -> None:
    kept_world(2).run(accumulated, how=how, in_thread=in_thread)


def not_all_lookups_get_gradients(rank: int, world: int, in_thread: bool) -> None:
    """Results that are dropped, kept without a gradient, or in another loss hold nobody up."""
    module, other = bags(ADAM), bags(ADAM)
    first, second, third = (own(module, ids_of(number)) for number in range(3))

    with beside(module, world) if in_thread else contextlib.nullcontext() as names:
        kept = looked_up(module, third)  # As an evaluation that forgets `no_grad`.
        looked_up(module, third)
        (looked_up(module, first) * looked_up(module, second)).sum().backward()
        (looked_up(other, first) * looked_up(other, second)).sum().backward()
        assert module.digest() == other.digest()
        # Losses of several lookups, one after the other: each is a step.
        real, fake = looked_up(module, first), looked_up(module, second)
        wanted, also = looked_up(other, first), looked_up(other, second)
        fake.sum().backward()
        real.sum().backward()
        also.sum().backward()
        wanted.sum().backward()
        assert module.digest() == other.digest()
        kept.sum().backward()
        looked_up(other, third)
        module.check()
        assert module.state_dict()["steps"].tolist() == [4]
        looked_up(module, first).sum().backward()
        if names is not None:
            # Where nothing else waits, the last gradients and the update are one task.
            assert names[-2:] == ["lookup", "sparse update"]


@pytest.mark.parametrize("in_thread", [False, True])
def test_lookups_without_gradients_hold_nobody_up(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(not_all_lookups_get_gradients, in_thread=in_thread)


def recomputed(rank: int, world: int) -> None:
    """A lookup inside an activation checkpoint is in the same step as those outside."""
    module, other = bags(ADAM), bags(ADAM)
    first, second = own(module, ids_of(1)), own(module, ids_of(2))
    needed = torch.ones(1, requires_grad=True)

    def squared(one: Tensor) -> Tensor:
        return (looked_up(module, first) * one).square()

    for reentrant in (False, True):
        outside = looked_up(module, second)
        (checkpoint(squared, needed, use_reentrant=reentrant) * outside).sum().backward()
        (looked_up(other, first).square() * looked_up(other, second)).sum().backward()
        assert module.digest() == other.digest()
    with beside(module, world):
        # The later lookup gives first, and the update begins, because nothing says that another will be made again.
        inside = checkpoint(squared, needed, use_reentrant=True)
        loss = (inside * looked_up(module, second)).sum()
        with pytest.raises(ArgumentError, match="in a backward pass that has updated rows already"):
            loss.backward()


def test_recomputed_lookups_are_in_the_step(kept_world: WorldFactory) -> None:
    kept_world(2).run(recomputed)


def failed(rank: int, world: int, in_thread: bool) -> None:
    """The gradients of a pass that raises are in no step. Those that were kept before it are."""
    module, other = bags(ADAM), bags(ADAM)
    first, second = own(module, ids_of(1)), own(module, ids_of(2))
    spared = torch.full_like(first, ROWS - 1)

    def raises(gradient: Tensor) -> None:
        raise OSError("of the model")

    with beside(module, world) if in_thread else contextlib.nullcontext():
        for one in (module, other):
            with one.no_sync():
                looked_up(one, first).sum().backward()
        fails, gives = (looked_up(module, spared) for _ in range(2))
        fails.register_hook(raises)
        with pytest.raises(OSError, match="of the model"):
            (fails + gives).sum().backward()
        for one in (module, other):
            looked_up(one, second).sum().backward()
        assert module.state_dict()["steps"].tolist() == [1]
        assert module.digest() == other.digest()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_pass_that_fails_takes_no_step(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(failed, in_thread=in_thread)


def looked_up_by_another_thread(rank: int, world: int, in_thread: bool) -> None:
    """A thread that looks rows up while a backward pass runs, as for an evaluation, disturbs no step."""
    module, other = bags(ADAM), bags(ADAM)
    first, second = own(module, ids_of(1)), own(module, ids_of(2))
    found: list[Tensor] = []

    def look() -> None:
        with torch.no_grad():
            found.append(looked_up(module, first))

    def look_beside(gradient: Tensor) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(look).result(timeout=60)

    with beside(module, world) if in_thread else contextlib.nullcontext():
        one, two = looked_up(module, first), looked_up(module, second)
        one.register_hook(look_beside)
        (one + two).sum().backward()
        module.check()
    (looked_up(other, first) + looked_up(other, second)).sum().backward()
    assert module.state_dict()["steps"].tolist() == [1]
    assert module.digest() == other.digest()
    assert torch.equal(found[0], one)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_lookup_of_another_thread_leaves_a_running_pass_alone(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(looked_up_by_another_thread, in_thread=in_thread)


class Inner(torch.autograd.Function):
    """Runs a backward pass of its own inside that of its result."""

    @staticmethod
    def forward(context: Any, value: Tensor, loss: Tensor) -> Tensor:
        context.loss = loss
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            context.loss.backward()
        return gradient, None


def repeated(rank: int, world: int) -> None:
    """Each pass through a graph is a step; passes inside passes are refused, and passes with lookups of two steps."""
    module = bags(SGD)
    first = own(module, ids_of(1))
    before = rows_of(module, world)
    found = looked_up(module, first)
    found.sum().backward(retain_graph=True)
    found.sum().backward()
    counts = torch.bincount(ids_of(1).flatten(), minlength=ROWS).unsqueeze(1)
    torch.testing.assert_close(rows_of(module, world), before - 2 * RATE * counts)
    module.zero_grad()
    outer, inner = (looked_up(module, first) for _ in range(2))
    found = Inner.apply(outer, inner.sum())
    with pytest.raises(ArgumentError, match="a backward pass inside another one"):
        (found + looked_up(module, first)).sum().backward()
    with beside(module, world):
        kept, other = (looked_up(module, first) for _ in range(2))
        other.sum().backward()
        with pytest.raises(ArgumentError, match="made before the last backward pass"):
            (kept + looked_up(module, first)).sum().backward()


def test_each_backward_pass_is_a_step(kept_world: WorldFactory) -> None:
    kept_world(2).run(repeated)


def scaled(rank: int, world: int, in_thread: bool, in_step: bool) -> list[float]:
    """Float16 and a GradScaler, against torch's own: the first scales overflow. Returns the scales.

    `in_step`: rows are updated by the optimizer's step, clipped, in place of the backward pass.
    """
    module = bags(SGD)
    reference = nn.EmbeddingBag.from_pretrained(rows_of(module, world), freeze=False, mode="sum")
    theirs = torch.optim.SGD(reference.parameters(), lr=RATE)
    top = nn.Linear(DIM, 1, bias=False)
    nn.init.constant_(top.weight, 0.5)
    top.requires_grad_(False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2) for _ in range(2)]
    mine = module.slices.own_samples(SAMPLES)
    module.optimizer.scaler = scalers[0]
    # Only the samples of rank 0 overflow.
    factors = torch.where(torch.arange(SAMPLES) == 0, 1.0, 1e-3).unsqueeze(1)

    def passed(vectors: Tensor, factors: Tensor, scaler: torch.amp.GradScaler) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = top(vectors)
        scaler.scale((logits.square() * factors).sum()).backward()

    scales = [scalers[0].get_scale()]
    with beside(module, world) if in_thread else contextlib.nullcontext():
        for step in range(8):
            before = rows_of(module, world)
            module.zero_grad()
            with module.no_sync() if in_step else contextlib.nullcontext():
                passed(looked_up(module, ids_of(step)[mine]), factors[mine], scalers[0])
            theirs.zero_grad()
            passed(reference(ids_of(step)), factors, scalers[1])
            scalers[1].unscale_(theirs)
            if in_step:
                norm = clip_grad_norm_([], [module], 0.5)
                wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                torch.testing.assert_close(norm, wanted, rtol=1e-3, atol=1e-5, equal_nan=True)
            scalers[0].step(module.optimizer)
            scalers[1].step(theirs)
            for scaler in scalers:
                scaler.update()
            module.check()
            torch.testing.assert_close(rows_of(module, world), reference.weight.detach(), rtol=1e-4, atol=1e-5)
            assert scalers[0].get_scale() == scalers[1].get_scale()
            is_skipped = torch.equal(rows_of(module, world), before)
            assert is_skipped == (scalers[0].get_scale() < scales[-1])
            scales.append(scalers[0].get_scale())
    taken = module.state_dict()["steps"].item()
    assert 0 < taken < 8
    with pytest.raises(ArgumentError, match=r"a scaler of type int; allowed: a torch\.amp\.GradScaler, or None"):
        module.optimizer.scaler = 3  # type: ignore[assignment]
    # Without one, rows say that their gradients are not finite.
    module.optimizer.scaler = None
    looked_up(module, ids_of(0)[mine]).backward(torch.full((len(ids_of(0)[mine]), DIM), torch.inf))
    with pytest.raises(GradientError):
        module.check()
    return scales


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_grad_scaler_scales_tables(kept_world: WorldFactory, in_thread: bool, in_step: bool) -> None:
    first, second = kept_world(2).run(scaled, in_thread=in_thread, in_step=in_step)
    assert first == second


class Overflowing(nn.Module):
    """Only the gradients of tables are not finite. Those of `bottom` come after them."""

    def __init__(self, embeddings: ShardedEmbeddingBags) -> None:
        super().__init__()
        self.embeddings, self.bottom = embeddings, nn.Linear(1, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        dense: Tensor = self.bottom(torch.ones(len(ids), 1))
        found = looked_up(self.embeddings, ids)
        found.register_hook(lambda gradient: gradient * torch.inf)
        return dense + found


def overflows_in_tables(rank: int, world: int) -> None:
    """The scale falls though dense gradients are finite, and DDP sets the gradients of all parameters last.

    An optimizer of all parameters has those that stand for tables, and so takes no step either.
    """
    module = bags(ADAM, gradients="mean")
    model = DistributedDataParallel(Overflowing(module))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module.optimizer.scaler = scaler
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    before, dense = rows_of(module, world), [one.clone() for one in model.parameters()]
    scaler.scale(model(own(module, ids_of(1))).sum()).backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.module.bottom.parameters())
    scaler.step(optimizer)
    scaler.step(module.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    assert all(torch.equal(*both) for both in zip(model.parameters(), dense, strict=True))
    assert torch.equal(rows_of(module, world), before)
    assert module.state_dict()["steps"].tolist() == [0]


def test_an_overflow_in_tables_lowers_the_scale(kept_world: WorldFactory) -> None:
    kept_world(2).run(overflows_in_tables)


def clipped(rank: int, world: int, placement: str, in_thread: bool) -> tuple[str, list[float]]:
    """Dense gradients and those of tables clipped by one norm, against torch's own. Returns digest and norms."""
    module = bags(SGD, "user", "item", placement=placement)
    replicas = SlicedReplicas(nn.Linear(2 * DIM, 1, bias=False))
    nn.init.constant_(replicas.module.weight, 0.5)
    optimizer = torch.optim.SGD(replicas.parameters(), lr=RATE)
    whole = bags(SGD, "user", "item", placement="data_parallel")
    rows = [held.weight.clone() for held in sorted(whole.held(), key=lambda one: one.name)]
    users, items = (nn.Parameter(torch.cat(part)) for part in (rows[4:], rows[:4]))
    top = nn.Linear(2 * DIM, 1, bias=False)
    nn.init.constant_(top.weight, 0.5)
    everything = [users, items, top.weight]
    theirs = torch.optim.SGD(everything, lr=RATE)
    norms = []
    with beside(module, world) if in_thread else contextlib.nullcontext():
        for step, most in enumerate((1.0, 1e6, 20.0)):
            mine = own(module, ids_of(step))
            with module.no_sync():
                found = module({"user": mine, "item": mine % 7})
                replicas(torch.cat([found["user"], found["item"]], 1)).square().sum().backward()
            norm = clip_grad_norm_(replicas.parameters(), [module], most)
            optimizer.step()
            module.optimizer.step()
            optimizer.zero_grad()
            module.check()
            ids = ids_of(step)
            summed = [nn.functional.embedding_bag(*both, mode="sum") for both in ((ids, users), (ids % 7, items))]
            top(torch.cat(summed, 1)).square().sum().backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(everything, most), rtol=1e-4, atol=1e-4)
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(rows_of(module, world), users.detach(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(replicas.module.weight, top.weight, rtol=1e-4, atol=1e-4)
            norms.append(float(norm))
        assert norms[0] > 1
        assert module.state_dict()["steps"].tolist() == [3, 3]
        # A frozen table has no part in the norm.
        module["item"].frozen = True
        with module.no_sync():
            looked_up(module, {"user": mine, "item": mine}).sum().backward()
        of_users = module.grad_norm()
        module.zero_grad()
        with module.no_sync():
            torch.cat(list(module({"user": mine, "item": mine}).values())).sum().backward()
        assert module.grad_norm() == of_users
        module.optimizer.step()
        with pytest.raises(ArgumentError, match="updated their rows in the backward pass"):
            clip_grad_norm_([], [module], 1.0)
        with pytest.raises(ArgumentError, match=r"max_norm 0\.0; allowed: above 0"):
            clip_grad_norm_([], [module], 0.0)
    train = ShardedEmbeddingBags([Table(name="user", rows=1000, dim=DIM, train_rank=2)], lr=RATE)
    with train.no_sync():
        looked_up(train, own(train, ids_of(1))).sum().backward()
    with pytest.raises(Unsupported, match="table user is a tensor train"):
        clip_grad_norm_([], [train], 1.0)
    return module.digest(), norms


def test_tables_are_clipped_with_dense_gradients(kept_world: WorldFactory) -> None:
    ways = [(1, "table_wise", False), (2, "row_wise", False), (2, "data_parallel", True), (4, "row_wise", True)]
    found = [
        answer
        for world, placement, in_thread in ways
        for answer in kept_world(world).run(clipped, placement=placement, in_thread=in_thread)
    ]
    assert all(one == found[0] for one in found)


def forgets_what_a_model_zeroes(rank: int, world: int) -> None:
    """`zero_grad` of a model or an optimizer takes the gradients of what stands for tables away."""
    module = bags(SGD)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    before = rows_of(module, world)
    for forget in (optimizer.zero_grad, nn.Sequential(module).zero_grad):
        with module.no_sync():
            looked_up(module, own(module, ids_of(0))).sum().backward()
        forget()
    looked_up(module, own(module, ids_of(1))).sum().backward()
    found = rows_of(module, world)
    other = bags(SGD)
    assert torch.equal(rows_of(other, world), before)
    looked_up(other, own(other, ids_of(1))).sum().backward()
    assert torch.equal(rows_of(other, world), found)


def test_zero_grad_of_a_model_forgets_what_is_kept(kept_world: WorldFactory) -> None:
    kept_world(2).run(forgets_what_a_model_zeroes)


def recovers(rank: int, world: int) -> None:
    """After an overflow of what is kept, dense weights are finite, and the next step is taken."""
    module, dense = bags(SGD), nn.Linear(1, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(dense.parameters(), lr=RATE)
    module.optimizer.scaler = scaler
    before = rows_of(module, world)
    for factor in (torch.inf, 1.0):
        with module.no_sync():
            found = looked_up(module, own(module, ids_of(0)))
            found.register_hook(lambda gradient, factor=factor: gradient * factor)
            scaler.scale(found.sum() + dense(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(dense.parameters(), [module], 1e6)
        assert bool(norm.isfinite()) == (factor == 1)
        scaler.step(optimizer)
        scaler.step(module.optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert dense.weight.isfinite().all()
        assert torch.equal(rows_of(module, world), before) == (factor != 1)
    assert scaler.get_scale() == 2


def test_an_overflow_of_what_is_kept_is_forgotten(kept_world: WorldFactory) -> None:
    kept_world(2).run(recovers)


def needs_to_be_told(rank: int, world: int) -> None:
    module = bags(SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(looked_up(module, own(module, ids_of(0))).sum()).backward()
    with pytest.raises(ArgumentError, match=r"set `embeddings\.optimizer\.scaler = scaler` before"):
        scaler.step(module.optimizer)
    with pytest.raises(ArgumentError, match="a group of parameters for the optimizer of tables"):
        module.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    # No warning, though the backward pass took the step.
    torch.optim.lr_scheduler.StepLR(module.optimizer, 1).step()


def test_an_optimizer_of_tables_says_what_it_lacks(kept_world: WorldFactory) -> None:
    kept_world(2).run(needs_to_be_told)


def first_seen_without_gradients(rank: int, world: int) -> None:
    """The mode of the call counts, and not that of who looks at its results first."""
    module = bags()
    before = rows_of(module, world)
    with beside(module, world):
        found = module({"user": own(module, ids_of(0))})
        with torch.inference_mode() if rank else torch.no_grad():
            found["user"].mean()
        found["user"].sum().backward()
        module.check()
    assert not torch.equal(rows_of(module, world), before)


def test_results_that_are_first_looked_at_without_gradients_train(kept_world: WorldFactory) -> None:
    kept_world(2).run(first_seen_without_gradients)


def fails_between(rank: int, world: int) -> None:
    """A pass that raises leaves what passes before it have kept, and whether that was finite."""
    module, other = bags(), bags()

    def fail(_: Tensor) -> Tensor:
        raise ValueError("a hook")

    for one, is_tried in ((module, True), (other, False)):
        with one.no_sync():
            looked_up(one, own(one, ids_of(0))).sum().backward()
        if is_tried:
            layer = nn.Linear(1, 1)
            layer(torch.ones(1, 1)).sum().backward()
            with one.no_sync():
                ahead = torch.ones(1, requires_grad=True) * 1
                ahead.register_hook(fail)
                found = looked_up(one, own(one, ids_of(1)))
                with pytest.raises(ValueError, match="a hook"):
                    (found.sum() + ahead.sum()).backward()
    assert module.grad_norm() == other.grad_norm()
    for one in (module, other):
        one.optimizer.step()
    assert torch.equal(rows_of(module, world), rows_of(other, world))


def test_a_pass_that_raises_adds_nothing_to_what_is_kept(kept_world: WorldFactory) -> None:
    kept_world(2).run(fails_between)


def refused_lookups(rank: int, world: int) -> None:
    module = bags()
    first, second = (looked_up(module, own(module, ids_of(number))) for number in range(2))
    with pytest.raises(ArgumentError, match=f"a loss of lookup {rank} .* depends on lookup {1 - rank} instead"):
        (second if rank else first).sum().backward()
    mine = own(module, ids_of(0))
    weights = torch.ones(mine.numel(), requires_grad=True)
    lengths = torch.full((1, len(mine)), EACH)
    for write in (
        lambda: module["user"].set_rows(torch.arange(1), torch.ones(1, DIM)),
        lambda: module.load_state_dict(module.state_dict()),
        lambda: [one.add_(1) for name, one in module.state_dict().items() if name.endswith("weight")],
    ):
        found = looked_up(module, Features(lengths=lengths, values=mine.flatten(), weights=weights))
        write()
        with pytest.raises(ArgumentError, match="no step, load or `set_rows` between a lookup and its backward pass"):
            found.sum().backward()


def test_lookups_that_ranks_cross_and_stale_rows_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refused_lookups)


def seen_in_the_pass(rank: int, world: int, in_thread: bool) -> None:
    """A backward pass that ranks make differently raises on all ranks, and changes nothing."""

    def scaled(module: ShardedEmbeddingBags, init_scale: float) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        scaler.scale(torch.ones(1))
        module.optimizer.scaler = scaler

    def held(module: ShardedEmbeddingBags) -> Any:
        return module.no_sync() if rank == 0 else contextlib.nullcontext()

    def scaler_on_one(module: ShardedEmbeddingBags) -> Any:
        if rank == 0:
            scaled(module, 4.0)
        return contextlib.nullcontext()

    def other_scale(module: ShardedEmbeddingBags) -> Any:
        scaled(module, 4.0 + rank)
        return contextlib.nullcontext()

    ways: dict[str, Callable[[ShardedEmbeddingBags], Any]] = {
        "a backward pass (in|out)side of no_sync, on another rank (in|out)side; allowed": held,
        r"(a GradScaler of scale 4\.0|no GradScaler) .*, on another rank (a GradScaler|no GradScaler)": scaler_on_one,
        r"scale [45]\.0 .*, on another rank a GradScaler of scale [54]\.0; allowed: the same on all": other_scale,
    }

    def passed(module: ShardedEmbeddingBags) -> None:
        looked_up(module, own(module, ids_of(0))).sum().backward()
        module.finish()

    for text, way in ways.items():
        module = bags()
        before = rows_of(module, world)
        with (
            beside(module, world) if in_thread else contextlib.nullcontext(),
            way(module),
            pytest.raises(ArgumentError, match=text),
        ):
            passed(module)
        assert torch.equal(rows_of(module, world), before)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_pass_that_ranks_make_differently_is_refused(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(seen_in_the_pass, in_thread=in_thread)


def seen_in_the_next_call(rank: int, world: int, in_thread: bool) -> None:
    """What one rank alone does between passes raises on all ranks in the next call, once."""
    module = bags()

    def kept() -> None:
        with module.no_sync():
            looked_up(module, own(module, ids_of(0))).sum().backward()

    def first_zeroes(zero_grad: Callable[[], None]) -> None:
        kept()
        if rank == 0:
            zero_grad()

    def first_steps(also: Callable[[], None] = lambda: None) -> None:
        kept()
        (module.optimizer.step if rank == 0 else also)()

    def first_multiplies() -> None:
        kept()
        if rank == 0:
            module.multiply_grads(0.5)
        module.optimizer.step()

    def moves() -> None:
        module.move(module.placement)

    for call in (module.grad_norm, moves, module.check):
        first_steps()
        # An error of one rank alone comes before what ranks compare.
        with pytest.raises((ConfigError, ArgumentError, PeerInputError)):
            call()
        module.optimizer.zero_grad()
        module.check()
    ways: list[tuple[Callable[[], None], str]] = [
        (first_multiplies, r"multiply_grads\): rank 0 has 0.5, rank 1 has 1.0"),
        (lambda: first_zeroes(module.zero_grad), r"no_sync\): rank 0 has 0, rank 1 has 1"),
        (lambda: first_zeroes(nn.Sequential(module).zero_grad), r"no_sync\): rank 0 has 0, rank 1 has 1"),
        (first_steps, r"no_sync\): rank 0 has 0, rank 1 has 1"),
        (lambda: first_steps(module.optimizer.zero_grad), "steps of tables since .*: rank 0 has 1, rank 1 has 0"),
    ]
    with beside(module, world) if in_thread else contextlib.nullcontext():
        for way, text in ways:
            way()
            with pytest.raises(ConfigError, match=text):
                looked_up(module, own(module, ids_of(1)))
            module.optimizer.zero_grad()
            looked_up(module, own(module, ids_of(1))).sum().backward()
            module.check()


@pytest.mark.parametrize("in_thread", [False, True])
def test_what_one_rank_alone_does_is_refused_in_the_next_call(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(seen_in_the_next_call, in_thread=in_thread)


def held_around(rank: int, world: int, in_thread: bool) -> None:
    """`no_sync` of replicas holds tables whose results do not go through the replicas, if the loss does."""
    module, replicas = bags(), SlicedReplicas(nn.Linear(1, 1, bias=False))
    before, mine = rows_of(module, world), own(module, ids_of(0))
    with beside(module, world) if in_thread else contextlib.nullcontext() as names:
        with replicas.no_sync():
            losses = replicas(torch.ones(len(mine), 1))
            (losses.sum() + looked_up(module, mine).sum()).backward()
        module.finish()
        assert torch.equal(rows_of(module, world), before)
        (replicas(torch.ones(len(mine), 1)).sum() + looked_up(module, mine).sum()).backward()
        module.check()
        assert not torch.equal(rows_of(module, world), before)
        assert module.state_dict()["steps"].tolist() == [1]
        if names is not None:
            # What is not held any more delays nothing, though its losses are there.
            assert names[-2:] == ["lookup", "sparse update"]
    assert losses.requires_grad


@pytest.mark.parametrize("in_thread", [False, True])
def test_no_sync_of_replicas_holds_what_goes_around_them(kept_world: WorldFactory, in_thread: bool) -> None:
    kept_world(2).run(held_around, in_thread=in_thread)


class Through(nn.Module):
    """Passes ids through."""

    def __init__(self, module: ShardedEmbeddingBags) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor) -> Any:
        return self.module({"user": ids})


def held_by_a_ddp(rank: int, world: int) -> None:
    """`no_sync` counts where results leave the DDP before anybody has waited for them."""
    module = bags(gradients="mean")
    model = DistributedDataParallel(Through(module))
    before = rows_of(module, world)
    with beside(module, world):
        with model.no_sync():
            model(own(module, ids_of(0)))["user"].sum().backward()
        module.finish()
        assert torch.equal(rows_of(module, world), before)
        model(own(module, ids_of(1)))["user"].sum().backward()
        module.check()
    assert not torch.equal(rows_of(module, world), before)


def test_no_sync_of_a_ddp_holds_results_that_nobody_has_waited_for(kept_world: WorldFactory) -> None:
    kept_world(2).run(held_by_a_ddp)


class WithDense(Through):
    """Has parameters that its results do not depend on, and some that they do."""

    def __init__(self, module: ShardedEmbeddingBags) -> None:
        super().__init__(module)
        self.used, self.unused = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)

    def forward(self, ids: Tensor) -> Any:
        return {"tables": super().forward(ids), "dense": self.used(torch.ones(1, 1))}


def unused_in_a_ddp(rank: int, world: int) -> None:
    """DDP finds unused parameters by the results of its model, which nobody has waited for."""
    module = bags(gradients="mean")
    model = DistributedDataParallel(WithDense(module), find_unused_parameters=True)
    with beside(module, world):
        for step in range(2):
            model.zero_grad()
            before = rows_of(module, world)
            found = model(own(module, ids_of(step)))
            (found["tables"]["user"].sum() + (rank + 1) * found["dense"].sum()).backward()
            module.check()
            assert not torch.equal(rows_of(module, world), before)
            assert model.module.used.weight.grad is not None
            assert float(model.module.used.weight.grad) == 1.5
            assert all(one.grad is not None for one in module.parameters())


def test_ddp_finds_parameters_behind_results_that_nobody_has_waited_for(kept_world: WorldFactory) -> None:
    kept_world(2).run(unused_in_a_ddp)
