# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Tables whose ids nobody lists: what ranks hold is a function of the batches alone, and nothing reads zeros."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels.id_directory import shards_of_ids
from sennit.runtime.sharded import (
    DynamicIds,
    Evicted,
    Home,
    IdError,
    PeerInputError,
    ShardedEmbeddingBags,
    ShardedEmbeddings,
    Table,
)
from sennit.runtime.sharded.tables import Homes
from sennit.transport.errors import ArgumentError, ConfigError, SennitError
from tests import extent
from tests.extent import briefly
from tests.runtime.dynamic_training import FORMS, SAMPLES, TABLE, ids_of, store_in, trained
from tests.runtime.world import WorldFactory


@pytest.mark.parametrize(
    ("form", "kind"),
    briefly(
        [(form, kind) for form in FORMS for kind in ("bags", "sequences") if (form, kind) != ("shared", "sequences")],
        [
            ("lru", "bags"),
            ("lfu", "sequences"),
            ("second", "bags"),
            ("shared", "bags"),
            ("score", "sequences"),
            ("sketch", "bags"),
        ],
    ),
)
def test_one_digest_at_any_world_and_placement_while_rows_come_and_go(
    kept_world: WorldFactory, tmp_path: Path, form: str, kind: str
) -> None:
    found = {}
    memory, files = None, str(tmp_path)
    places = [
        (1, "table_wise", memory), (1, "table_wise", files), (2, "row_wise", memory), (2, "column_wise", files),
        (3, "grid", files),
    ]  # fmt: skip
    for world, placement, folder in places if extent.is_long or form == "lru" else places[::4]:
        results = kept_world(world).run(trained, form, kind, 20, TABLE, placement, folder)
        found[world, placement, folder] = results[0][0]
        if folder is not None and FORMS[form][0] == 600 and world < 3:
            assert all(of_cache["write_backs"] > 0 for _, _, of_cache in results), results
        counters = [counters for _, counters, _ in results]
        for name in ("admitted", "evicted"):
            assert sum(one.get(name, 0) for one in counters) > 0, (name, counters)
    assert len(set(found.values())) == 1, found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("form", ["lfu", "second", "sketch"])
def test_one_digest_in_every_world_placement_and_home(
    kept_world: WorldFactory, tmp_path: Path, form: str, transport: str
) -> None:
    """What the test above does not cover: 4 and 8 ranks, and datagrams. Over networks that lose some of them:
    `tests/testbed/test_sharded_over_loss.py`. A death, a newcomer, and a resumption: `test_train_dynamic.py`.
    """
    found = {
        (world, placement, home): kept_world(world, transport).run(
            trained, form, "bags", 20, TABLE, placement, str(tmp_path) if home == "files" else None
        )[0][0]
        for world in (1, 2, 3, 4, 8)
        for placement in ("table_wise", "row_wise", "column_wise", "grid")
        for home in ("memory", "files")
    }
    assert len(set(found.values())) == 1, found


class Plain:
    """A dynamic table in plain Python and torch: a dict of rows, stochastic gradient descent, LRU."""

    def __init__(self, module: ShardedEmbeddingBags, rows: int) -> None:
        self.module, self.rows = module, rows
        self.of_id: dict[int, Tensor] = {}
        self.last: dict[int, int] = {}
        self.first: dict[int, Tensor] = {}

    def row(self, one: int) -> Tensor:
        if one not in self.first:
            # What an id begins with is asked of a table that has never seen it.
            self.first[one] = self.module["user"].get_rows(torch.tensor([one]))[0]
        return self.of_id[one] if one in self.of_id else self.first[one]

    def step(self, ids: Tensor, step: int) -> Tensor:
        """The sum of each bag, of `ids` [bags, n]; then takes a step with gradients of 1."""
        new = sorted(set(ids.flatten().tolist()) - self.of_id.keys())
        if (lack := len(self.of_id) + len(new) - self.rows) > 0:
            old = sorted((self.last[one], one) for one in self.of_id if one not in ids)
            for _, one in old[:lack]:
                del self.of_id[one]
        for one in new:
            self.of_id[one] = self.row(one)
        for one in set(ids.flatten().tolist()):
            self.last[one] = step
        found = torch.stack([torch.stack([self.row(one) for one in bag]).sum(0) for bag in ids.tolist()])
        for one, count in zip(*(part.tolist() for part in ids.unique(return_counts=True)), strict=True):
            self.of_id[one] = self.of_id[one] - 0.5 * count
        return found


def beside_plain(rank: int, world: int) -> None:
    table = Table(name="user", rows=40, dim=4, optimizer="sgd", ids=DynamicIds(evicted_share=1e-9))
    fresh, module = (ShardedEmbeddingBags([table], lr=0.5, gradients="sum", seed=3) for _ in range(2))
    plain = Plain(fresh, 40)
    for step in range(60):
        ids = ids_of(step, 0, 2)[:10]
        wanted = plain.step(ids, step)
        found = module({"user": ids})["user"]
        torch.testing.assert_close(found.detach(), wanted, atol=1e-4, rtol=1e-5)
        found.sum().backward()
        unknown = torch.tensor([[5_000_000_000 + step]])
        with torch.no_grad():
            read = module({"user": unknown})["user"]
        assert read.equal(plain.row(int(unknown))[None])
        assert read.abs().max() > 0
    assert len(plain.of_id) == 40
    assert module.id_counters()["user"]["evicted"] > 100


def test_rows_are_those_of_a_dict_and_unknown_ids_read_their_own(kept_world: WorldFactory) -> None:
    kept_world(1).run(beside_plain)


def restored(
    rank: int,
    world: int,
    saved: dict[str, Any] | None,
    first: int,
    end: int,
    folder: str | None = None,
    admit_count: str = "exact",
) -> tuple[Any, str]:
    """Steps `first` to `end`, from a state; with what this rank saves."""
    rules = DynamicIds(admit_after=2, admit_count=admit_count)
    table = Table(name="user", rows=100, dim=4, row_shards=4, ids=rules, optimizer="adagrad")
    store = store_in(folder, 16_000)
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="row_wise", seed=7, store=store)
    if saved is not None:
        module.load_state_dict(saved)
    module.track_changes()
    own = module.slices.own_samples(SAMPLES)
    for step in range(first, end):
        module({"user": ids_of(step, 0, 3)[own]}, global_batch=SAMPLES)["user"].sum().backward()
        if step == first:
            module.changes()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    # A move to other ranks, and what has changed since the first step.
    changes = module.changes()
    if world > 1:
        owners = {shard: (rank + 1) % world for shard, rank in module.placement.owner_of.items()}
        known = counters_of(module)
        module.move(type(module.placement)(world_size=world, owner_of=owners))
        assert counters_of(module) == known
    digest = module.digest()
    module.close()
    return (before, changes), digest


def counters_of(module: ShardedEmbeddingBags | ShardedEmbeddings) -> dict[str, int]:
    """Of all ranks together."""
    everyone: list[Any] = [None] * module.slices.world_size
    dist.all_gather_object(everyone, module.id_counters().get("user", {}))
    return dict(sum(map(Counter, everyone), Counter[str]()))


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [("memory", "memory", "exact"), ("files", "memory", "exact"), ("memory", "files", "sketch")],
)
def test_a_state_goes_to_another_world_and_a_move_changes_nothing(
    kept_world: WorldFactory, tmp_path: Path, first: str, second: str, count: str
) -> None:
    folder = {"memory": None, "files": str(tmp_path)}
    whole = kept_world(1).run(restored, None, 0, 20, None, count)[0][1]
    parts = kept_world(2).run(restored, None, 0, 11, folder[first], count)
    saved: dict[str, Any] = {}
    for (state, _), _ in parts:
        saved |= state
    found = kept_world(3).run(restored, saved, 11, 20, folder[second], count)
    assert {digest for _, digest in found} == {whole}


@pytest.mark.parametrize("home", ["memory", "files"])
def test_changes_and_the_state_before_them_are_the_state(kept_world: WorldFactory, tmp_path: Path, home: str) -> None:
    folder = str(tmp_path) if home == "files" else None
    (before, _), _ = kept_world(1).run(restored, None, 0, 1, folder)[0]
    (after, changes), _ = kept_world(1).run(restored, None, 0, 20, folder)[0]
    for name, tensor in after.items():
        shard = name.rpartition(".")[0]
        if (rows := changes.get(f"{shard}.changed_rows")) is not None:
            before[name][rows] = changes[name]
            assert before[name].equal(tensor), name


def refused(
    rank: int, world: int, admit_after: int, admit_count: str, with_refused: bool
) -> tuple[str, str, dict[str, int]]:
    """What a refused batch says; then the digest of a few more steps, with the counters."""
    rules = DynamicIds(admit_after=admit_after, admit_count=admit_count, evicted_share=0.25, expire_after=3)
    table = Table(name="user", rows=80, dim=4, row_shards=2, ids=rules)
    module = ShardedEmbeddingBags([table], lr=0.1, placement="row_wise", gradients="sum")
    told = ""
    for step in range(8):
        # Some ids of the first shard come again. It counts, dates, evicts and admits before the other one refuses.
        many = torch.arange(4000)
        shard = shards_of_ids(many, 2)
        few = many[shard == 0][:12]
        if with_refused and step in (2, 5):
            ids = torch.cat([few, few + 10**6, few, many[shard == 1][: 60 * admit_after]]).repeat(admit_after)
            with pytest.raises(ConfigError) as caught:
                module({"user": ids[rank::world].view(-1, 1)}, global_batch=len(ids))
            told = str(caught.value)
        ids = torch.cat([many[shard == one][8 * step : 8 * step + 16] for one in (0, 1)])
        module({"user": ids[rank::world].view(-1, 1)})["user"].sum().backward()
    return told, module.digest(), module.id_counters()["user"]


@pytest.mark.parametrize(("admit_after", "admit_count"), [(1, "exact"), (2, "exact"), (2, "sketch")])
@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_a_shard_has_no_rows_for_is_refused_and_changes_nothing_on_any_rank(
    kept_world: WorldFactory, world: int, admit_after: int, admit_count: str
) -> None:
    undisturbed = kept_world(world).run(refused, admit_after, admit_count, False)
    for (told, digest, counters), (_, wanted, of_undisturbed) in zip(
        kept_world(world).run(refused, admit_after, admit_count, True), undisturbed, strict=True
    ):
        assert "new ids in a batch, but shard user/1.0 has" in told
        assert digest == wanted
        assert counters == of_undisturbed
        assert counters["evicted"] + counters["expired"] > 0


def unfit(rank: int, world: int, folder: str, with_unfit: bool) -> tuple[str, dict[str, int], list[str]]:
    """Some batches have more rows than the cache of a rank has lines."""
    table = Table(name="user", rows=4000, dim=4, row_shards=2, ids=DynamicIds(admit_after=2, unadmitted="shared"))
    store = store_in(folder, 20_000)
    module = ShardedEmbeddingBags([table], lr=0.1, placement="row_wise", gradients="sum", store=store)
    told = []
    for step in range(8):
        if with_unfit and step in (2, 5):
            many = torch.arange(10**6 * step, 10**6 * step + 900).repeat(2)
            with pytest.raises(ConfigError) as caught:
                module({"user": many[rank::world].view(-1, 1)}, global_batch=len(many))
            told.append(str(caught.value))
        ids = torch.arange(8 * step, 8 * step + 16)
        module({"user": ids[rank::world].view(-1, 1)})["user"].sum().backward()
    found = module.digest(), module.id_counters()["user"], told
    module.close()
    return found


def test_a_batch_that_the_cache_has_no_lines_for_changes_nothing(kept_world: WorldFactory, tmp_path: Path) -> None:
    undisturbed = kept_world(2).run(unfit, str(tmp_path), False)
    found = kept_world(2).run(unfit, str(tmp_path), True)
    assert [one[:2] for one in found] == [one[:2] for one in undisturbed]
    assert found[0][2] == found[1][2]
    assert all("has 20000 B of memory for rows: user/" in told for told in found[0][2]), found


def begun(rank: int, world: int, folder: str) -> tuple[Counter[str], list[str]]:
    """What a file has read while all ids were new, and then while half of them were; and a batch that is refused."""
    module = ShardedEmbeddingBags(
        [Table(name="user", rows=2000, dim=4, optimizer="adam", ids=DynamicIds(evicted_share=0.1))],
        lr=0.1,
        gradients="sum",
        store=store_in(folder, 32_000),
    )
    told, opened = [], module.cache_counters()["reads"]
    for step in range(8):
        one_step(module, *range(200 * step, 200 * step + 200))
    filled = Counter(module.cache_counters())
    filled["reads"] -= opened
    for step in range(8, 16):
        if step % 2:
            with pytest.raises(ConfigError) as caught:
                one_step(module, *range(10**6, 10**6 + 2100))
            told.append(str(caught.value))
        one_step(module, *range(200 * (step - 8), 200 * (step - 8) + 100), *range(200 * step, 200 * step + 100))
    told.append(module.digest())
    module.close()
    return filled, told


def test_rows_of_new_ids_are_not_read_from_their_file(kept_world: WorldFactory, tmp_path: Path) -> None:
    """Their values are functions of the ids. What is in the file is that of ids that had the rows before."""
    ((filled, told),) = kept_world(1).run(begun, str(tmp_path))
    assert filled["misses"] == filled["begun"] == 1600
    assert filled["write_backs"] > 1000
    assert filled["reads"] == 0
    (stored,) = kept_world(1).run(begun_in_memory)
    assert told[-1] == stored
    assert all("new ids in a batch" in one for one in told[:-1])


def begun_in_memory(rank: int, world: int) -> str:
    """The digest of `begun` with rows in memory, and without the batches that are refused."""
    module = ShardedEmbeddingBags(
        [Table(name="user", rows=2000, dim=4, optimizer="adam", ids=DynamicIds(evicted_share=0.1))],
        lr=0.1,
        gradients="sum",
    )
    for step in range(8):
        one_step(module, *range(200 * step, 200 * step + 200))
    for step in range(8, 16):
        one_step(module, *range(200 * (step - 8), 200 * (step - 8) + 100), *range(200 * step, 200 * step + 100))
    return module.digest()


def handed(
    rank: int, world: int, folder: str | None = None
) -> tuple[list[tuple[int, list[float], int]], dict[str, int]]:
    """All rows that went on this rank; each has what it had at the end of the last step in which it was there."""
    rules = DynamicIds(evicted_share=0.25, expire_after=16)
    table = Table(name="user", rows=200, dim=4, row_shards=4, column_shards=2, ids=rules, optimizer="sgd")
    store = store_in(folder, 32_000)
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="grid", seed=7, store=store)
    gone: list[Evicted] = []
    module.on_evicted(gone.append)
    own, found = module.slices.own_samples(SAMPLES), []
    for step in range(40):
        everyone = ids_of(step, 0, 3) if step < 22 else ids_of(22, 0, 3)
        module({"user": everyone[own]}, global_batch=SAMPLES)["user"].pow(2).sum().backward()
        for one in gone:
            assert one.table == "user"
            parts = zip(one.ids.tolist(), one.rows.tolist(), strict=True)
            found += [(ident, row, one.columns.start) for ident, row in parts]
        gone.clear()
    return found, module.id_counters().get("user", {})


def test_rows_that_go_are_handed_over_by_the_same_rule_in_any_world(kept_world: WorldFactory, tmp_path: Path) -> None:
    ((alone, counters),) = kept_world(1).run(handed)
    assert len(alone) == 2 * (counters["evicted"] + counters["expired"])
    assert min(counters["evicted"], counters["expired"]) > 0
    assert all(max(map(abs, row)) > 0 for _, row, _ in alone)
    for folder in (None, str(tmp_path)):
        several = [one for found, _ in kept_world(3).run(handed, folder) for one in found]
        assert sorted(several) == sorted(alone)


def told_wrong(rank: int, world: int) -> None:
    module = ShardedEmbeddingBags([Table(name="user", rows=16, dim=4, row_shards=2, ids="dynamic")], lr=1.0)

    def fails(one: Evicted) -> None:
        raise ValueError(f"no room for {len(one.ids)}")

    def train() -> None:
        for step in range(8):
            module({"user": torch.arange(4 * step, 4 * step + 4).view(-1, 1)})["user"].sum().backward()

    module.on_evicted(fails)
    with pytest.raises((ValueError, SennitError), match="no room for"):
        train()


def test_what_a_users_function_raises_is_told_on_all_ranks(kept_world: WorldFactory) -> None:
    kept_world(2).run(told_wrong)


def scored(rank: int, world: int, score: str) -> str:
    rule: Any = {
        "nan": lambda ids, counts, ages: torch.where(ids == 3, torch.nan, 1.0),
        "short": lambda ids, counts, ages: torch.zeros(2),
        "none": lambda ids, counts, ages: None,
        "raises": lambda ids, counts, ages: ids.no_such_method(),
    }[score]
    table = Table(name="user", rows=8, dim=4, row_shards=2, ids=DynamicIds(eviction=rule))
    module = ShardedEmbeddingBags([table], lr=1.0, placement="row_wise")

    def train() -> None:
        for step in range(8):
            module({"user": torch.arange(2 * step, 2 * step + 2).view(-1, 1)})["user"].sum().backward()

    with pytest.raises(ConfigError) as told:
        train()
    return str(told.value)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("nan", "table user: the score of id 3 is NaN; allowed: numbers"),
        ("short", "table user: scores are of shape (2,); allowed: a tensor of ("),
        ("none", "table user: scores are a NoneType; allowed: a tensor of ("),
        ("raises", "table user: its score: AttributeError: 'Tensor' object has no attribute 'no_such_method'"),
    ],
)
def test_scores_that_are_none_are_refused_on_all_ranks(kept_world: WorldFactory, score: str, message: str) -> None:
    for told in kept_world(2).run(scored, score):
        assert message in told


def expiring(rank: int, world: int) -> None:
    rules = DynamicIds(expire_after=3, admit_after=2)
    module = ShardedEmbeddingBags([Table(name="user", rows=50, dim=4, optimizer="sgd", ids=rules)], lr=1.0)

    def step(*ids: int) -> None:
        module({"user": torch.tensor(ids).view(-1, 1)})["user"].sum().backward()

    def moved(one: int) -> float:
        return float((module["user"].get_rows(torch.tensor([one])) - first[one]).abs().max())

    first = {one: module["user"].get_rows(torch.tensor([one])) for one in (1, 2, 3)}
    step(1, 1, 2)
    assert moved(1) > 0
    for _ in range(3):
        step(3, 3)
    assert moved(1) > 0
    step(3)  # Three steps without id 1 are over, and those of id 2, which came once.
    assert moved(1) == 0
    step(2)
    assert moved(2) == 0
    assert moved(3) > 0
    assert module.id_counters()["user"]["expired"] == 1


def test_rows_and_counts_expire_after_so_many_steps(kept_world: WorldFactory) -> None:
    kept_world(1).run(expiring)


def sharing(rank: int, world: int) -> None:
    rules = DynamicIds(admit_after=3, unadmitted="shared")
    module = ShardedEmbeddingBags([Table(name="user", rows=50, dim=4, optimizer="sgd", ids=rules)], lr=1.0)
    rows = module["user"].get_rows(torch.tensor([5, 6, 2**62]))
    assert rows[0].equal(rows[1])
    assert rows[0].equal(rows[2])
    assert rows.abs().min() > 0
    module({"user": torch.tensor([[5], [6]])})["user"].sum().backward()
    later = module["user"].get_rows(torch.tensor([7]))
    torch.testing.assert_close(later, rows[:1] - 2.0)
    for _ in range(2):
        module({"user": torch.tensor([[5], [5]])})["user"].sum().backward()
    assert not module["user"].get_rows(torch.tensor([5])).equal(module["user"].get_rows(torch.tensor([6])))


def test_ids_without_a_row_may_share_one_that_is_trained(kept_world: WorldFactory) -> None:
    kept_world(1).run(sharing)


def zeros_read(rank: int, world: int, lookups: int) -> tuple[int, float, dict[str, int]]:
    """How many of so many ids read a row of zeros; the load at the end; and what was counted."""
    rows, batch = 1 << 16, 1 << 14
    rules = DynamicIds(admit_after=2, evicted_share=0.05)
    module = ShardedEmbeddings([Table(name="user", rows=rows, dim=2, ids=rules, pooling="none")], lr=0.01)
    draw = torch.Generator().manual_seed(3)
    zeros = 0
    for step in range(lookups // batch):
        # Half of them are of a pool that is as large as the table and moves, so that ids come again, and go.
        pool = torch.randint(rows, (batch // 2,), generator=draw) + step * (rows // 64)
        new = torch.randint(-(2**62), 2**62, (batch // 2,), generator=draw)
        ids = torch.cat([pool * 0x9E3779B97F4A7C1, new])
        found = module({"user": ids.view(-1, 1)})["user"]
        zeros += int((found == 0).all(1).sum())
        found.sum().backward()
    counters = module.id_counters()["user"]
    return zeros, counters["used"] / rows, counters


@pytest.mark.parametrize(
    "lookups", [1_000_000, pytest.param(100_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_no_id_reads_zeros_while_rows_come_and_go_at_full_load(kept_world: WorldFactory, lookups: int) -> None:
    ((zeros, load, counters),) = kept_world(1).run_within(3600.0, zeros_read, lookups)
    assert zeros == 0
    assert load > 0.94
    assert counters["evicted"] > 10_000
    assert counters["without_row"] > 10_000


def set_and_got(rank: int, world: int, admit_after: int) -> None:
    rules = DynamicIds(admit_after=admit_after)
    table = Table(name="user", rows=20, dim=4, row_shards=4, column_shards=2, ids=rules)
    module = ShardedEmbeddingBags([table], lr=0.1, placement="grid")
    ids, values = torch.tensor([-5, 2**62, 7]), torch.arange(12.0).view(3, 4)
    handle = module["user"]
    handle.set_rows(ids if rank == 0 else ids[:0], values if rank == 0 else values[:0])
    assert handle.get_rows(ids.flip(0)).equal(values.flip(0))
    assert handle.get_rows(torch.tensor([8])).abs().max() > 0


@pytest.mark.parametrize("admit_after", [1, 3])
def test_rows_are_set_and_got_by_id(kept_world: WorldFactory, admit_after: int) -> None:
    kept_world(2).run(set_and_got, admit_after)


def padded(rank: int, world: int) -> None:
    """The padding has no row, and no gradient reaches one. Other negative ids are ids."""
    ids = torch.tensor([[7, -1, -2], [-1, -1, -1]]).repeat(4 // world, 1)
    for kind, pooling in ((ShardedEmbeddingBags, "mean"), (ShardedEmbeddings, "none")):
        table = Table(
            name="user", rows=20, dim=4, row_shards=2, pooling=pooling, ids="dynamic", bounds="ignore", optimizer="sgd"
        )
        module = kind([table], lr=1.0, gradients="sum")
        handle, own = module["user"], torch.tensor([7, -2])
        with pytest.raises(IdError if rank == 0 else PeerInputError, match=r"rank 0|id -1, which table user ignores"):
            handle.get_rows(torch.tensor([7, -1] if rank == 0 else [7]))
        before = handle.get_rows(own)
        found = module({"user": ids})["user"]
        if pooling == "mean":
            assert found[:2].equal(torch.stack([before.sum(0) / 3, torch.zeros(4)]))
        else:
            assert found[:6].equal(torch.stack([before[0], torch.zeros(4), before[1], *torch.zeros(3, 4)]))
        found.sum().backward()
        torch.testing.assert_close(
            before - handle.get_rows(own), torch.full((2, 4), 4 / (3 if pooling == "mean" else 1))
        )
        assert counters_of(module)["used"] == 2


def test_a_dynamic_table_may_ignore_padding(kept_world: WorldFactory) -> None:
    kept_world(2).run(padded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": "static"}, 'ids static; allowed: "dynamic", DynamicIds'),
        ({"ids": "dynamic", "train_rank": 4}, "dynamic ids with a train_rank"),
        ({"ids": "dynamic", "bounds": "wrap"}, "bounds wrap with dynamic ids; allowed: error, ignore"),
        ({"ids": DynamicIds(unadmitted="shared"), "pooling": "none"}, "unadmitted shared with pooling none; allowed"),
        ({"ids": DynamicIds(admit_after=2, admit_count="sketch"), "row_shards": 16}, "rows 20; allowed: 32 or more"),
        ({"ids": DynamicIds(unadmitted="shared"), "row_shards": 16}, "rows 20; allowed: 32 or more: each row shard"),
    ],
)
def test_what_cannot_be_dynamic_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Table(name="user", rows=20, dim=4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": "fifo"}, "eviction fifo; allowed: lru, lfu"),
        ({"admit_after": 0}, "admit_after 0; allowed: 1"),
        ({"admit_after": 1.5}, "admit_after 1.5; allowed: 1"),
        ({"expire_after": "7d"}, "expire_after '7d'; allowed: 1 to"),
        ({"evicted_share": 0.0}, "evicted_share 0.0; allowed: above 0"),
        ({"expire_after": 0}, "expire_after 0; allowed: 1 to"),
        ({"unadmitted": "none"}, "unadmitted none; allowed: own, shared"),
    ],
)
def test_rules_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DynamicIds(**options)


def test_homes_of_dynamic_tables_are_those_of_others() -> None:
    table = Table(name="user", rows=20, dim=4, ids="dynamic")
    assert Homes(device_type="cuda").of(table) is Home.HBM
    assert not Homes(device_type="cuda").is_on_host(table)
    assert Homes(device_type="cuda", has_store=True).of(table) is Home.FILE
    on_host = dataclasses.replace(table, home=Home.DRAM)
    assert Homes(device_type="cuda", has_store=True).of(on_host) is Home.DRAM
    assert Homes(device_type="cuda").is_on_host(on_host)


def other_rules(rank: int, world: int, where: str) -> str:
    """Two tables of one name have other rules: in one model, or on two ranks."""
    lru, lfu = (Table(name="user", rows=20, dim=4, ids=DynamicIds(eviction=one)) for one in ("lru", "lfu"))
    with pytest.raises((ConfigError, SennitError)) as told:
        ShardedEmbeddingBags([lru, lfu] if where == "model" else [lfu if rank else lru], lr=0.1)
    return str(told.value)


@pytest.mark.parametrize(
    ("where", "messages"),
    [("model", ["two tables are called user"]), ("ranks", ["eviction=Eviction.LRU", "eviction=Eviction.LFU"])],
)
def test_one_name_with_two_rules_is_refused_on_all_ranks(
    kept_world: WorldFactory, where: str, messages: list[str]
) -> None:
    for told in kept_world(2).run(other_rules, where):
        assert all(message in told for message in messages), told


def replicated(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as told:
        ShardedEmbeddingBags([Table(name="user", rows=20, dim=4, ids="dynamic")], lr=0.1, placement="data_parallel")
    return str(told.value)


def test_a_copy_on_each_rank_is_refused(kept_world: WorldFactory) -> None:
    for message in kept_world(2).run(replicated):
        assert "table user: dynamic ids with a copy on every rank" in message


def changed_without_updates(rank: int, world: int, rules: DynamicIds) -> None:
    """Lookups give rows and count ids, also if no update follows, or one at rate 0."""
    table = Table(name="user", rows=400, dim=4, row_shards=4, ids=rules)
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="row_wise", seed=7)
    module.track_changes()
    known = {name: one.clone() for name, one in module.state_dict().items()}
    own = module.slices.own_samples(SAMPLES)
    for step in range(12):
        module["user"].lr = 0.0 if step % 4 == 1 else 0.1
        found = module({"user": ids_of(step, 0, 2)[own]}, global_batch=SAMPLES)["user"]
        if step % 4 != 2:
            found.sum().backward()
        changes = module.changes()
        for name, one in module.state_dict().items():
            rows = changes.get(f"{name.rpartition('.')[0]}.changed_rows")
            if rows is not None:
                known[name][rows] = changes[name]
            if name != "steps":
                assert known[name].equal(one), (step, name)


@pytest.mark.parametrize(("admit_after", "admit_count"), [(1, "exact"), (3, "exact"), (3, "sketch")])
def test_increments_have_all_that_lookups_change(kept_world: WorldFactory, admit_after: int, admit_count: str) -> None:
    kept_world(2).run(changed_without_updates, DynamicIds(admit_after=admit_after, admit_count=admit_count))


def late(rank: int, world: int, folder: str | None) -> float:
    """A gradient that is kept comes to its step when its row has gone to another id."""
    table = Table(name="user", rows=8, dim=4, optimizer="sgd", ids=DynamicIds(evicted_share=1.0))
    store = store_in(folder, 32_000)
    module = ShardedEmbeddingBags([table], lr=1.0, gradients="sum", placement="row_wise", seed=7, store=store)
    first, second, third = (torch.arange(4 * one, 4 * one + 4).view(-1, 1) for one in range(3))
    old = module({"user": first})["user"]
    module({"user": second})["user"].sum().backward()
    with module.no_sync():
        (1000 * old).sum().backward()
    new = module({"user": third})["user"]
    new.sum().backward()
    return float((module["user"].get_rows(third.flatten()) - new.detach()).abs().max())


@pytest.mark.parametrize("home", ["memory", "files"])
def test_a_gradient_of_an_id_that_has_gone_reaches_no_other(
    kept_world: WorldFactory, tmp_path: Path, home: str
) -> None:
    assert kept_world(1).run(late, str(tmp_path) if home == "files" else None)[0] == pytest.approx(1.0)


def test_a_state_with_an_id_twice_is_refused_before_anything_changes(kept_world: WorldFactory) -> None:
    kept_world(1).run(loaded_twice)


def loaded_twice(rank: int, world: int) -> None:
    module = ShardedEmbeddingBags([Table(name="user", rows=8, dim=4, ids="dynamic")], lr=1.0)
    module({"user": torch.tensor([[5], [6]])})["user"].sum().backward()
    before, state = module.digest(), {name: one.clone() for name, one in module.state_dict().items()}
    state["user/0.0.weight"] += 1
    state["user/0.0.ids"][1] = state["user/0.0.ids"][0]
    with pytest.raises(ArgumentError, match=r"user/0.0.ids: id 5 has two rows"):
        module.load_state_dict(state)
    assert module.digest() == before


def admitted(rank: int, world: int, rules: DynamicIds, steps: int) -> tuple[set[int], set[int]]:
    """The ids that have rows after some steps with few ids that come often and many that come once; and the former."""
    module = ShardedEmbeddingBags([Table(name="user", rows=2_000, dim=4, row_shards=2, ids=rules)], lr=0.1)
    draw, often = torch.Generator().manual_seed(5), torch.arange(40)
    for _ in range(steps):
        once = torch.randint(10**6, 2**62, (60,), generator=draw)
        module({"user": torch.cat([often[torch.randperm(40, generator=draw)[:20]], once]).view(-1, 1)})[
            "user"
        ].sum().backward()
    entries = [tensor for name, tensor in module.state_dict().items() if name.endswith(".ids")]
    found = {int(one) for part in entries for one, word in part.tolist() if word}
    return found, set(often.tolist())


@pytest.mark.parametrize("steps", [30, 600])
def test_a_sketch_admits_all_that_exact_counts_do_and_few_others(kept_world: WorldFactory, steps: int) -> None:
    """After 600 steps, 4 times more ids have come once than a line has cells: counts were halved several times."""
    exact, often = kept_world(1).run(admitted, DynamicIds(admit_after=5), steps)[0]
    estimated, _ = kept_world(1).run(admitted, DynamicIds(admit_after=5, admit_count="sketch"), steps)[0]
    assert exact == often <= estimated
    assert len(estimated - often) <= 0.001 * 60 * steps


def counted_exactly(rank: int, world: int, folder: str | None) -> tuple[dict[int, int], dict[int, int]]:
    """How often ids came, by the table and by a dict. The idea is that of dynamicemb's `test_lfu_scores.py`."""
    table = Table(name="user", rows=2_000, dim=4, row_shards=2, ids=DynamicIds(eviction="lfu"))
    store = store_in(folder, 20_000)
    module = ShardedEmbeddingBags([table], lr=0.1, placement="row_wise", gradients="sum", store=store)
    own, wanted = module.slices.own_samples(SAMPLES), Counter[int]()
    for step in range(12):
        ids = ids_of(step, 0, 3)
        wanted.update(ids.flatten().tolist())
        module({"user": ids[own]}, global_batch=SAMPLES)["user"].sum().backward()
        with torch.no_grad():
            module({"user": ids[own]}, global_batch=SAMPLES)
    entries = [tensor for name, tensor in module.state_dict().items() if name.endswith(".ids")]
    found = {ident: word >> 32 for part in entries for ident, word in part.tolist() if word}
    module.close()
    return found, dict(wanted)


@pytest.mark.parametrize("home", ["memory", "files"])
def test_counts_are_how_often_ids_came_in_training_on_all_ranks(
    kept_world: WorldFactory, tmp_path: Path, home: str
) -> None:
    results = kept_world(2).run(counted_exactly, str(tmp_path) if home == "files" else None)
    assert {ident: count for found, _ in results for ident, count in found.items()} == results[0][1]


def users(rows: int, optimizer: str = "sgd", **rules: Any) -> ShardedEmbeddingBags:
    """A dynamic table of one row shard."""
    table = Table(name="user", rows=rows, dim=4, ids=DynamicIds(**rules), optimizer=optimizer)
    return ShardedEmbeddingBags([table], lr=0.1, gradients="sum")


def one_step(module: ShardedEmbeddingBags, *ids: int) -> None:
    module({"user": torch.tensor([ids])})["user"].sum().backward()


def weighted_frozen(rank: int, world: int, between: str) -> None:
    """Something is looked up between a lookup with weights of a frozen table and its backward pass."""
    module = users(100)
    module["user"].frozen = True
    weights = torch.ones(3, requires_grad=True)
    found = module({"user": (torch.tensor([1, 2, 3]), torch.tensor([0]), weights)})["user"]
    if between == "lookup":
        module({"user": torch.tensor([[11, 12, 13]])})
    elif between == "get_rows":
        module["user"].get_rows(torch.tensor([7, 8, 9]))
    loss = (found * torch.arange(1.0, 5)).sum()
    if between == "nothing":
        loss.backward()
        assert weights.grad is not None
        assert len(weights.grad.unique()) == 3
        return
    with pytest.raises(ArgumentError, match="rows of their lookup are needed; they have changed since"):
        loss.backward()


def weighted_beside_files(rank: int, world: int, folder: str) -> None:
    """Rows of a fixed table in files are read between the lookup of a frozen dynamic table and its backward pass."""
    tables = [Table(name="user", rows=100, dim=4, ids="dynamic", home="dram"), Table(name="fixed", rows=50, dim=4)]
    module = ShardedEmbeddingBags(tables, lr=0.1, gradients="sum", store=store_in(folder, 32_000))
    module["user"].frozen = module["fixed"].frozen = True
    weights = torch.ones(3, requires_grad=True)
    one_each = (torch.tensor([1, 2, 3]), torch.tensor([0]), weights)
    found = module({"user": one_each, "fixed": one_each})["user"]
    module["fixed"].get_rows(torch.tensor([7, 8, 9]))
    (found * torch.arange(1.0, 5)).sum().backward()
    assert weights.grad is not None
    assert len(weights.grad.unique()) == 3


def test_reading_a_fixed_table_leaves_rows_of_a_dynamic_one(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(1).run(weighted_beside_files, str(tmp_path))


@pytest.mark.parametrize("between", ["nothing", "lookup", "get_rows"])
def test_weights_never_get_gradients_of_the_rows_of_other_ids(kept_world: WorldFactory, between: str) -> None:
    kept_world(1).run(weighted_frozen, between=between)


def gone_back(rank: int, world: int) -> None:
    """A state that is loaded in the middle of a step is as in a new process: rows expire, and earlier batches end."""
    module, fresh = (users(100, expire_after=3) for _ in range(2))
    for step in range(8):
        one_step(module, *range(3 * step, 3 * step + 4))
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    fresh.load_state_dict(saved)
    with module.no_sync():
        one_step(module, 1000, 1001)
    held = module({"user": torch.tensor([[2000, 2001]])})["user"]
    module.load_state_dict(saved)
    held.sum().backward()
    module.load_state_dict(saved)
    for one in (module, fresh):
        one_step(one, 24, 25)
    assert module.id_counters()["user"]["used"] == fresh.id_counters()["user"]["used"] < len(range(8 * 3 + 2))
    assert module.digest() == fresh.digest()


def test_a_state_that_is_loaded_again_is_that_of_a_new_process(kept_world: WorldFactory) -> None:
    kept_world(1).run(gone_back)


def stale(rank: int, world: int) -> None:
    module = users(8)
    one_step(module, *range(8))
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    one_step(module, *range(100, 108))
    held = module({"user": torch.arange(100, 108).view(1, -1)})["user"]
    module.load_state_dict(saved)
    before = module["user"].get_rows(torch.arange(8))
    held.sum().backward()
    assert torch.equal(module["user"].get_rows(torch.arange(8)), before)


def test_a_gradient_of_a_lookup_before_a_load_reaches_no_row(kept_world: WorldFactory) -> None:
    kept_world(1).run(stale)


def counted_again(rank: int, world: int) -> dict[str, int]:
    module = users(8, admit_after=3)
    for ids in ([1], [1], range(2, 9), [1, 20]):
        one_step(module, *ids)
    return module.id_counters()["user"]


def test_an_id_that_has_come_often_enough_is_admitted_though_the_counts_are_full(kept_world: WorldFactory) -> None:
    assert kept_world(1).run(counted_again)[0]["admitted"] == 1


def handed_in_spite(rank: int, world: int) -> list[int]:
    """The ids that are handed over in a batch, by column shard, where the function raises each time."""
    table = Table(name="user", rows=8, dim=4, column_shards=2, ids="dynamic")
    module, heard = ShardedEmbeddingBags([table], lr=0.1), list[int]()

    def told(gone: Evicted) -> None:
        heard.extend(gone.ids.tolist())
        raise OSError("disk full")

    module.on_evicted(told)
    one_step(module, *range(8))
    one_step(module, 10)
    with pytest.raises((OSError, SennitError), match="disk full"):
        one_step(module, 11)
    return heard


def raised_last(rank: int, world: int, ends: str) -> list[str]:
    """What is told of a function that raises in the last step."""
    table = Table(name="user", rows=8, dim=4, row_shards=2, ids=DynamicIds(evicted_share=1.0))
    module = ShardedEmbeddingBags([table], lr=0.1, placement="row_wise", gradients="sum")

    def told(gone: Evicted) -> None:
        if rank == 0:
            raise OSError("disk full")

    module.on_evicted(told)
    for first in (0, 100):
        module({"user": torch.arange(first, first + 4).view(-1, 1)[rank::world]})["user"].sum().backward()
    found = []
    for _ in range(2):
        try:
            module.check() if ends == "check" else module.close()
        except (OSError, SennitError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("ends", ["check", "close"])
def test_what_a_function_raises_in_the_last_step_is_told(kept_world: WorldFactory, ends: str) -> None:
    own, others = kept_world(2).run(raised_last, ends)
    assert own == ["OSError: disk full"]
    assert len(others) == (ends == "check")


def waiting(rank: int, world: int, waits: str) -> tuple[str, str]:
    """A function that waits for other ranks, on the first rank. What it hears, and what all hear."""
    table = Table(name="user", rows=8, dim=4, row_shards=2, ids=DynamicIds(evicted_share=1.0))
    module = ShardedEmbeddingBags([table], lr=0.1, placement="row_wise", gradients="sum")
    heard = []

    def told(gone: Evicted) -> None:
        calls = {
            "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
            "barrier": dist.barrier,
            "get_rows": lambda: module["user"].get_rows(gone.ids),
            "digest": module.digest,
        }
        try:
            if rank == 0:
                calls[waits]()
        except ArgumentError as error:
            heard.append(str(error))
            raise

    module.on_evicted(told)
    try:
        for first in (0, 100, 200):
            module({"user": torch.arange(first, first + 4).view(-1, 1)[rank::world]})["user"].sum().backward()
    except SennitError as error:
        return heard[0] if heard else "", str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ("all_reduce", "a collective (allreduce_) in the function of on_evicted; allowed: none"),
        ("barrier", "a collective (barrier) in the function of on_evicted; allowed: none"),
        ("get_rows", "a call of the tables in the function of on_evicted; allowed: none"),
        ("digest", "a call of the tables in the function of on_evicted; allowed: none"),
    ],
)
def test_a_function_that_waits_for_other_ranks_is_refused_at_once(
    kept_world: WorldFactory, waits: str, message: str
) -> None:
    (heard, own), (_, others) = kept_world(2).run(waiting, waits)
    assert heard.startswith(message)
    assert own == heard
    assert others == f"rank 0: ArgumentError: {heard}; the function given to on_evicted has raised it"


def test_a_function_that_raises_hears_of_all_rows_that_go(kept_world: WorldFactory) -> None:
    assert kept_world(1).run(handed_in_spite) == [[0, 0]]
