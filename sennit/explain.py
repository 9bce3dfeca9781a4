# SPDX-License-Identifier: Apache-2.0
"""`sennit explain`: which algorithm a collective takes, what each would do, and what the model thinks it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.calibration import DEFAULTS
from sennit.transport.cost_model import Collective, Work
from sennit.transport.hosts import Hosts
from sennit.transport.selection import OF_PARTS, Selection, size_class
from sennit.transport.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from sennit.transport.calibration import Calibration
    from sennit.transport.config import Algorithm


def explain(
    collective: Collective,
    size_bytes: int,
    *,
    ranks: int,
    hosts: int,
    forced: Algorithm | None,
    calibration: Calibration,
    leaves: int | None = None,
) -> dict[str, Any]:
    """Returns the choice for a vector of `size_bytes` of fp32, and a row for each algorithm that can run.

    `leaves`: of an allreduce; by default one a rank.
    """
    selection = Selection(
        hosts=Hosts.equal(ranks, hosts), forced=forced, near=calibration.shared_memory, far=calibration.network
    )
    given = None if leaves is None else Leaves(ranks, leaves)
    rated = selection.rate(collective, size_bytes=size_bytes, leaves=given)
    chosen, why = selection.choose(rated), _reason(forced, rated)
    if collective in OF_PARTS:
        chosen, rounded_bytes = selection.of_parts(collective, size_bytes), 1 << size_class(size_bytes)
        if forced is None and rounded_bytes != size_bytes:
            why += f" for {format_size(rounded_bytes)}"
    return {
        "collective": str(collective),
        "size_bytes": size_bytes,
        "ranks": ranks,
        "hosts": hosts,
        "leaves": leaves,
        "chosen": str(chosen),
        "why": why,
        "constants": calibration.source,
        "algorithms": [
            {
                "name": str(algorithm),
                "rounds": work.near.rounds + work.far.rounds,
                "messages": work.near.messages + work.far.messages,
                "peers": work.near.peers + work.far.peers,
                "sent_bytes": round(work.near.sent_bytes + work.far.sent_bytes),
                "sent_to_other_hosts_bytes": round(work.far.sent_bytes),
                "estimated_s": work.seconds(selection.near, selection.far),
            }
            for algorithm, work in rated.items()
        ],
    }


def _reason(forced: Algorithm | None, rated: Mapping[Algorithm, Work]) -> str:
    if forced is None:
        return "the least time by the model"
    return "set by SENNIT_ALGORITHM" if forced in rated else f"SENNIT_ALGORITHM={forced} does not run here"


def _origin(source: str) -> str:
    return "built-in defaults (sennit calibrate measures this cluster's)" if source == DEFAULTS else source


def render(explained: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    level = "shared memory" if explained["hosts"] == 1 else f"a network between {explained['hosts']} hosts"
    given = f" of {explained['leaves']} leaves" if explained["leaves"] else ""
    table = Table("algorithm", title=f"{explained['collective']}{given}, {format_size(explained['size_bytes'])}")
    for heading in ("rounds", "messages", "peers", "sent KiB", "to other hosts KiB", "estimate µs"):
        table.add_column(heading, justify="right")
    for row in explained["algorithms"]:
        table.add_row(
            f"{row['name']} <-" if row["name"] == explained["chosen"] else row["name"],
            str(row["rounds"]),
            str(row["messages"]),
            str(row["peers"]),
            f"{row['sent_bytes'] / 1024:,.1f}",
            f"{row['sent_to_other_hosts_bytes'] / 1024:,.1f}",
            f"{row['estimated_s'] * 1e6:,.0f}",
        )
    console.print(table)
    console.print(f"{explained['ranks']} ranks over {level} run {explained['chosen']}: {explained['why']}.")
    console.print(f"Constants of the model: {_origin(explained['constants'])}.")
    console.print("Of the busiest rank. The model compares algorithms; measure times with `sennit bench collectives`.")
