# SPDX-License-Identifier: Apache-2.0
"""What `sennit shard` prints: the placement, its time by phase, memory by rank, and what others would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Lines

from sennit.runtime.planner.schedule import PHASES
from sennit.runtime.planner.search import Found, Owners, Searched
from sennit.runtime.planner.splits import Split
from sennit.runtime.planner.step_time import Kind, Rating
from sennit.runtime.sharded.placement import EVERYWHERE

# A table for people has at most this many lines.
TABLES_SHOWN: Final = 40
TABLES_NAMED: Final = 4
RANKS_SHOWN: Final = 16
# A phase is named if its difference is at least this share of the step.
WORTH: Final = 0.005


def where(owners: Owners) -> str:
    """Where the shards of a table are, in words."""
    if owners.flat[0] == EVERYWHERE:
        return "every rank"
    ranks = sorted({int(rank) for rank in owners.flat})
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    by_rows = bool((owners == owners[:, :1]).all())
    by_columns = bool((owners == owners[:1]).all())
    what = "rows" if by_rows else "columns" if by_columns else "rows and columns"
    shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}, {len(ranks)} of them"
    return f"{what} over ranks {shown}"


def why(found: Found, best: Found) -> str:
    """The phases in which a placement is slower or faster than the best one."""
    gaps = {phase: found.phases[phase] - best.phases[phase] for phase in PHASES}
    told = sorted((p for p in PHASES if abs(gaps[p]) > WORTH * best.seconds), key=lambda p: -abs(gaps[p]))[:3]
    return ", ".join(f"{phase} {gaps[phase] * 1e3:+.2f} ms" for phase in told) or "no phase differs much"


def as_json(rating: Rating, searched: Searched, splits: Sequence[Split], notes: Sequence[str]) -> dict[str, Any]:
    """The report for programs: seconds and bytes."""
    best, cluster = searched.best, rating.problem.cluster
    return {
        "ranks": cluster.ranks,
        "hosts": cluster.hosts,
        "tier": cluster.tier,
        "chosen": best.name,
        "proven": searched.is_proven,
        "step_s": best.seconds,
        "phases_s": best.phases,
        "memory_bytes": [int(size) for size in best.work[Kind.MEMORY]],
        "memory_of_replicas_bytes": [int(size) for size in best.work[Kind.OWN]],
        "busy_s": [float(seconds) for seconds in rating.rank_seconds(best.work)],
        "others": [{"name": one.name, "step_s": one.seconds, "phases_s": one.phases} for one in searched.others],
        "shards": best.shards(rating),
        "splits": [asdict(one) for one in splits],
        "notes": list(notes),
    }


def render(rating: Rating, searched: Searched, splits: Sequence[Split], notes: Sequence[str], console: Console) -> None:
    best, problem = searched.best, rating.problem
    cluster = problem.cluster
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    proof = "no better one of these kinds" if searched.is_proven else "not proven the best"
    title = f"{cluster.ranks} ranks, {cluster.hosts} {'host' if cluster.hosts == 1 else 'hosts'}: {best.name}, {proof}"
    lines = Lines("table", "rows", "where", title=title)
    for table, owners in list(zip(problem.tables, best.owners, strict=True))[:TABLES_SHOWN]:
        lines.add_row(table.name, f"{table.rows:,} x {table.dim}", where(owners))
    console.print(lines)
    if len(problem.tables) > TABLES_SHOWN:
        console.print(f"and {len(problem.tables) - TABLES_SHOWN} tables more: --output FILE has all")
    lines = Lines("phase", title="Predicted step, of the slowest rank in each phase")
    for heading in ("ms", "share"):
        lines.add_column(heading, justify="right")
    for phase in PHASES:
        if best.phases[phase]:
            lines.add_row(phase, f"{best.phases[phase] * 1e3:.2f}", f"{best.phases[phase] / best.seconds:.0%}")
    lines.add_row("step", f"{best.seconds * 1e3:.2f}", f"{problem.batch / best.seconds:,.0f} samples/s")
    console.print(lines)
    _render_ranks(rating, best, console)
    lines = Lines("placement", title="Others")
    for heading in ("ms", "step"):
        lines.add_column(heading, justify="right")
    lines.add_column("because of")
    for other in searched.others:
        lines.add_row(
            other.name,
            f"{other.seconds * 1e3:.2f}",
            f"{other.seconds / best.seconds:.2f} x",
            why(other, best),
        )
    console.print(lines)
    for one in splits:
        shown = ", ".join(one.tables[:TABLES_NAMED]) + ("" if len(one.tables) <= TABLES_NAMED else " and others")
        console.print(
            f"with row_shards = {one.row_shards} of {shown}: {one.step_s * 1e3:.2f} ms "
            f"({one.step_s / best.seconds:.2f} x); other weights, since shards belong to the model",
            soft_wrap=True,
        )


def _render_ranks(rating: Rating, best: Found, console: Console) -> None:
    cluster = rating.problem.cluster
    busy = rating.rank_seconds(best.work)
    lines = Lines("rank", title=f"Of each rank; tables are in {cluster.tier}")
    for heading in ("shards", cluster.tier, "free", "replicas and trains", "own work ms"):
        lines.add_column(heading, justify="right")
    shown = np.argsort(-busy, kind="stable")[:RANKS_SHOWN] if cluster.ranks > RANKS_SHOWN else range(cluster.ranks)
    for rank in shown:
        used = int(best.work[Kind.MEMORY, rank])
        free = "" if cluster.limits is None else decimal(int(cluster.limits[rank]) - used)
        lines.add_row(
            str(rank),
            str(sum(int(np.isin(owners, (rank, EVERYWHERE)).sum()) for owners in best.owners)),
            decimal(used),
            free,
            decimal(int(best.work[Kind.OWN, rank])),
            f"{busy[rank] * 1e3:.2f}",
        )
    console.print(lines)
    if cluster.ranks > RANKS_SHOWN:
        console.print(f"the {RANKS_SHOWN} with the most work, of {cluster.ranks}")
