# SPDX-License-Identifier: Apache-2.0
"""`sennit explain --codec`: what a collective would cost with each codec, and whether that pays.

It only says so. A codec changes the bits of results, so no call takes one by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sennit.transport.choice.coded_cost import CodedWork, break_even_byte_s, coded_work
from sennit.transport.choice.cost_model import Work
from sennit.transport.choice.costs import Collective, Costs
from sennit.transport.codecs import COLLECTIVE_CODECS, Codec
from sennit.transport.plans.elements import Dtype

if TYPE_CHECKING:
    from rich.console import Console

    from sennit.transport.algorithms.leaves import Leaves
    from sennit.transport.choice.calibration import Calibration
    from sennit.transport.choice.selection import Selection
    from sennit.transport.config import Algorithm

AUTO: Final = "auto"
NAMES: Final = (AUTO, *COLLECTIVE_CODECS)
# Types of the elements that collectives code.
DTYPES: Final = ("float32", "float16", "bfloat16")


def rate_codecs(
    names: Sequence[str],
    collective: Collective,
    size_bytes: int,
    *,
    selection: Selection,
    rated: Mapping[Algorithm, Work],
    plain_s: float,
    calibration: Calibration,
    dtype: Dtype,
    stochastic: bool,
    leaves: Leaves | None,
) -> list[dict[str, Any]]:
    """Returns a row for each codec, none for a collective that takes no codec. `auto` means all.

    `rated`: the algorithms that the collective may run without a codec; `plain_s`: what the chosen one takes.
    """
    rows = []
    wanted = COLLECTIVE_CODECS if AUTO in names else dict.fromkeys(names)
    # With one host, or one rank on each, coding between hosts alone is no other way.
    ways = (False, True) if 1 < len(selection.hosts.spans) < selection.hosts.world else (False,)
    for between_hosts, name in itertools.product(ways, wanted):
        codec = Codec(kind=COLLECTIVE_CODECS[name], stochastic=stochastic, between_hosts=between_hosts)
        coding = codec.coding(dtype)
        found = coded_work(
            collective,
            hosts=selection.hosts,
            elements=size_bytes // dtype.item_bytes,
            coding=coding,
            dtype=dtype,
            leaves=leaves,
        )
        if found is None:
            continue
        coding_s = found.coding_seconds(coding, calibration.codecs[codec.kind])
        gain = _gain(selection, rated, found, coding_s)
        even_s = break_even_byte_s(gain)
        estimated_s = found.work.seconds(selection.near, selection.far) + coding_s
        rows.append(
            {
                "codec": name,
                "block": codec.block,
                "stochastic": stochastic,
                "between_hosts": between_hosts,
                "sent_bytes": round(found.work.near.sent_bytes + found.work.far.sent_bytes),
                "sent_to_other_hosts_bytes": round(found.work.far.sent_bytes),
                "coding_s": coding_s,
                "estimated_s": estimated_s,
                "gain_s": plain_s - estimated_s,
                "pays": estimated_s < plain_s,
                "pays_below_bytes_per_s": None if even_s is None else 1 / even_s,
            }
        )
    return rows


def _slow(selection: Selection) -> Costs:
    """The way that decides: the network, or with one host its memory."""
    return selection.far if len(selection.hosts.spans) > 1 else selection.near


def _gain(
    selection: Selection, rated: Mapping[Algorithm, Work], found: CodedWork, coding_s: float
) -> Callable[[float], float]:
    """The seconds that a codec saves, by the `byte_s` of the way that decides."""

    def gain_s(byte_s: float) -> float:
        way = _slow(selection)._replace(byte_s=byte_s)
        near, far = (selection.near, way) if len(selection.hosts.spans) > 1 else (way, selection.far)
        chosen = selection._replace(near=near, far=far).choose(rated)
        return rated[chosen].seconds(near, far) - found.work.seconds(near, far) - coding_s

    return gain_s


def verdict(rows: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], hosts: int) -> str:
    """Which codec takes the least time, and why; or why none pays. `plain`: see `render`."""
    if not rows:
        return "This collective takes no codec."
    best = min(rows, key=lambda row: float(row["estimated_s"]))
    less_s = best["gain_s"] + best["coding_s"]
    sent = f"sending takes {_us(less_s)} µs less"
    if less_s < 0:
        sent = f"sending takes {_us(-less_s)} µs more, because it goes straight and not by {plain['name']}"
    facts = f"{sent}, and coding takes {_us(best['coding_s'])} µs"
    if best["pays"]:
        return f"{_name(best)} takes the least time: {facts}."
    who = (
        f"{_name(best)} does not pay"
        if len({row["codec"] for row in rows}) == 1
        else f"No codec pays. {_name(best)} comes nearest"
    )
    return f"{who}: {facts}." + ("" if hosts > 1 else " Inside a host a copy costs less than coding.")


def render(rows: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], hosts: int, console: Console) -> None:
    """`plain`: the row of the algorithm that runs without a codec."""
    from rich.table import Table

    table = Table("codec", title="The same with a codec")
    for heading in ("sent KiB", "to other hosts KiB", "coding µs", "estimate µs", "times as fast", "pays below Gbit/s"):
        table.add_column(heading, justify="right")
    table.add_row("none", *_bytes(plain), "", _us(plain["estimated_s"]), "", "")
    for row in rows:
        below = row["pays_below_bytes_per_s"]
        otherwise = "always" if row["pays"] else "never"
        table.add_row(
            f"{_name(row)} <-" if row["pays"] else _name(row),
            *_bytes(row),
            _us(row["coding_s"]),
            _us(row["estimated_s"]),
            f"{plain['estimated_s'] / row['estimated_s']:.2f}×",
            otherwise if below is None else f"{below * 8e-9:,.2f}",
        )
    if rows:
        console.print(table)
    console.print(verdict(rows, plain, hosts))
    if rows:
        console.print("No call takes a codec by itself: it changes bits. Give one with codec=.")


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['codec']} between hosts" if row["between_hosts"] else str(row["codec"])


def _bytes(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['sent_bytes'] / 1024:,.1f}", f"{row['sent_to_other_hosts_bytes'] / 1024:,.1f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-5 else f"{seconds * 1e6:.2f}"
