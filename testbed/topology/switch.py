# SPDX-License-Identifier: Apache-2.0
"""What planes need of whatever forwards between hosts and spoils what they send; and the two that there are."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, Protocol

from sennit import capabilities
from sennit.testbed.topology.impairment import Impairment
from sennit.testbed.topology.relay_table import RelayCounters

Port = tuple[int, int]
"""Host and plane."""


class Impairer(StrEnum):
    """Who rolls the dice."""

    AUTO = "auto"
    """bpf where it can be had, since its dice are seeded and its counters exact; else netem."""

    BPF = "bpf"
    """One tc-BPF program that forwards and impairs, and a process that delays."""

    NETEM = "netem"
    """The kernel's sch_netem at every host, and bridges that forward."""


_COMMON: Final = ("root", "netns", "nsenter")
NEEDS: Final = {Impairer.BPF: (*_COMMON, "tc-bpf"), Impairer.NETEM: (*_COMMON, "netem", "bridge")}
"""Capabilities (`sennit/capabilities.py`) of each."""


def resolve(asked: Impairer) -> Impairer:
    """What `auto` is on this machine; where neither can be had, bpf, whose lack is then reported."""
    if asked is not Impairer.AUTO:
        return asked
    bpf, netem = (capabilities.missing(*NEEDS[kind]) is None for kind in (Impairer.BPF, Impairer.NETEM))
    return Impairer.NETEM if netem and not bpf else Impairer.BPF


class Switch(Protocol):
    """All planes' switches. Ports must exist before `attach`."""

    def attach(self) -> None:
        """Begins to forward. To be called inside the switch's namespace."""

    def impair(self, impairment: Impairment, ports: Iterable[Port]) -> None:
        """From now on, what these ports' hosts send suffers this, and only this."""

    def set_blackhole(self, on: bool, ports: Iterable[Port]) -> None:
        """Lets everything vanish, or no more."""

    def set_queued(self, on: bool, ports: Iterable[Port]) -> None:
        """Whether packets of these ports may wait in the switch, where they must not fill their sender's buffer."""

    def delay(self, delay_us: int, ports: Iterable[Port]) -> None:
        """What these ports' hosts send arrives so much later."""

    def delay_counters(self) -> RelayCounters:
        """Of the process that delays; all zero where there is none."""

    def close(self) -> None:
        """Its interfaces go with the namespaces."""
