# SPDX-License-Identifier: Apache-2.0
"""Whether shards of a running model should move: what another placement saves of a step, and what a move costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sennit.runtime.planner.report import why
from sennit.runtime.planner.search import Found, local, of_placement, search
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import Use
from sennit.runtime.sharded.placement import EVERYWHERE, Placement
from sennit.runtime.sharded.tables import Shard, Table, shard_bytes, shard_name

# A move has to save this share of a step: a smaller one may be an error of the prediction.
GAIN_MIN: Final = 0.03
# A move has to save so many times what it costs.
SAVED_MIN: Final = 2.0
# A reason names the changed use of at most this many tables.
NAMED: Final = 2


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Another placement that pays."""

    found: Found
    shards: dict[str, tuple[int, int]]
    """The ranks of the shards that move, before and after; -1 is every rank."""
    size_bytes: int
    """Bytes that all ranks receive."""
    before_s: float
    """Predicted seconds of a step with the present placement, and with the other one."""
    after_s: float
    because: str


def propose(rating: Rating, present: Placement, earlier: Sequence[Use], *, steps: int) -> Proposal | None:
    """The placement that saves the most in so many steps, the move included; None if no move pays.

    `rating` knows the use of rows now. `earlier`: that for which `present` was chosen.
    """
    now = of_placement(rating, "present", present)
    best: tuple[float, Found, dict[str, tuple[int, int]], int] | None = None
    for found in (local(rating, now), search(rating).best):
        shards, came = _moves(rating, present, found.placement(rating))
        gain = (now.seconds - found.seconds) * steps
        cost = SAVED_MIN * _seconds(rating, came)
        pays = now.seconds - found.seconds > GAIN_MIN * now.seconds and gain > cost
        if shards and pays and (best is None or gain - cost > best[0]):
            best = gain - cost, found, shards, int(came.sum())
    if best is None:
        return None
    _, found, shards, size_bytes = best
    return Proposal(
        found=found,
        shards=shards,
        size_bytes=size_bytes,
        before_s=now.seconds,
        after_s=found.seconds,
        because="; ".join(
            [*changed(rating.problem.tables, earlier, rating.problem.uses), f"the old ranks take {why(now, found)}"]
        ),
    )


def _moves(rating: Rating, before: Placement, after: Placement) -> tuple[dict[str, tuple[int, int]], np.ndarray]:
    """The shards whose ranks differ, and the bytes that each rank gets."""
    tables, came = rating.problem.tables, np.zeros(rating.problem.cluster.ranks)
    moves = {}
    for shard, giver in before.owner_of.items():
        owner = after.owner_of[shard]
        if giver == owner:
            continue
        moves[shard_name(tables, shard)] = giver, owner
        if giver != EVERYWHERE:
            takers = np.ones(len(came), bool) if owner == EVERYWHERE else np.arange(len(came)) == owner
            takers[giver] = False
            came[takers] += shard_bytes(tables, shard)
    return moves, came


def _seconds(rating: Rating, came: np.ndarray) -> float:
    """Seconds of a move in which each rank gets `came` bytes. Shards travel one after the other, to new memory.

    If tables are in files, all files are written anew: rows are read and copied, and then read and written once more.
    """
    cluster, memory = rating.problem.cluster, rating.problem.constants.memory
    byte_s = rating.far.byte_s if cluster.hosts > 1 else rating.near.byte_s
    files_s = 2 * rating.file_bytes * memory.file_byte_s if cluster.cache_bytes is not None else 0.0
    return float(came.sum()) * (byte_s + memory.fresh_byte_s) + files_s


def changed(tables: Sequence[Table], before: Sequence[Use], after: Sequence[Use]) -> list[str]:
    """How the use of tables has changed, where it has changed the most."""
    told: list[tuple[float, str]] = []
    all_ids = sum(use.mean_length * len(table.features) for table, use in zip(tables, after, strict=True)) or 1.0
    for number, (table, old, new) in enumerate(zip(tables, before, after, strict=True)):
        ids = max(old.mean_length, new.mean_length) * len(table.features) / all_ids
        told.append(
            (
                ids * abs(new.mean_length - old.mean_length) / max(old.mean_length, new.mean_length, 1e-9),
                f"{table.name} has {new.mean_length:.3g} ids a sample, before {old.mean_length:.3g}",
            )
        )
        if table.row_shards > 1:
            shares = old.shares(table.row_shards), new.shares(table.row_shards)
            row = int(np.argmax(np.abs(shares[1] - shares[0])))
            told.append(
                (
                    ids * float(np.abs(shares[1] - shares[0]).sum()) / 2,
                    f"{shard_name(tables, Shard(number, row, 0))} has {shares[1][row]:.0%} of its table's ids, "
                    f"before {shares[0][row]:.0%}",
                )
            )
    return [text for weight, text in sorted(told, key=lambda one: -one[0])[:NAMED] if weight > 0.01]
