# SPDX-License-Identifier: Apache-2.0
"""What a run costs: processor time of its processes, and energy of the machine where its processor counts it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.transport.host import machine_identity

# Counters of whole processor packages, of Intel and of AMD (Linux, Documentation/power/powercap/powercap.rst). Mostly
# only root may read them.
POWERCAP: Final = Path("/sys/class/powercap")
PACKAGES: Final = "intel-rapl:[0-9]*"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one process, but for the energy."""

    user_s: float
    """Processor time in the program, over all threads."""

    system_s: float
    """Processor time in the kernel: mostly of packets and files."""

    machine: str
    """Equal for processes that share a machine."""

    machine_joules: float | None
    """What all processors of the machine took meanwhile, whoever used them; None: it is not counted here."""


class CostMeter:
    """Measures from its construction on."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._energy = _read_energy(powercap)
        self._before = os.times()

    def read(self) -> Cost:
        """The cost so far."""
        now = os.times()
        return Cost(
            user_s=now.user - self._before.user,
            system_s=now.system - self._before.system,
            machine=machine_identity(),
            machine_joules=self._joules(),
        )

    def _joules(self) -> float | None:
        after = _read_energy(self._powercap)
        if not after or after.keys() != self._energy.keys():
            return None
        # A counter that has reached its range begins again at 0.
        return sum((now - self._energy[name][0]) % (span + 1) for name, (now, span) in after.items()) * 1e-6


def _read_energy(powercap: Path) -> dict[str, tuple[int, int]]:
    """Microjoules and the largest number that the counter shows, by package; empty if they cannot be read."""
    try:
        return {
            zone.name: (int((zone / "energy_uj").read_text()), int((zone / "max_energy_range_uj").read_text()))
            for zone in sorted(powercap.glob(PACKAGES))
            if zone.name.count(":") == 1
        }
    except (OSError, ValueError):
        return {}
