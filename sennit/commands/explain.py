# SPDX-License-Identifier: Apache-2.0
"""`sennit explain`: which algorithm a collective takes, what each would do, and what the model thinks it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sennit.commands import explain_codecs
from sennit.transport import algorithms
from sennit.transport.aggregator import LEAVES_MAX
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.choice.calibration import DEFAULTS
from sennit.transport.choice.cost_model import AGGREGATE_MIN_BYTES, Work
from sennit.transport.choice.costs import Collective
from sennit.transport.choice.selection import OF_PARTS, Selection, grade, grade_bytes, size_class
from sennit.transport.config import Algorithm
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.hosts import Hosts
from sennit.transport.sizes import format_size

# By torch's names for them.
DTYPES: Final = {
    "float32": Dtype.F32, "float16": Dtype.F16, "bfloat16": Dtype.BF16, "float64": Dtype.F64, "int8": Dtype.I8,
    "int16": Dtype.I16, "int32": Dtype.I32, "int64": Dtype.I64, "uint8": Dtype.U8, "bool": Dtype.BOOL,
    "complex64": Dtype.C64, "complex128": Dtype.C128,
}  # fmt: skip
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

if TYPE_CHECKING:
    from rich.console import Console

    from sennit.transport.choice.calibration import Calibration


def explain(
    collective: Collective,
    size_bytes: int,
    *,
    ranks: int,
    hosts: int,
    forced: Algorithm | None,
    calibration: Calibration,
    leaves: int | None = None,
    dtype: Dtype = Dtype.F32,
    bytes_per_s: float | None = None,
    has_aggregator: bool = False,
    codecs: Sequence[str] = (),
    stochastic: bool = False,
) -> dict[str, Any]:
    """Returns the choice for a vector of `size_bytes` of `dtype`, and a row for each algorithm that can run.

    `leaves`: of an allreduce; by default one a rank. `bytes_per_s`: what a rank can send to other hosts, by default as
    the calibration says. `has_aggregator`: the ranks have one. With `codecs` (`explain_codecs.NAMES`) also a row for
    each of them.
    """
    far = calibration.network if bytes_per_s is None else calibration.network._replace(byte_s=1 / bytes_per_s)
    selection = Selection(
        hosts=Hosts.equal(ranks, hosts),
        forced=forced,
        near=calibration.shared_memory,
        far=far,
        has_aggregator=has_aggregator and algorithms.is_summed(ranks, dtype, ReduceOp.SUM, leaves),
    )
    given = None if leaves is None else Leaves(ranks, leaves)
    ratio = accumulator(dtype).item_bytes / dtype.item_bytes
    rated = selection.rate(collective, size_bytes=size_bytes, partial_ratio=ratio, leaves=given)
    rounded_bytes = grade_bytes(grade(size_bytes))
    of_grade = selection.rate(collective, size_bytes=rounded_bytes, partial_ratio=ratio, leaves=given)
    chosen, why = selection.choose(of_grade), _reason(forced, of_grade)
    if collective in OF_PARTS:
        chosen, rounded_bytes = selection.of_parts(collective, size_bytes), 1 << size_class(size_bytes)
    if forced is None and rounded_bytes != size_bytes:
        why += f" for {format_size(rounded_bytes)}"
    coded = explain_codecs.rate_codecs(
        codecs,
        collective,
        size_bytes,
        selection=selection,
        rated=rated,
        plain_s=rated[chosen].seconds(selection.near, selection.far),
        calibration=calibration,
        dtype=dtype,
        stochastic=stochastic,
        leaves=given,
    )
    return {
        "collective": str(collective),
        "size_bytes": size_bytes,
        "dtype": DTYPE_NAMES[dtype],
        "ranks": ranks,
        "hosts": hosts,
        "leaves": leaves,
        "chosen": str(chosen),
        "why": why,
        **(
            {"why_no_aggregator": _why_no_aggregator(collective, chosen, rated, dtype, size_bytes, selection, given)}
            if has_aggregator
            else {}
        ),
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
        **({"codecs": coded} if codecs else {}),
    }


def _reason(forced: Algorithm | None, rated: Mapping[Algorithm, Work]) -> str:
    if forced is None:
        return "the least time by the model"
    return "set by SENNIT_ALGORITHM" if forced in rated else f"SENNIT_ALGORITHM={forced} does not run here"


def _why_no_aggregator(
    collective: Collective,
    chosen: Algorithm,
    rated: Mapping[Algorithm, Work],
    dtype: Dtype,
    size_bytes: int,
    selection: Selection,
    leaves: Leaves | None,
) -> str:
    """Why the ranks do not ask their aggregator; nothing if they do."""
    if chosen is Algorithm.AGGREGATE:
        return ""
    hosts, size = selection.hosts, format_size(size_bytes)
    if collective is Collective.REDUCE_SCATTER:
        sent = format_size(round(size_bytes * (hosts.world - 1) / hosts.world))
        return f"an aggregator would get the whole vector of a rank, {size}; other ranks get {sent} of it"
    if collective is not Collective.ALLREDUCE:
        return f"an aggregator sums, and {collective} does not, or has one root"
    if not 1 < hosts.world <= LEAVES_MAX:
        return f"an aggregator sums for 2 to {LEAVES_MAX} ranks"
    if not algorithms.is_summed(hosts.world, dtype, ReduceOp.SUM):
        names = [DTYPE_NAMES[each] for each in DTYPE_NAMES if algorithms.is_summed(hosts.world, each, ReduceOp.SUM)]
        return f"an aggregator sums {', '.join(names)}"
    if leaves is not None and not algorithms.is_summed(hosts.world, dtype, ReduceOp.SUM, leaves.count):
        return "an aggregator sums one leaf of each rank, or of float32 and int32 1, 2, 4, 8, ... of each"
    if Algorithm.AGGREGATE not in rated:
        return f"an aggregator is asked from {format_size(AGGREGATE_MIN_BYTES)} on"
    if hosts.are_shared:
        return (
            f"{hosts.world // len(hosts.spans)} ranks of a host would each send their vector to an aggregator, over "
            "one link; among hosts they add first"
        )
    seconds = rated[Algorithm.AGGREGATE].seconds(selection.near, selection.far)
    return f"by an aggregator it would take {seconds * 1e6:,.0f} µs"


def _origin(source: str) -> str:
    return "built-in defaults (sennit calibrate measures this cluster's)" if source == DEFAULTS else source


def render(explained: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    level = "shared memory" if explained["hosts"] == 1 else f"a network between {explained['hosts']} hosts"
    given = f" of {explained['leaves']} leaves" if explained["leaves"] else ""
    size = f"{format_size(explained['size_bytes'])} of {explained['dtype']}"
    table = Table("algorithm", title=f"{explained['collective']}{given}, {size}")
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
    if why_not := explained.get("why_no_aggregator"):
        console.print(f"No aggregator: {why_not}.")
    if "codecs" in explained:
        plain = next(row for row in explained["algorithms"] if row["name"] == explained["chosen"])
        explain_codecs.render(explained["codecs"], plain, explained["hosts"], console)
    console.print(f"Constants of the model: {_origin(explained['constants'])}.")
    console.print("Of the busiest rank. The model compares algorithms; measure times with `sennit bench collectives`.")
