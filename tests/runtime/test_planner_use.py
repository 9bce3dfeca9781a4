# SPDX-License-Identifier: Apache-2.0
"""How the planner knows which rows are used: samples of data that are sorted by time, and sketches of other runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sennit.offload.sketch import Sketch, SketchShape
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.search import search
from sennit.runtime.planner.splits import hot_tables, splits
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import counted, sampled, saved, uses
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError


def test_a_sample_has_all_times_alike_and_no_period() -> None:
    """Ids are sorted by time, and every second one is of a bag's last place."""
    ids = np.arange(1_000_000)
    found = sampled(ids, 10_000)
    assert len(found) == 10_000
    assert (np.bincount(found // 100_000, minlength=10) == 1_000).all()
    assert 0.4 < (found % 2).mean() < 0.6
    assert sampled(ids, 10_000).tolist() == found.tolist()
    assert sampled(ids[:100], 10_000).tolist() == ids[:100].tolist()


def test_counters_and_sorting_count_the_same() -> None:
    ids = np.random.default_rng(1).zipf(1.3, 5_000).clip(max=9_999) - 1
    few, many = (counted(Table(name="t", rows=rows, dim=4), 2.0, ids) for rows in (10_000, 10_000_000))
    assert few.mass.tolist() == many.mass.tolist()
    assert few.rows.tolist() == many.rows.tolist()


def sketch(path: Path, rows: int | None = 64) -> Path:
    made = Sketch(tables=["user"], table_rows=[rows], shape=SketchShape(width=1024, one_row_in=1))
    made.add_sampled([np.repeat([3, 60], [900, 100])])
    made.rows = 500
    made.save(path)
    return path


def test_a_saved_sketch_says_how_often_rows_are_used(tmp_path: Path) -> None:
    table = Table(name="user", rows=64, dim=4, row_shards=2)
    (use,) = saved([table], sketch(tmp_path / "user.sketch"))
    assert use.mean_length == pytest.approx(2)
    assert use.shares(2) == pytest.approx([0.9, 0.1], abs=0.01)


def test_a_sketch_of_other_tables_is_refused_by_name(tmp_path: Path) -> None:
    path = sketch(tmp_path / "user.sketch")
    with pytest.raises(ConfigError, match=r"--use .*user\.sketch: no table item; it has user"):
        saved([Table(name="item", rows=64, dim=4)], path)
    with pytest.raises(ConfigError, match="table user has 64 rows there, and 65 here"):
        saved([Table(name="user", rows=65, dim=4)], path)
    with pytest.raises(ConfigError, match="No such file"):
        saved([], tmp_path / "missing.sketch")
    (tmp_path / "text").write_text("no sketch")
    with pytest.raises(ConfigError, match="no sketch"):
        saved([], tmp_path / "text")


def hot_problem(lengths: list[float], ranks: int = 4) -> Problem:
    tables = tuple(Table(name=f"t{number}", rows=100_000, dim=32) for number in range(len(lengths)))
    return Problem(
        tables=tables,
        uses=tuple(uses(tables, lengths, None, 1.0)),
        cluster=Cluster(ranks=ranks, local_ranks=ranks, cores=ranks),
        constants=Constants(),
        batch=8_192,
        slices=ranks,
    )


def test_row_shards_of_a_hot_table_are_rated_and_the_model_stays_as_it_is() -> None:
    lengths = [100.0, *[2.0] * 10]
    rating = Rating(hot_problem(lengths))
    assert hot_tables(rating) == [0]
    found = splits(rating, lambda tables: uses(tables, lengths[:1], None, 1.0))
    assert [one.row_shards for one in found] == [2, 4, 8]
    assert all(one.tables == ("t0",) for one in found)
    assert min(one.step_s for one in found) < 0.8 * search(rating).best.seconds
    assert all(table.row_shards == 1 for table in rating.problem.tables)


def test_nothing_is_split_where_no_table_is_hot() -> None:
    def refuse(tables: object) -> list[object]:
        raise AssertionError(tables)

    for problem in (hot_problem([5.0] * 16), hot_problem([100.0, 2.0], ranks=1)):
        assert splits(Rating(problem), refuse) == []  # type: ignore[arg-type]
    few = hot_problem([100.0, 2.0])
    tiny = dataclasses.replace(few, tables=tuple(dataclasses.replace(one, rows=3) for one in few.tables))
    found = splits(Rating(tiny), lambda tables: uses(tables, [100.0, 2.0][: len(tables)], None, 1.0))
    assert [one.row_shards for one in found] == [2]
