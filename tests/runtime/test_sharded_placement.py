# SPDX-License-Identifier: Apache-2.0
"""Shards placed within the memory of the ranks, and helpers of tables."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling
from sennit.runtime.kernels.checks import IdError
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.dealing import dealt
from sennit.runtime.sharded.features import ids_of
from sennit.runtime.sharded.placement import SHARDINGS, Placement, place
from sennit.runtime.sharded.tables import Home, Homes, Shard, Table, shard_bytes, shards_of
from sennit.transport.errors import ConfigError

SGD = OptimizerSpec(kind=Optimizer.SGD)


def table(name: str, rows: int, *, row_shards: int = 1, column_shards: int = 1) -> Table:
    """40 bytes a row."""
    return Table(name=name, rows=rows, dim=10, row_shards=row_shards, column_shards=column_shards, optimizer=SGD)


def used(tables: list[Table], found: Placement) -> list[int]:
    """Bytes on each rank."""
    return [sum(shard_bytes(tables, shard) for shard in found.shards_on(rank)) for rank in range(found.world_size)]


@pytest.mark.parametrize("local_ranks", [None, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_limits_that_are_not_reached_change_nothing(sharding: str, local_ranks: int | None) -> None:
    tables = [table("a", 10, row_shards=4, column_shards=2), table("b", 11, column_shards=5), table("c", 7)]
    found = place(tables, 4, sharding, local_ranks=local_ranks, limits=[2000] * 4)
    assert found == place(tables, 4, sharding, local_ranks=local_ranks)


@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "data_parallel"])
@pytest.mark.parametrize("limits", [[500, 4000, 900, 1000], [900, 900, 900, 900], [4000, 1000, 1000, 1000]])
def test_limits_hold_with_every_sharding(sharding: str, limits: list[int]) -> None:
    tables = [
        table("a", 20, row_shards=4, column_shards=2),
        table("b", 12, row_shards=3, column_shards=2),
        table("c", 5),
    ]
    found = place(tables, 4, {"a": sharding, "b": sharding}, limits=limits)
    assert set(found.owner_of) == set(shards_of(tables))
    assert all(size <= limit for size, limit in zip(used(tables, found), limits, strict=True))


@pytest.mark.parametrize("sharding", ["row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid"])
def test_a_table_of_one_shard_is_not_spread(sharding: str) -> None:
    single, spread = [table("a", 10), table("b", 9)], table("c", 8, row_shards=2, column_shards=2)
    message = f"table a: sharding {sharding}, but one rank would have all of it: .*_shards 1; allowed: .* of 2 or more"
    for wrong in (sharding, {"a": sharding}):
        with pytest.raises(ConfigError, match=message):
            place(single, 2, wrong)
        place(single, 1, wrong)
    with pytest.raises(ConfigError, match=message):
        place([*single, spread], 2, {"a": sharding, "c": sharding})
    # A name for all tables spreads what it can. The others do not come together on a rank.
    owners = place([*single, spread], 2, sharding).owner_of
    assert {owners[Shard(0, 0, 0)], owners[Shard(1, 0, 0)]} == {0, 1}
    assert {rank for shard, rank in owners.items() if shard.table == 2} == {0, 1}
    if sharding.startswith("table_"):
        place(single, 2, sharding, local_ranks=1)
    # Tensor trains are whole everywhere.
    train = Table(name="train", rows=1000, dim=8, train_rank=2)
    assert place([train], 2, sharding) == place([train], 2)
    assert place([train, spread], 2, {"train": sharding}) == place([train, spread], 2)


def test_a_rank_without_room_is_passed_over() -> None:
    tables = [table("large", 20), table("medium", 15), table("small", 10)]
    assert place(tables, 2).owner_of[Shard(2, 0, 0)] == 1
    assert place(tables, 2, limits=[1200, 999]).owner_of == {
        Shard(0, 0, 0): 0,
        Shard(1, 0, 0): 1,
        Shard(2, 0, 0): 0,
    }


def test_tables_that_fit_only_by_memory_are_placed_by_memory() -> None:
    """By load, the largest goes to the first rank, and leaves too little for a small one on either."""
    tables = [table("a", 2), table("b", 2), table("c", 4), table("d", 5)]
    assert used(tables, place(tables, 2)) == [280, 240]
    found = place(tables, 2, limits=[240, 300])
    assert used(tables, found) == [240, 280]
    assert found.owner_of[Shard(3, 0, 0)] == 1


def test_a_row_shard_whose_rank_has_no_room_goes_elsewhere() -> None:
    """Shards of 400 bytes: contiguous ranges would give each rank two."""
    tables = [table("a", 60, row_shards=6)]
    found = place(tables, 3, "row_wise", limits=[800, 400, 1200])
    assert [found.owner_of[Shard(0, row, 0)] for row in range(6)] == [0, 0, 1, 2, 2, 2]


def test_a_host_without_room_is_passed_over() -> None:
    tables = [table("a", 40, row_shards=4), table("b", 20, row_shards=4)]
    free = place(tables, 4, "table_row_wise", local_ranks=2)
    assert {rank for shard, rank in free.owner_of.items() if shard.table == 0} == {0, 1}
    found = place(tables, 4, "table_row_wise", local_ranks=2, limits=[900, 600, 900, 900])
    assert {rank for shard, rank in found.owner_of.items() if shard.table == 0} == {2, 3}
    assert {rank for shard, rank in found.owner_of.items() if shard.table == 1} == {0, 1}


@pytest.mark.parametrize(
    ("sharding", "limits", "message"),
    [
        (
            "table_wise",
            [1000, 1500],
            r"table huge needs 2,400 bytes with its optimizer states. Of the 1,500 bytes for tables on rank 1, "
            r"which has the most room, 1,500 are left: 900 bytes are missing. "
            r"All tables need 2,600 bytes, all ranks have 2,500. Give more ranks, a table store, tensor",
        ),
        (
            "data_parallel",
            [9999, 2500],
            r"table huge needs .* rank 1, which has the least room, 2,300 are left: 100 b",
        ),
        (
            "row_wise",
            [1000, 1500],
            r"shard huge/2.0 of table huge needs 800 bytes .* on rank 1, .* 700 are left: 100 bytes are missing",
        ),
    ],
)
def test_a_table_without_room_is_named_with_the_missing_bytes(sharding: str, limits: list[int], message: str) -> None:
    tables = [table("small", 5), table("huge", 60, row_shards=3)]
    with pytest.raises(ConfigError, match=message):
        place(tables, 2, sharding, limits=limits)


def test_tables_count_where_they_lie() -> None:
    """400, 400 and 480 bytes. Without homes there would be no room for any of them in memory beside the others."""
    tables = [table("large", 10), table("medium", 10), table("small", 12)]
    tables[0] = dataclasses.replace(tables[0], home=Home.DRAM)
    homes = Homes(has_store=True)
    found = place(tables, 1, limits={Home.DRAM: [400]}, homes=homes)
    assert used(tables, found) == [1280]
    assert place(tables, 1, limits={Home.DRAM: [400], Home.FILE: [880]}, homes=homes) == found
    with pytest.raises(ConfigError, match=r"table large .* Of the 399 bytes for tables on rank 0, .* 1 bytes are"):
        place(tables, 1, limits={Home.DRAM: [399]}, homes=homes)
    message = (
        r"table medium needs 400 bytes .* Of the 879 bytes for tables in file on rank 0, .* 399 are left: 1 bytes are "
        r"missing. All tables in file need 880 bytes, all ranks have 879. Give more ranks, tensor trains, more row "
        r"shards or fewer columns$"
    )
    with pytest.raises(ConfigError, match=message):
        place(tables, 1, limits={Home.DRAM: [400], Home.FILE: [879]}, homes=homes)
    # What every rank has is in memory.
    message = r"All tables need 880 bytes, all ranks have 879. Give more ranks, tables with home = \"file\", tensor"
    with pytest.raises(ConfigError, match=message):
        place(tables, 1, {"small": "data_parallel"}, limits={Home.DRAM: [879]}, homes=homes)
    with pytest.raises(ConfigError, match="table large: home file without a table store; allowed: dram"):
        place([dataclasses.replace(tables[0], home=Home.FILE)], 1, limits=[400])


def test_each_rank_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="limits of 1 ranks, but there are 2"):
        place([table("a", 5)], 2, limits=[100])


def test_a_table_becomes_a_tensor_train_if_that_is_smaller() -> None:
    large, small = Table(name="large", rows=100_000, dim=64), Table(name="small", rows=3, dim=8)
    train = large.as_train(8)
    assert train.train_rank == 8
    spec = train.spec_of(0, 0)
    assert isinstance(spec, TensorTrainSpec)
    # Row-wise AdaGrad has one float for each row of a core.
    assert shard_bytes([train], Shard(0, 0, 0)) == 4 * (spec.parameter_count + sum(spec.row_factors))
    assert small.as_train(8) is small


@pytest.mark.parametrize(
    ("bounds", "expected"), [(Bounds.WRAP, [5, 2_999_999_999, 7]), (Bounds.IGNORE, [5, 7]), (Bounds.ERROR, None)]
)
def test_int32_ids_may_be_of_a_table_with_more_rows(bounds: Bounds, expected: list[int] | None) -> None:
    large = Table(name="a", rows=3_000_000_000, dim=1, bounds=bounds, row_shards=4)
    given = {"a": torch.tensor([5, -1, 7], dtype=torch.int32)}
    if expected is None:
        with pytest.raises(IdError, match="id -1 at position 1"):
            ids_of(given, [large])
        return
    values = ids_of(given, [large]).values
    assert values.tolist() == expected
    weights = torch.arange(len(values), dtype=torch.float32)
    lengths = torch.ones(len(values), dtype=torch.int32)
    parts = dealt(large, lengths, values, weights)
    assert [part[1].tolist() for part in parts] == [[5, 7], [], [], [749_999_999] if bounds is Bounds.WRAP else []]
    assert dealt(large, lengths[:1], values[:1].to(torch.int32), weights[:1])[0][1].tolist() == [5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_shards": 2}, "row_shards 2; allowed: 1 with a train_rank"),
        ({"column_shards": 2}, "column_shards 2; allowed: 1 with a train_rank"),
        ({"initial": lambda rows, generator: None}, "initial .*; allowed: None with a train_rank"),
        ({"train_rank": 0}, "rank 0; allowed: 1 to 4096"),
        ({"train_rank": 4096}, "numbers in a slice of core 2"),
    ],
)
def test_what_a_tensor_train_cannot_have_is_refused(change: dict[str, object], message: str) -> None:
    given = {"name": "t", "rows": 10_000_000, "dim": 64, "pooling": Pooling.SUM, "train_rank": 4, **change}
    with pytest.raises(ConfigError, match=message):
        Table(**given)  # type: ignore[arg-type]
