# SPDX-License-Identifier: Apache-2.0
"""Shards that move while a run goes on: when, why, and that no bit changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.offload.sketch import Sketch, SketchShape
from sennit.runtime.checkpoint.digest import digest
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.batch_source import IdCounter
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import PRECISIONS, Constants, Kernel
from sennit.runtime.planner.move_or_stay import propose
from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.search import search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import Use, counted, sketched
from sennit.runtime.sharded.files import TableStore
from sennit.runtime.sharded.tables import Shard, Table, shard_bytes
from sennit.runtime.stream.source import StreamSource
from sennit.runtime.training import planned
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.rebalance import Moved, shape_of
from sennit.runtime.training.trainer import Trainer
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.short_sources import fitted, opened
from tests.runtime.trainer_runs import config_of
from tests.runtime.world import WorldFactory

KERNEL = tuple(field.name for field in dataclasses.fields(Kernel))


class Shifting(StreamSource):
    """From batch `at` on, a third of the ids is of the last eight rows. `every`: counts ids for looks so far apart."""

    def __init__(self, samples: Samples, config: TrainingConfig, *, at: int, every: int | None) -> None:
        found = opened(samples, config)
        super().__init__(
            found.stream, found.order, fitted(found), rank=dist.get_rank(), world_size=dist.get_world_size()
        )
        self.at = at
        self.counter = None if every is None else IdCounter(self.tables, shape_of(every, config.batch_size))

    def take(self, number: int) -> Batch:
        batch = super().take(number)
        if number >= self.at:
            hot = self.tables[0].rows - 8 + batch.values % 8
            batch = dataclasses.replace(batch, values=torch.where(batch.values % 3 == 0, hot, batch.values))
        if self.counter is not None:
            self.counter.count(number, batch)
        return batch

    def sketch(self) -> Sketch | None:
        return None if self.counter is None else self.counter.sketch


def rebalanced(
    rank: int, world: int, /, *, seed: int, at: int, every: int | None, rows: str | None = None, **changed: Any
) -> dict[str, Any]:
    """A whole run of 24 steps. Ids are uniform, and from batch `at` on the last of eight row shards has 42 % of them.

    Kernels are so slow that nothing else counts, and each rank has a core.
    """
    stream = numpy_stream(seed, "rebalanced")
    data = Samples(
        name="skewed",
        dense=torch.from_numpy(stream.standard_normal((600, 2)).astype(np.float32)),
        labels=torch.from_numpy((stream.random(600) < 0.5).astype(np.float32)),
        columns=(Column.bags("user", 64, stream.integers(0, 64, 6000), np.full(600, 10)),),
    )
    if rows is not None:
        changed["table_store"] = TableStore(folder=Path(rows), memory_bytes=40_000)
    config = config_of(seed, row_shards=8, batch_size=50, max_steps=24, rebalance=every, **changed)
    source = Shifting(data, config, at=at, every=every)
    slow = {name: Kernel(**dict.fromkeys(KERNEL, 0.0) | {"id_s": 1e-3}) for name in PRECISIONS}
    constants = Constants(lookup=slow, update=slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "read_constants", lambda path: (constants, []))
        patch.setattr(planned, "cores_here", lambda: world)
        run = Trainer(config, source)
    source.begin(0)
    run.run(lambda step: None, lambda evaluation: False, lambda step: None)
    moved = Moved() if run.rebalancer is None else run.rebalancer.moved
    return {
        "sha256": digest(run.weights()),
        "looks": moved.looks,
        "moves": [dataclasses.asdict(move) | {"text": str(move)} for move in moved.moves],
        "shards": sorted(run.own_shards),
    }


# No rank has room for the whole table, so none is replicated.
RUN: dict[str, Any] = {"sharding": "auto", "every": 6, "rank_memory_bytes": 1100}


def plain(kept_world: WorldFactory, seed: int, at: int) -> str:
    """The weights of a run on one rank whose skew shifts at batch `at`."""
    alone = kept_world(1).run(rebalanced, seed=seed, at=at, every=None, sharding="table_wise")
    return str(alone[0]["sha256"])


@pytest.mark.parametrize("ahead", briefly([0, 3], [3]))
def test_shards_move_when_the_skew_shifts_and_no_bit_changes(kept_world: WorldFactory, seed: int, ahead: int) -> None:
    found = kept_world(2).run(rebalanced, seed=seed, at=8, batches_ahead=ahead, **RUN)
    assert [one["sha256"] for one in found] == [plain(kept_world, seed, 8)] * 2
    # The look after 12 steps has seen the shift, and that after 18 nothing else.
    assert [one["looks"] for one in found] == [3, 3]
    moves = found[0]["moves"]
    assert moves
    assert {move["step"] for move in moves} <= {12, 18}
    assert sum(move["size_bytes"] for move in moves) > 0
    assert all(move["predicted_after_s"] < 0.97 * move["predicted_before_s"] for move in moves)
    assert "user/" in moves[0]["text"]
    assert "% of its table's ids, before" in moves[0]["text"]
    assert "the old ranks take" in moves[0]["text"]
    # What the report says is where shards are.
    ranks = {name: after for move in moves for name, (_, after) in move["shards"].items()}
    for name, owner in ranks.items():
        assert [name in one["shards"] for one in found] == [owner == rank for rank in (0, 1)]


def test_shards_in_files_move_as_well(kept_world: WorldFactory, seed: int, tmp_path: Path) -> None:
    found = kept_world(2).run(rebalanced, seed=seed, at=8, rows=str(tmp_path), **RUN)
    assert [one["sha256"] for one in found] == [plain(kept_world, seed, 8)] * 2
    assert found[0]["moves"]
    assert not list(tmp_path.iterdir())


def test_shards_stay_where_nothing_has_changed(kept_world: WorldFactory, seed: int) -> None:
    found = kept_world(2).run(rebalanced, seed=seed, at=1_000, **RUN)
    assert [one["sha256"] for one in found] == [plain(kept_world, seed, 1_000)] * 2
    assert [(one["looks"], one["moves"]) for one in found] == [(3, []), (3, [])]


def test_a_run_without_a_look_is_refused(kept_world: WorldFactory, seed: int) -> None:
    with pytest.raises(Exception, match="--rebalance 24 in a run of 24 steps"):
        kept_world(2).run(rebalanced, seed=seed, at=0, sharding="auto", every=24)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rebalance": 0}, "rebalance 0; allowed: 1 to"),
        ({"sharding": "row_wise"}, "--rebalance with a placement that is given"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(1, **{"rebalance": 5, "sharding": "auto", **options})


def test_one_rank_has_nothing_to_move() -> None:
    with pytest.raises(ConfigError, match="--rebalance with one rank"):
        config_of(1, rebalance=5, sharding="auto").check_world(1)
    # Others may join.
    config_of(1, rebalance=5, sharding="auto", elastic=True).check_world(1)


def rating(use: Use, table: Table) -> Rating:
    """Four ranks with room for seven shards of eight, so that none has all."""
    limits = [7 * shard_bytes([table], Shard(0, 0, 0))] * 4
    return Rating(
        Problem(
            tables=(table,),
            uses=(use,),
            cluster=Cluster(ranks=4, local_ranks=4, cores=4, limits=limits),
            constants=Constants(),
            batch=65_536,
            slices=8,
        )
    )


def test_a_move_has_to_pay_for_itself() -> None:
    table = Table(name="t", rows=80_000, dim=32, row_shards=8)
    ids = np.concatenate([np.arange(10_000).repeat(20), np.arange(80_000)])
    before, after = counted(table, 40.0, ids), counted(table, 40.0, 79_999 - ids)
    present = search(rating(before, table)).best.placement(rating(before, table))
    assert propose(rating(before, table), present, [before], steps=10_000) is None
    found = propose(rating(after, table), present, [before], steps=10_000)
    assert found is not None
    assert found.after_s < found.before_s
    assert found.size_bytes > 0
    # Slow links and few steps: a move would cost more than it saves.
    costly = rating(after, table)
    costly.near = costly.near._replace(byte_s=1e-3)
    assert propose(costly, present, [before], steps=1) is None


@pytest.mark.parametrize(("rows", "exponent"), [(50, 0.0), (2_000, 1.0), (100_000, 1.05)])
def test_a_sketch_tells_what_counting_tells(rows: int, exponent: float) -> None:
    dice = np.random.default_rng(rows)
    shares = np.arange(1, rows + 1.0) ** -exponent
    ids = dice.choice(rows, 60_000, p=shares / shares.sum())
    table = Table(name="t", rows=rows, dim=8, row_shards=4)
    sketch = Sketch(tables=["t"], table_rows=[rows], shape=SketchShape(one_row_in=1))
    sketch.add_sampled([ids])
    sketch.rows = 6_000
    use = sketched(table, sketch)
    assert use.mean_length == 10
    assert use.rows.sum() == rows
    true = np.add.reduceat(shares / shares.sum(), table.row_borders[:-1])
    assert use.shares(4) == pytest.approx(true, abs=0.02)
    assert use.distinct(60_000, 4).sum() == pytest.approx(-np.expm1(-60_000 * shares / shares.sum()).sum(), rel=0.3)


def test_an_empty_sketch_is_no_sketch() -> None:
    table = Table(name="t", rows=10, dim=8, row_shards=2)
    use = sketched(table, Sketch(tables=["t"], table_rows=[10], shape=SketchShape()))
    assert use.mean_length == 0
    assert use.shares(2) == pytest.approx([0.5, 0.5])
