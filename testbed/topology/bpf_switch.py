# SPDX-License-Identifier: Apache-2.0
"""The switch made of one BPF program and, once something is delayed, one relay process."""

from __future__ import annotations

from collections.abc import Iterable

from sennit.testbed.topology.delay import INLET_IFINDEX, Delay
from sennit.testbed.topology.fabric import FLAG_BLACKHOLE, FLAG_ORPHAN, Fabric
from sennit.testbed.topology.impairment import Impairment, ImpairmentCounters
from sennit.testbed.topology.relay_table import RelayCounters
from sennit.testbed.topology.switch import Port


class BpfSwitch:
    """Forwards, impairs and counts in fabric.bpf.c."""

    def __init__(self, *, hosts: int, planes: int, name: str, mtu: int) -> None:
        self._name, self._mtu = name, mtu
        self._fabric = Fabric(hosts, planes)
        self._delay: Delay | None = None

    def attach(self) -> None:
        self._fabric.attach()

    def impair(self, impairment: Impairment, ports: Iterable[Port]) -> None:
        self._fabric.impair(impairment, ports)

    def set_blackhole(self, on: bool, ports: Iterable[Port]) -> None:
        self._fabric.set_flag(FLAG_BLACKHOLE, on, ports)

    def set_queued(self, on: bool, ports: Iterable[Port]) -> None:
        self._fabric.set_flag(FLAG_ORPHAN, on, ports)

    def delay(self, delay_us: int, ports: Iterable[Port]) -> None:
        if delay_us and self._delay is None:
            self._delay = Delay(self._name, self._mtu)
        if self._delay is not None:
            chosen = list(ports)
            for port in chosen:
                self._delay.set_delay_us(*port, delay_us)
            self._fabric.set_relay(INLET_IFINDEX if delay_us else 0, chosen)

    def delay_counters(self) -> RelayCounters:
        if self._delay is None:
            return RelayCounters(received=0, sent=0, lost=0, overrun=0)
        return self._delay.counters()

    def counters(self, host: int, plane: int) -> ImpairmentCounters:
        return self._fabric.counters(host, plane)

    def close(self) -> None:
        if self._delay is not None:
            self._delay.close()
            self._delay = None
        self._fabric.close()
