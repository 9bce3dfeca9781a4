# SPDX-License-Identifier: Apache-2.0
"""What a run cost, over all its ranks: in all, by role, for a million samples and for a gigabyte moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sennit.runtime.telemetry.cost import BPF, Cost

GB: Final = 1e9
SENT: Final = ("data_bytes_sent", "shm_bytes_sent")
"""Counters of payload that a rank sent to others."""


def summary(costs: Sequence[Cost], counters: Sequence[Mapping[str, int]], samples: int) -> dict[str, Any]:
    """`costs`, `counters`: one of each rank. Seconds, joules and bytes; None: unknown, or nothing to divide by.

    The time of BPF programs is a role beside, and not in the totals: over a virtual cable it is a part of the feeder's,
    else of no process's.
    """
    machines = {cost.machine: cost.machine_joules for cost in costs}
    joules = [one for one in machines.values() if one is not None]
    total = sum(joules) if len(joules) == len(machines) else None
    user_s, system_s = sum(cost.user_s for cost in costs), sum(cost.system_s for cost in costs)
    moved = sum(one.get(name, 0) for one in counters for name in SENT)
    roles = {role: sum(cost.roles_s.get(role, 0.0) for cost in costs) for cost in costs for role in cost.roles_s}

    def each(amount: float | None) -> float | None:
        return amount * 1e6 / samples if amount is not None and samples else None

    return {
        "user_s": user_s,
        "system_s": system_s,
        "joules": total,
        "processor_s_per_million_samples": each(user_s + system_s),
        "joules_per_million_samples": each(total),
        "moved_bytes": moved,
        "processor_s_per_gb_moved": (user_s + system_s) * GB / moved if moved else None,
        "roles": {role: {"processor_s": one, "per_million_samples": each(one)} for role, one in roles.items()},
    }


def lines(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A summary, also one of an older report, in words: (title, text). Empty if no samples were trained on."""
    for_each = cost.get("processor_s_per_million_samples")
    if not for_each:
        return []
    in_kernel = cost["system_s"] / (cost["user_s"] + cost["system_s"])
    text = f"{for_each:.1f} s of processors for a million samples, {in_kernel:.0%} in the kernel"
    if (joules := cost["joules_per_million_samples"]) is not None:
        text += f"; {joules:,.0f} J"
    if (for_gb := cost.get("processor_s_per_gb_moved")) is not None:
        text += f"; {for_gb:.1f} s for a GB moved"
    roles = {role: one["per_million_samples"] for role, one in cost.get("roles", {}).items() if one["processor_s"] > 0}
    parts = [f"{'BPF' if role == BPF else role} {seconds:.2f} s" for role, seconds in roles.items()]
    return [("cost", text), *([("by role", ", ".join(parts))] if len(parts) > 1 else [])]
