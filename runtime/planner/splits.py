# SPDX-License-Identifier: Apache-2.0
"""What more row shards of hot tables would save. Shards decide bits (decision 0056), so the planner only says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.search import search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import Use
from sennit.runtime.sharded.tables import Table

TRIED: Final = (2, 4, 8)
# A table with more than this share of a rank's mean work is in the way of balance.
HOT: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The best placement of a model that has more row shards."""

    row_shards: int
    tables: tuple[str, ...]
    """Tables with as many row shards."""
    step_s: float


def hot_tables(rating: Rating) -> list[int]:
    """Numbers of whole tables that keep one rank busy for much of a step, the hottest first."""
    problem, ranks = rating.problem, rating.problem.cluster.ranks
    if ranks == 1:
        return []
    busy = np.array(
        [
            rating.rank_seconds(rating.work(number, np.zeros((table.row_shards, table.column_shards), np.int64))).max()
            for number, table in enumerate(problem.tables)
        ]
    )
    found = [
        number
        for number, table in enumerate(problem.tables)
        if table.row_shards == 1 and table.train_rank is None and busy[number] > HOT * busy.sum() / ranks
    ]
    return sorted(found, key=lambda number: -busy[number])


def splits(rating: Rating, uses_of: Callable[[Sequence[Table]], Sequence[Use]]) -> list[Split]:
    """Hot tables with 2, 4 and 8 row shards, as far as they have rows; nothing if no table is hot.

    `uses_of`: the use of tables with other row shards.
    """
    problem, hot, found = rating.problem, hot_tables(rating), []
    for count in TRIED:
        chosen = [number for number in hot if problem.tables[number].rows >= count]
        if not chosen:
            continue
        tables, uses = list(problem.tables), list(problem.uses)
        for number in chosen:
            tables[number] = dataclasses.replace(tables[number], row_shards=count)
        for number, use in zip(chosen, uses_of([tables[number] for number in chosen]), strict=True):
            uses[number] = use
        changed: Problem = dataclasses.replace(problem, tables=tuple(tables), uses=tuple(uses))
        found.append(
            Split(
                row_shards=count,
                tables=tuple(tables[number].name for number in chosen),
                step_s=search(Rating(changed)).best.seconds,
            )
        )
    return found
