# SPDX-License-Identifier: Apache-2.0
"""What a process costs: processor time by role, and energy of the machine where its processor counts it.

A thread's role is known by its name (docs/reference/cost.md). What a thread of the program does in the transport, while
it posts or waits, is the transport's: the core counts it (`transport/csrc/executor/lent_time.hpp`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sennit.closing import Closing
from sennit.transport import _core
from sennit.transport.meeting.host import machine_identity

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


# Counters of whole processor packages, of Intel and of AMD (Linux, Documentation/power/powercap/powercap.rst). Mostly
# only root may read them.
POWERCAP: Final = Path("/sys/class/powercap")
PACKAGES: Final = "intel-rapl:[0-9]*"

TRAINER: Final = "trainer"
TRANSPORT: Final = "transport"
INGEST: Final = "ingest"
BPF: Final = "bpf"
ROLES: Final[Mapping[str, str]] = {
    "sennit-crew": TRANSPORT,
    "sennit-answer": TRANSPORT,
    "sennit-team": TRANSPORT,
    "sennit-copy": TRANSPORT,
    "pt_gloo_runloop": TRANSPORT,  # torch's ProcessGroupGloo
    "sennit-ingest": INGEST,
    "sennit-feed": INGEST,
}
"""Roles of threads, by their names. All others are the trainer's."""

# The kernel's clocks of processor time of another process, and of a thread of this one: the number with all bits
# turned, and what is meant behind it (linux/posix-timers_types.h, CPUCLOCK_SCHED and CPUCLOCK_PERTHREAD_MASK).
_PROCESS_CLOCK: Final = 2
_THREAD_CLOCK: Final = 6
_TASKS: Final = Path("/proc/self/task")


def process_ns(process: int) -> int:
    """Processor time of a process of the machine, all its threads. Raises OSError if it has ended."""
    return time.clock_gettime_ns(~process << 3 | _PROCESS_CLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of one process; the energy is the machine's."""

    user_s: float
    """Processor time in the program, over all threads."""

    system_s: float
    """Processor time in the kernel: mostly of packets and files."""

    machine: str
    """Identifies the machine: equal for processes that share one."""

    machine_joules: float | None
    """What all processors of the machine took meanwhile, whoever used them; None: it is not counted here."""

    roles_s: Mapping[str, float] = field(default_factory=dict)
    """The same processor time by role: "trainer", "transport", "ingest". Also "bpf", if the kernel counts it: it is in
    no process's time, or in that of the process whose packet it was."""


class CostMeter(Closing):
    """Measures from its construction on, until it is closed."""

    def __init__(self, powercap: Path = POWERCAP, program_ns: Callable[[], int | None] = lambda: None) -> None:
        """`program_ns`: processor time so far of BPF programs that work for this process; None: not counted."""
        self._powercap, self._program_ns = powercap, program_ns
        self._is_open = True
        _core.lent_time_count(True)
        self._energy = _read_energy(powercap)
        self._programs_before_ns = program_ns()
        self._threads_before_ns = dict(_threads_with_roles())
        self._lent_before_ns = _core.lent_time_ns()
        self._before, self._before_ns = os.times(), time.process_time_ns()

    def read(self) -> Cost:
        """The cost so far."""
        now = os.times()
        return Cost(
            user_s=now.user - self._before.user,
            system_s=now.system - self._before.system,
            machine=machine_identity(),
            machine_joules=self._joules(),
            roles_s=self._roles_s(),
        )

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _core.lent_time_count(False)

    def _roles_s(self) -> dict[str, float]:
        all_ns = time.process_time_ns() - self._before_ns
        found_ns = {TRANSPORT: _core.lent_time_ns() - self._lent_before_ns, INGEST: 0}
        for (thread, role), spent_ns in _threads_with_roles():
            found_ns[role] += spent_ns - self._threads_before_ns.get((thread, role), 0)
        roles = {TRAINER: max(0, all_ns - sum(found_ns.values())), **found_ns}
        after_ns = self._program_ns()
        if after_ns is not None:
            roles[BPF] = after_ns - (self._programs_before_ns or 0)
        return {role: spent_ns / 1e9 for role, spent_ns in roles.items()}

    def _joules(self) -> float | None:
        after = _read_energy(self._powercap)
        if not after or after.keys() != self._energy.keys():
            return None
        # A counter that has reached its range begins again at 0.
        return sum((now - self._energy[name][0]) % (span + 1) for name, (now, span) in after.items()) * 1e-6


def _threads_with_roles() -> Iterator[tuple[tuple[int, str], int]]:
    """((number, role), processor time) of each thread that is not the trainer's. One that ends meanwhile is left out:
    its time is then taken for the trainer's.
    """
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            role = ROLES.get((task / "comm").read_text(encoding="utf-8").rstrip("\n"))
            if role is not None:
                thread = int(task.name)
                yield (thread, role), time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)


def _read_energy(powercap: Path) -> dict[str, tuple[int, int]]:
    """Microjoules and the largest number that the counter shows, by package; empty if they cannot be read."""
    try:
        return {
            zone.name: (
                int((zone / "energy_uj").read_text(encoding="utf-8")),
                int((zone / "max_energy_range_uj").read_text(encoding="utf-8")),
            )
            for zone in sorted(powercap.glob(PACKAGES))
            if zone.name.count(":") == 1
        }
    except (OSError, ValueError):
        return {}
