# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="arg-type,no-untyped-call"
"""Sharded tables: the same bits in every world and with every placement."""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.memory import keep_large_buffers
from sennit.runtime.sharded import (
    Features,
    PeerInputError,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
    place,
    placed,
)
from sennit.runtime.sharded.sent import Done
from sennit.transport.errors import ArgumentError, ConfigError
from tests.extent import briefly
from tests.runtime.sharded_training import ADAM, TABLES, features, own_part, rows_of, trained
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def like_torch(rank: int, world: int, placement: str, kind: str) -> None:
    """One step against torch's own embedding bags with the same initial rows, on the whole batch."""
    pooling = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "none": Pooling.NONE}[kind]
    table = Table(
        name="user", rows=200, dim=12, row_shards=3, column_shards=2, pooling=pooling,
        optimizer=OptimizerSpec(kind=Optimizer.SGD), initial=lambda rows, generator: rows.normal_(generator=generator),
    )  # fmt: skip
    module = (ShardedEmbeddings if kind == "none" else ShardedEmbeddingBags)([table], lr=0.5, placement=placement)
    samples = 16
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 6, (1, samples), generator=generator)
    values = torch.randint(0, 200, (int(lengths.sum()),), generator=generator)
    whole = Features(lengths=lengths, values=values)
    rows = rows_of(module, world)
    mine = module.slices.own_samples(samples)
    weight = torch.nn.Parameter(rows.clone())
    offsets = torch.cumsum(lengths[0], 0) - lengths[0]
    if kind == "none":
        expected = torch.nn.functional.embedding(values, weight)
        first = int(lengths[0, : mine.start].sum())
        own = expected[first : first + int(lengths[0, mine].sum())]
    else:
        expected = torch.nn.functional.embedding_bag(values, weight, offsets, mode=kind)
        own = expected[mine]
    found = module(own_part(whole, mine.start, mine.stop))["user"]
    torch.testing.assert_close(found, own)
    (expected * expected).sum().backward()
    (found * found).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(rows_of(module, world), rows - 0.5 * weight.grad / world)


def refuses(rank: int, world: int) -> None:
    """Everything that one rank gives wrong is refused on all of them, and nothing changes."""
    module = ShardedEmbeddingBags(TABLES, lr=0.1)
    good = features(0, 8)
    before = module.digest()
    bad = Features(lengths=good.lengths, values=good.values.clone())
    bad.values[3] = 1000
    with pytest.raises(ArgumentError) as caught:
        module(bad if rank == 1 else good)
    if rank == 1:
        assert "feature user: id 1000 at position 3; table user has rows 0 to 999" in str(caught.value)
    else:
        assert isinstance(caught.value, PeerInputError)
        assert "rank 1 has an id outside its table" in str(caught.value)
    with pytest.raises(ArgumentError, match=r"samples on rank 0, .* on rank 1; allowed: equally many on all ranks"):
        module(features(0, 64 // world * (1 + rank)))
    wrong = Features(lengths=good.lengths, values=good.values[1:])
    with pytest.raises(ArgumentError, match=r"ids in all|input of rank 0 is wrong"):
        module(wrong if rank == 0 else good)
    with pytest.raises(ArgumentError, match="no ids for feature item; given: user"):
        module({"user": torch.zeros(8, dtype=torch.int64)})
    assert module.digest() == before
    assert len(module(good)["user"]) == 8


def refuses_moves(rank: int, world: int) -> None:
    """All ranks refuse, and the module goes on as it was."""
    module = ShardedEmbeddingBags(TABLES, lr=0.1)
    spread, sent = place(TABLES, world, "row_wise"), module.send(features(0, 8))
    with pytest.raises(ConfigError, match=f"a placement for {world + 1} ranks, but there are {world}"):
        module.move(place(TABLES, world + 1, "row_wise"))
    with pytest.raises(ConfigError, match=r"a placement of 1 shards for tables of \d+, or of others"):
        module.move(place([Table(name="user", rows=10, dim=4)], world))
    with pytest.raises(ConfigError, match=r"owner of city/0\.0"):
        module.move(place(TABLES, world, "data_parallel") if rank else spread)
    with module.no_sync():
        next(iter(module(features(0, 8)).values())).sum().backward()
    with pytest.raises(ArgumentError, match="between the backward passes of a step"):
        module.move(spread)
    next(iter(module(features(1, 8)).values())).sum().backward()
    before = module.digest()
    module.move(spread)
    with pytest.raises(ArgumentError, match="before its shards moved"):
        module(sent)
    assert module.digest() == before


def faults_of_large_buffers(rank: int, world: int, *, keeps: bool) -> list[int]:
    """Pages that the kernel gives for a buffer of 40 MiB, each time."""
    if keeps:
        assert keep_large_buffers()
    found = []
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 << 20)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found


def misuses_sent_batches(rank: int, world: int, kind: str) -> None:
    """A sent batch is for one call of its module, or for `drop`."""
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    table = Table(name="user", rows=10, dim=4, pooling=Pooling.NONE if kind == "sequences" else Pooling.SUM)
    module, other = made([table], lr=1), made([table], lr=1)
    before = module.digest()
    first, second, third = (module.send({"user": torch.arange(8) + step}) for step in range(3))
    for use in (other, other.drop):
        with pytest.raises(ArgumentError, match="another module sent"):
            use(first)
    with pytest.raises(ArgumentError, match="global_batch for a batch that was sent"):
        module(first, global_batch=8 * world)
    module.drop(second)
    with torch.no_grad():
        assert torch.equal(module(third)["user"], module({"user": torch.arange(8) + 2})["user"])
    module(first)["user"].sum()
    for sent, fate in ((first, "looked up"), (second, "dropped"), (third, "looked up")):
        with pytest.raises(ArgumentError, match=f"to be looked up, but it was {fate} before"):
            module(sent)
        with pytest.raises(ArgumentError, match=f"to be dropped, but it was {fate} before"):
            module.drop(sent)
    assert module.digest() == before


def disagrees(rank: int, world: int) -> None:
    for options, match in (
        ({"slices": 8 << rank}, "slices: rank 0 has 8, rank 1 has 16"),
        ({"seed": rank}, "seed: rank 0 has 0, rank 1 has 1"),
        ({"placement": ("row_wise", "table_wise")[rank]}, "placement: rank 0 has row_wise, rank 1 has table_wise"),
        (
            {"placement": place(TABLES, world, ("row_wise", "table_wise")[rank])},
            "owner of city/0.0: rank 0 has 0, rank 1 has 1",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            ShardedEmbeddingBags(TABLES, lr=0.1, **options)
    table = Table(name="user", rows=10 + rank, dim=4)
    with pytest.raises(ConfigError, match="table user: rows: rank 0 has 10, rank 1 has 11"):
        ShardedEmbeddingBags([table], lr=0.1)
    with pytest.raises(ConfigError, match=r"the placement does not place user/0.0; is it of another model"):
        ShardedEmbeddingBags([table], lr=0.1, placement=placed([table], world, {}))


def refuses_what_does_not_fit(rank: int, world: int) -> None:
    """Tables of 8 TB are refused on all ranks before any memory is taken, and so is a placement for a rank too small.

    What fits by memory alone is placed so.
    """
    huge = Table(name="user", rows=1 << 30, dim=1024, row_shards=2)
    for placement in ("table_wise", "row_wise", "data_parallel"):
        with pytest.raises(ConfigError, match=r"user.* needs .* bytes are missing"):
            ShardedEmbeddingBags([huge], lr=0.1, placement=placement)
    with pytest.raises(ConfigError, match=r"the placement gives rank 1 [\d,]+ bytes of tables, .* allowed: [\d,]+$"):
        ShardedEmbeddingBags([huge], lr=0.1, placement=placed([huge], world, {"user/0.0": 1, "user/1.0": 1}))
    # 160 bytes of rows and 40 of states each.
    tables = [Table(name=name, rows=10, dim=4) for name in ("a", "b", "c")]
    with pytest.raises(ConfigError, match=r"table b needs 200 bytes with its optimizer states\. Of the 399 bytes"):
        ShardedEmbeddingBags(tables, lr=0.1, rank_memory_bytes=(399, 100)[rank])
    made = ShardedEmbeddingBags(tables, lr=0.1, rank_memory_bytes=(400, 200)[rank])
    assert sorted(made.placement.owner_of.values()) == [0, 0, 1]


def reports_gradients(rank: int, world: int, kind: str, placement: str) -> None:
    """A gradient that is not finite leaves its row alone, and is reported on all ranks in the next step."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    table = Table(name="user", rows=10, dim=4, pooling=pooling)
    module = (ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags)([table], lr=1, placement=placement)
    before = rows_of(module, world)
    ids = {"user": torch.arange(8) % 3 + 5 * (rank == 0)}
    found = module(ids)["user"]
    gradient = torch.ones_like(found)
    if rank == world - 1:
        gradient[0, 2] = torch.nan
    found.backward(gradient)
    after = rows_of(module, world)
    changed = (before != after).any(1)
    assert changed.tolist() == [row in (1, 2, 5, 6, 7) for row in range(10)]
    with pytest.raises(GradientError):
        module(ids)
    module(ids)


class Keyed:
    """A stand-in with the shape of TorchRec's KeyedJaggedTensor."""

    def __init__(self, names: list[str], lengths: Tensor, values: Tensor) -> None:
        self._names, self._lengths, self._values = names, lengths, values

    def keys(self) -> list[str]:
        return self._names

    def lengths(self) -> Tensor:
        return self._lengths

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return None


class Strided(Keyed):
    """The same with a number of bags for each key, and with the bag of each sample."""

    def __init__(
        self,
        names: list[str],
        lengths: Tensor,
        values: Tensor,
        strides: list[int],
        inverse: tuple[list[str], Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__(names, lengths, values)
        self._strides, self._inverse, self._weights = strides, inverse, weights

    def stride_per_key(self) -> list[int]:
        return self._strides

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        return self._inverse

    def weights_or_none(self) -> Tensor | None:
        return self._weights


def takes_all_forms(rank: int, world: int) -> None:
    tables = [Table(name="user", rows=10, dim=4), Table(name="item", rows=10, dim=4, bounds=Bounds.WRAP)]
    module = ShardedEmbeddingBags(tables, lr=1)
    users, items = torch.arange(8), torch.arange(16).view(8, 2)
    plain = module({"item": items, "user": users, "other": users})
    keyed = module(
        Keyed(
            ["item", "other", "user"],
            torch.tensor([2] * 8 + [1] * 8 + [1] * 8),
            torch.cat([items.flatten() % 10, users, users]),
        )
    )
    combined = module(Features(lengths=torch.tensor([[1] * 8, [2] * 8]), values=torch.cat([users, items.flatten()])))
    for other in (keyed, combined):
        assert all(torch.equal(plain[name], other[name]) for name in ("user", "item"))


def takes_strides(rank: int, world: int) -> None:
    """Keys with bags of their own number: other keys have more or fewer, or inverse indices say which bag is whose."""
    module = ShardedEmbeddingBags([Table(name="user", rows=10, dim=4), Table(name="item", rows=10, dim=4)], lr=1)
    names, users, of_sample = ["user", "item"], torch.arange(8), torch.tensor([0, 2, 1, 1, 0, 2, 2, 0])
    bags = [[[3, 4], [], [5]][bag] for bag in of_sample.tolist()]
    sizes, items = [len(bag) for bag in bags], [number for bag in bags for number in bag]
    plain = module(Features(lengths=torch.tensor([[1] * 8, sizes]), values=torch.tensor([*users, *items])))
    # 18 lengths, which could be cut into three equal parts as well.
    beside = Strided(
        ["other", "item", "user"], torch.tensor([3, 3, *sizes, *[1] * 8]), torch.tensor([0] * 6 + [*items, *users]),
        [2, 8, 8],
    )  # fmt: skip
    # Users 0 to 7 backwards, and three bags of items for eight samples.
    lengths, values = torch.tensor([1] * 8 + [2, 0, 1]), torch.tensor([*users.flip(0), 3, 4, 5])
    inverse = ["item", "user"], torch.stack([of_sample, 7 - users])
    for other in (beside, Strided(names, lengths, values, [8, 3], inverse)):
        found = module(other)
        assert all(torch.equal(plain[name], found[name]) for name in names)
    weights = torch.ones(11, requires_grad=True)
    row = rows_of(module, world)[0]
    module(Strided(names, lengths, values, [8, 3], inverse, weights))["user"][0].sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, torch.zeros(11).index_fill(0, torch.tensor([7]), float(row.sum())))
    ones, zeros = (torch.full((24,), number) for number in (1, 0))
    for wrong, match in (
        (Strided(names, lengths, values, [8, 3]), "of different numbers of samples: {'user': 8, 'item': 3}; allowed"),
        (Strided(names, lengths, values, [8, 4]), r"11 lengths for 2 keys of strides \[8, 4\]"),
        (Strided(names, lengths, values[1:], [8, 3], inverse), "lengths of 11 ids in all, but 10 ids"),
        (Strided(names, lengths, values, [8, 3], inverse, weights[1:]), r"weights are torch.float32 of shape \(10,\)"),
        (
            Strided(names, lengths, values, [8, 3], (names, torch.full((2, 8), 3))),
            "index 3 of feature item; allowed: 0",
        ),
        (Strided(names, lengths, values, [8, 3], (names[:1], 7 - users[None])), "no inverse indices for feature item"),
        (Strided(["other", "user"], ones[:9], zeros[:9], [1, 8]), "no ids for feature item; given: other, user"),
        (Keyed(["user", "item", "user"], ones, zeros), "feature user is given twice"),
    ):
        with pytest.raises(ArgumentError, match=match):
            module(wrong)


def ignores(rank: int, world: int, kind: str) -> None:
    """An ignored id adds nothing to a bag and is a row of zeros in a sequence. Its gradient changes nothing."""
    is_bags = kind != "sequences"
    pooling = Pooling.MEAN if is_bags else Pooling.NONE
    tables = [
        Table(
            name=name, rows=10, dim=4, row_shards=2, pooling=pooling, bounds=Bounds.IGNORE,
            optimizer=OptimizerSpec(kind=Optimizer.SGD),
        )
        for name in ("user", "item")
    ]  # fmt: skip
    module = (ShardedEmbeddingBags if is_bags else ShardedEmbeddings)(tables, lr=1, gradients="sum")
    before = rows_of(module, world)
    samples = 8 // world
    ids = torch.tensor([[3, -1, 5], [7, 8, 10]]).repeat(samples // 2, 1)
    good = torch.arange(samples)
    sent = module.send({"user": ids, "item": good})
    found = module(sent)["user"]
    kept = (ids >= 0) & (ids < 10)
    rows = torch.where(kept.unsqueeze(2), before[ids.clamp(0, 9)], 0)
    torch.testing.assert_close(found, rows.sum(1) / 3 if is_bags else rows.flatten(0, 1))
    assert module.result_bytes(sent) == 4 * 4 * (len(found) + len(good))
    found.backward(torch.ones_like(found))
    counts = torch.bincount(ids[kept], minlength=10).unsqueeze(1) * world
    torch.testing.assert_close(rows_of(module, world), before - counts / (3 if is_bags else 1))


def counts_bytes(rank: int, world: int, kind: str, placement: str) -> tuple[int, int]:
    """Bytes of a step with ids as in real data, and those if each lookup sent id, row and gradient."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    tables = [Table(name=f"t{n}", rows=100_000, dim=64, row_shards=world, pooling=pooling) for n in range(2)]
    module = (ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags)(tables, lr=1, placement=placement)
    generator = torch.Generator().manual_seed(rank)
    places = torch.cumsum(torch.arange(1, 100_001, dtype=torch.float64) ** -1.2, 0)
    draws = torch.rand(2, 512, 20, generator=generator, dtype=torch.float64) * places[-1]
    ids = torch.searchsorted(places, draws) * 48_271 % 100_000
    found = module({"t0": ids[0], "t1": ids[1]})
    torch.autograd.backward(list(found.values()), [torch.ones_like(vectors) for vectors in found.values()])
    own = module.tables[0].row_range(rank)
    elsewhere = int(((ids < own.low) | (ids >= own.high)).sum())
    return sum(module.sent_bytes.values()), elsewhere * (8 + 2 * 4 * 64)


def written_to(rank: int, world: int, kind: str) -> None:
    """Results may be written to in place, as torch's own, and gradients are those of what came of it."""
    pooling = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "none": Pooling.NONE}[kind]
    tables = [
        Table(name=name, rows=10, dim=4, pooling=pooling, optimizer=OptimizerSpec(kind=Optimizer.SGD))
        for name in ("user", "item")
    ]
    module = (ShardedEmbeddings if kind == "none" else ShardedEmbeddingBags)(tables, lr=1, gradients="sum")
    for runs_beside in (False, True):
        module.overlap((lambda name, call: Done(call())) if runs_beside else None)
        before = rows_of(module, world)
        found = module({"user": torch.arange(8), "item": torch.arange(8)})
        users, items = found["user"], found["item"]
        items.zero_()
        torch.testing.assert_close(users.detach(), before[:8])
        users *= 3
        users += 1
        torch.testing.assert_close(users.detach(), 3 * before[:8] + 1)
        (users + items).sum().backward()
        module.check()
        used = (torch.arange(10) < 8).unsqueeze(1)
        torch.testing.assert_close(rows_of(module, world), before - 3 * world * used)


def accumulates(rank: int, world: int, kind: str, placement: str) -> None:
    """Two passes in one step are a step of SGD with the sum of both gradients."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    table = Table(name="user", rows=10, dim=4, pooling=pooling, optimizer=OptimizerSpec(kind=Optimizer.SGD))
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    module = made([table], lr=0.5, placement=placement, gradients="sum")
    before = rows_of(module, world)
    with module.no_sync():
        found = module({"user": torch.arange(8) % 5})["user"]
        found.backward(torch.full_like(found, 2))
    assert torch.equal(rows_of(module, world), before)
    found = module({"user": torch.full((8,), 9)})["user"]
    assert torch.equal(found.detach(), before[9].expand(8, 4))
    found.backward(torch.ones_like(found))
    counts = torch.bincount(torch.arange(8) % 5, minlength=10) * 2 + torch.bincount(torch.full((8,), 9), minlength=10)
    torch.testing.assert_close(rows_of(module, world), before - 0.5 * world * counts.unsqueeze(1))
    module.check()


def accumulates_uneven(rank: int, world: int, kind: str, placement: str) -> str:
    """Steps of passes that differ in size: rows repeat in large ones, bags are long in small ones. Returns a digest."""
    pooling = Pooling.NONE if kind == "sequences" else Pooling.SUM
    table = Table(name="user", rows=20, dim=16, pooling=pooling, optimizer=ADAM)
    made = ShardedEmbeddings if kind == "sequences" else ShardedEmbeddingBags
    module = made([table], lr=0.5, placement=placement, gradients="sum")
    large, small = torch.arange(64).view(64, 1) % 19, torch.arange(32).view(8, 4) * 7 % 20
    for first, last in ((large, small), (small, large)):
        for ids, held in ((first, module.no_sync()), (last, contextlib.nullcontext())):
            with held:
                found = module({"user": ids[module.slices.own_samples(len(ids))]})["user"]
                found.backward(found.detach() * 0.5 + 0.25)
    module.check()
    return module.digest()


def tracks_changes(rank: int, world: int, placement: str, optimizer: str) -> None:
    """The rows that updates used are those that were used, and no byte of any other row changes."""
    kind = OptimizerSpec(kind=Optimizer(optimizer), weight_decay=0.01)
    tables = [
        Table(name=name, rows=200, dim=6, row_shards=8, column_shards=2, optimizer=kind) for name in ("user", "item")
    ]
    module = ShardedEmbeddingBags(tables, lr=0.5, placement=placement, gradients="sum")
    with pytest.raises(ArgumentError, match="changed_rows without track_changes"):
        module.changed_rows()
    take_step(module, torch.arange(4), torch.arange(4))
    module.track_changes()
    assert not any(len(rows) for rows in module.changed_rows().values())
    for used in ((3, 50, 51, 199), (0, 50, 120 + rank, 0)):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        users = torch.tensor(used)
        with module.no_sync():
            take_step(module, users, torch.full((4,), 7))
        take_step(module, torch.full((4,), 77), torch.full((4,), 7))
        assert module.changed_rows(clear=False).keys() == {held.name for held in module.held()}
        changed = module.changed_rows()
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, set(users.tolist()))
        expected = {"user": set().union(*everyone, {77}), "item": {7}}
        for name, rows in changed.items():
            table, shard = name.split("/")
            low, high = tables[0].row_range(int(shard.split(".")[0]))
            assert rows.tolist() == sorted(row - low for row in expected[table] if low <= row < high)
        for name, tensor in module.state_dict().items():
            if name != "steps":
                differs = (tensor != before[name]).reshape(len(tensor), -1).any(1)
                assert set(differs.nonzero().flatten().tolist()) <= set(changed[name.rpartition(".")[0]].tolist())
                if name.endswith("weight"):
                    assert int(differs.sum()) == len(changed[name.rpartition(".")[0]])
        assert not any(len(rows) for rows in module.changed_rows().values())
    module.load_state_dict(module.state_dict())
    assert all(len(rows) == 25 for rows in module.changed_rows().values())


def take_step(module: ShardedEmbeddingBags, users: Tensor, items: Tensor) -> None:
    found = module({"user": users, "item": items})
    torch.autograd.backward(list(found.values()), [torch.ones_like(vectors) for vectors in found.values()])


SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}


IN_WORLDS = [(*ranks, placement) for ranks in ((1, "shm"), (2, "shm"), (3, "udp")) for placement in (*SHARDINGS, MIXED)]
MOVES = [
    ("table_wise", "row_wise"),
    ("row_wise", MIXED),
    (MIXED, "grid"),
    ("grid", "data_parallel"),
    ("data_parallel", "table_wise"),
    ("column_wise", "as it is"),
]
KINDS = ("bags", "weighted", "sequences")


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, kept_world: WorldFactory) -> tuple[str, Any]:
    """A kind of module, and what one rank has with all tables."""
    arguments: dict[str, Any] = {"placement": "table_wise", "kind": request.param}
    return request.param, kept_world(1).run(trained, **arguments)[0]


@pytest.mark.parametrize(
    ("world", "transport", "placement"),
    briefly(IN_WORLDS, [(3, "udp", "grid"), (3, "udp", MIXED), (2, "shm", "data_parallel"), (1, "shm", "grid")]),
    ids=str,
)
def test_weights_have_the_same_bits_in_every_world(
    kept_world: WorldFactory, alone: tuple[str, Any], world: int, transport: str, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments: dict[str, Any] = {"placement": placement, "kind": kind}
    found = kept_world(world, transport).run(trained, **arguments)
    assert [one for one, _ in found] == [digest] * world
    assert [sample for _, samples in found for sample in samples] == outputs


# Bags with weights do all that bags do.
@pytest.mark.parametrize(
    ("alone", "placement", "then"),
    briefly(
        [(kind, *move) for kind in KINDS for move in MOVES],
        [("weighted", "row_wise", MIXED), ("weighted", "grid", "data_parallel"), ("sequences", MIXED, "grid")],
    ),
    ids=str,
    indirect=["alone"],
)
def test_shards_move_between_steps_and_no_bit_changes(
    kept_world: WorldFactory, alone: tuple[str, Any], placement: Any, then: Any
) -> None:
    kind, (digest, outputs) = alone
    found = kept_world(3, "udp").run(trained, placement=placement, then=then, kind=kind)
    assert [one for one, _ in found] == [digest] * 3
    assert [sample for _, samples in found for sample in samples] == outputs


def test_tensor_trains_move(kept_world: WorldFactory) -> None:
    mixed = {"user": "table_wise", "genre": "data_parallel", "city": "row_wise", "item": "table_wise"}
    expected = kept_world(1).run(trained, placement="table_wise", trains=True)[0][0]
    for then in ("data_parallel", mixed):
        found = kept_world(2).run(trained, placement="table_wise", then=then, trains=True)
        assert [one for one, _ in found] == [expected] * 2


def test_large_buffers_are_kept_when_asked(new_world: WorldFactory) -> None:
    world = new_world(1)
    assert min(world.run(faults_of_large_buffers, keeps=False)[0]) > 1_000
    # The first ones make room.
    assert max(world.run(faults_of_large_buffers, keeps=True)[0][-8:]) < 1_000


def test_moves_that_cannot_be_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_moves)


@pytest.mark.parametrize("placement", ["row_wise", MIXED], ids=str)
@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_can_be_sent_ahead(
    kept_world: WorldFactory, alone: tuple[str, Any], placement: Any, ahead: int
) -> None:
    kind, (digest, outputs) = alone
    found = kept_world(2).run(trained, placement=placement, kind=kind, ahead=ahead)
    assert [one for one, _ in found] == [digest] * 2
    assert [sample for _, samples in found for sample in samples] == outputs


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_sent_batch_is_used_once_by_its_module(kept_world: WorldFactory, kind: str) -> None:
    kept_world(2).run(misuses_sent_batches, kind=kind)


@pytest.mark.parametrize("placement", SHARDINGS)
@pytest.mark.parametrize("kind", ["sum", "mean", "none"])
def test_a_step_is_that_of_torch(kept_world: WorldFactory, kind: str, placement: str) -> None:
    kept_world(2).run(like_torch, kind=kind, placement=placement)


def test_wrong_input_of_one_rank_is_refused_on_all(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses)


def test_tables_that_do_not_fit_are_refused_before_they_are_made(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses_what_does_not_fit)


def test_ranks_with_different_models_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(disagrees)


@pytest.mark.parametrize("placement", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_gradient_that_is_not_finite_is_reported_on_all_ranks(
    kept_world: WorldFactory, kind: str, placement: str
) -> None:
    kept_world(2).run(reports_gradients, kind=kind, placement=placement)


def test_ids_come_in_the_forms_that_programs_have(kept_world: WorldFactory) -> None:
    kept_world(2).run(takes_all_forms)


def test_keys_may_have_numbers_of_bags_of_their_own(kept_world: WorldFactory) -> None:
    kept_world(1).run(takes_strides)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_ids_that_are_ignored_keep_their_places(kept_world: WorldFactory, kind: str) -> None:
    kept_world(2).run(ignores, kind=kind)


# The table of the kernels' cases has all kinds.
@pytest.mark.parametrize("kind", briefly(KINDS, ["sequences"]))
def test_the_reference_has_the_same_bits(kept_world: WorldFactory, kind: str) -> None:
    world = kept_world(1)
    arguments: dict[str, Any] = {"placement": "row_wise", "kind": kind, "steps": 2}
    assert world.run(trained, **arguments) == world.run(trained, implementation="reference", **arguments)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_row_that_is_used_often_travels_once(kept_world: WorldFactory, kind: str) -> None:
    """Ids of a Zipf distribution (1.2), as in real data: at most 0.35 of the bytes of all lookups."""
    found = kept_world(2).run(counts_bytes, kind=kind, placement="row_wise")
    sent, naive = (sum(part) for part in zip(*found, strict=True))
    assert sent <= 0.35 * naive, sent / naive


@pytest.mark.parametrize("kind", ["sum", "mean", "none"])
def test_results_can_be_written_to(kept_world: WorldFactory, kind: str) -> None:
    kept_world(2).run(written_to, kind=kind)


@pytest.mark.parametrize("placement", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_backward_passes_accumulate(kept_world: WorldFactory, kind: str, placement: str) -> None:
    kept_world(2).run(accumulates, kind=kind, placement=placement)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_accumulated_passes_may_differ_in_size(kept_world: WorldFactory, kind: str) -> None:
    found = {
        kept_world(world).run(accumulates_uneven, placement=placement, kind=kind)[0]
        for world, placement in ((1, "table_wise"), (2, "table_wise"), (2, "data_parallel"))
    }
    assert len(found) == 1


@pytest.mark.parametrize("kind", briefly(KINDS, ["weighted", "sequences"]))
def test_accumulated_gradients_have_the_same_bits_in_every_world(kept_world: WorldFactory, kind: str) -> None:
    found = {
        digest
        for world, placement in ((1, "table_wise"), (2, "row_wise"), (3, "data_parallel"), (3, MIXED))
        for digest, _ in kept_world(world).run(trained, placement=placement, kind=kind, passes=2)
    }
    assert len(found) == 1


@pytest.mark.parametrize("placement", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam", "lamb"])
def test_it_is_known_which_rows_changed(kept_world: WorldFactory, optimizer: str, placement: str) -> None:
    kept_world(2).run(tracks_changes, placement=placement, optimizer=optimizer)
