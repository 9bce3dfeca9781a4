# SPDX-License-Identifier: Apache-2.0
"""`sennit bench planner --large`: how long a plan takes for a model and a cluster that are made up.

Tables are drawn with a fixed seed: rows of 1,000 to 10 million, bags of 1 to 50 ids, the larger tables in row shards.
No memory is needed for them. Constants are the built-in ones, so that every machine plans the same.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console

from sennit.runtime.calibrate import machine
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.problem import Fixed, Problem
from sennit.runtime.planner.search import round_robin, search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import ZIPF, uses
from sennit.runtime.sharded.tables import Table

SEED: Final = 1
DIMS: Final = (16, 32, 64, 128)
# Tables with more rows have shards.
LARGE_ROWS, ROW_SHARDS = 1_000_000, 8
SAMPLES_A_RANK: Final = 512


@dataclass(frozen=True, kw_only=True)
class Result:
    """A plan, and what it took."""

    tables: int
    shards: int
    ranks: int
    hosts: int
    wall_s: float
    """Seconds to rate and search. Other work of the machine counts."""
    processor_s: float
    step_s: float
    """Predicted seconds of a step."""
    round_robin_s: float


def problem(tables: int, ranks: int, local_ranks: int) -> Problem:
    """The problem with these numbers of tables and ranks. It is the same in each call."""
    dice = np.random.default_rng(SEED)
    rows = np.exp(dice.uniform(np.log(1e3), np.log(1e7), tables)).astype(np.int64)
    lengths, dims = dice.integers(1, 51, tables), dice.choice(DIMS, tables)
    made = tuple(
        Table(
            name=f"t{number}",
            rows=int(rows[number]),
            dim=int(dims[number]),
            row_shards=ROW_SHARDS if rows[number] > LARGE_ROWS else 1,
        )
        for number in range(tables)
    )
    return Problem(
        tables=made,
        uses=tuple(uses(made, [float(length) for length in lengths], None, ZIPF)),
        cluster=Cluster(ranks=ranks, local_ranks=local_ranks, cores=local_ranks),
        constants=Constants(),
        batch=SAMPLES_A_RANK * ranks,
        slices=ranks,
        fixed=Fixed(input_sample_s=1e-6, slice_s=2e-3, update_s=1e-3, gradient_bytes=1 << 20),
        ahead=True,
        tables_beside=True,
    )


def run(tables: int = 1_000, ranks: int = 128, local_ranks: int = 8) -> Result:
    """Plans once."""
    given = problem(tables, ranks, local_ranks)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    rating = Rating(given)
    best = search(rating).best
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    return Result(
        tables=tables,
        shards=sum(table.row_shards * table.column_shards for table in given.tables),
        ranks=ranks,
        hosts=given.cluster.hosts,
        wall_s=wall_s,
        processor_s=processor_s,
        step_s=best.seconds,
        round_robin_s=round_robin(rating).seconds,
    )


def as_json(result: Result) -> dict[str, Any]:
    return {"machine": machine.describe(), **asdict(result)}


def render(result: Result, console: Console) -> None:
    console.print(
        f"{result.tables:,} tables ({result.shards:,} shards) on {result.ranks} ranks of {result.hosts} hosts: planned "
        f"in {result.wall_s:.1f} s, {result.processor_s:.1f} s of a processor. A step of {result.step_s * 1e3:.1f} ms "
        f"predicted, {result.round_robin_s * 1e3:.1f} with round robin",
        soft_wrap=True,
    )
