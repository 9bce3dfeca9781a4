# SPDX-License-Identifier: Apache-2.0
"""The interface between planes and what forwards and impairs their packets, and the two implementations."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, Protocol

from sennit.doctor import capabilities
from sennit.testbed.topology.impairment import Impairment
from sennit.testbed.topology.relay_table import RelayCounters

Port = tuple[int, int]
"""Host and plane."""


class Impairer(StrEnum):
    """Who rolls the dice."""

    AUTO = "auto"
    """bpf if available, because its dice are seeded and its counters exact; else netem."""

    BPF = "bpf"
    """One tc-BPF program that forwards and impairs, and a process that delays."""

    NETEM = "netem"
    """The kernel's sch_netem at every host, and bridges that forward."""


_COMMON: Final = ("root", "netns", "nsenter")
NEEDS: Final = {Impairer.BPF: (*_COMMON, "tc-bpf"), Impairer.NETEM: (*_COMMON, "netem", "bridge")}
"""Capabilities (`sennit/doctor/capabilities.py`) of each."""


def resolve(asked: Impairer) -> Impairer:
    """What `auto` means on this machine. If neither is available, bpf, whose missing capability is then reported."""
    if asked is not Impairer.AUTO:
        return asked
    bpf, netem = (capabilities.missing(*NEEDS[kind]) is None for kind in (Impairer.BPF, Impairer.NETEM))
    return Impairer.NETEM if netem and not bpf else Impairer.BPF


class Switch(Protocol):
    """All planes' switches. Ports must exist before `attach`."""

    def attach(self) -> None:
        """Begins to forward. Call it inside the switch's namespace."""

    def impair(self, impairment: Impairment, ports: Iterable[Port]) -> None:
        """Replaces the impairment of what these ports' hosts send."""

    def set_blackhole(self, on: bool, ports: Iterable[Port]) -> None:
        """Drops everything, or stops doing so."""

    def set_queued(self, on: bool, ports: Iterable[Port]) -> None:
        """Says whether packets of these ports may wait in the switch. They must not fill the sender's buffer."""

    def delay(self, delay_us: int, ports: Iterable[Port]) -> None:
        """Delays what these ports' hosts send."""

    def delay_counters(self) -> RelayCounters:
        """Counters of the process that delays; all zero if there is none."""

    def close(self) -> None:
        """Its interfaces end with the namespaces."""
