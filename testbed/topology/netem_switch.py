# SPDX-License-Identifier: Apache-2.0
"""The switch for kernels with sch_netem: one bridge per plane forwards, a netem queue at every host's way out impairs.

It needs no BPF. docs/how-to/testbed.md lists the differences to the BPF program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from pyroute2 import IPRoute

from sennit.doctor import capabilities
from sennit.testbed.topology import netem
from sennit.testbed.topology.fabric import mac_address, port_ifindex
from sennit.testbed.topology.impairment import Impairment, port_seed
from sennit.testbed.topology.netem import NetemCounters, NetemQueue
from sennit.testbed.topology.relay_table import RelayCounters
from sennit.testbed.topology.switch import Port

# linux/if_bridge.h: states of a port
DISABLED: Final = 0
FORWARDING: Final = 3
# linux/neighbour.h: an entry of the bridge's table that names the port and never ages
NTF_MASTER: Final = 0x04
NUD_NOARP: Final = 0x40


class NetemSwitch:
    """`netns_of` gives the namespace of a host, `name` is that of the switch."""

    def __init__(self, *, hosts: int, planes: int, name: str, mtu: int, netns_of: Callable[[int], str]) -> None:
        self._hosts, self._planes, self._name = hosts, planes, name
        self._netns_of = netns_of
        self._queues = {(host, plane): NetemQueue(mtu_bytes=mtu) for host in range(hosts) for plane in range(planes)}
        self._is_seeded = capabilities.missing("netem-seed") is None

    def attach(self) -> None:
        with IPRoute() as route:
            for plane in range(self._planes):
                route.link("add", ifname=f"bridge{plane}", kind="bridge")
                bridge = route.link_lookup(ifname=f"bridge{plane}")[0]
                for host in range(self._hosts):
                    port = port_ifindex(host, plane)
                    route.link("set", index=port, master=bridge)
                    # All addresses are known, as with the BPF program: nothing is learnt, nothing flooded.
                    route.brport("set", index=port, learning=0, unicast_flood=0, mcast_flood=0, bcast_flood=0)
                    route.fdb("add", ifindex=port, lladdr=mac_address(host, plane), flags=NTF_MASTER, state=NUD_NOARP)
                route.link("set", index=bridge, state="up")

    def impair(self, impairment: Impairment, ports: Iterable[Port]) -> None:
        if (reason := netem.why_not(impairment)) is not None:
            raise ValueError(reason)
        self._change(ports, impairment=impairment)

    def set_blackhole(self, on: bool, ports: Iterable[Port]) -> None:
        # pyroute2 has no name for this attribute; its `state` is the link's.
        state = DISABLED if on else FORWARDING
        lines = [f"link set dev p{plane}h{host} state {state}" for host, plane in ports]
        netem.run_batch("bridge", self._name, lines)

    def set_queued(self, on: bool, ports: Iterable[Port]) -> None:
        self._change(ports, is_orphaning=on)

    def delay(self, delay_us: int, ports: Iterable[Port]) -> None:
        self._change(ports, delay_us=delay_us)

    def delay_counters(self) -> RelayCounters:
        return RelayCounters(received=0, sent=0, lost=0, overrun=0)

    def limit_rate(self, bits_per_s: int | None, queue_bytes: int, ports: Iterable[Port]) -> None:
        """The rate of what these hosts send. netem is their queue, so it carries the rate too."""
        self._change(ports, bits_per_s=bits_per_s, queue_bytes=queue_bytes)

    def counters(self, host: int, plane: int) -> NetemCounters:
        return netem.read_counters(self._netns_of(host), f"plane{plane}")

    def close(self) -> None:
        pass

    def _change(self, ports: Iterable[Port], **changes: Any) -> None:
        lines: dict[int, list[str]] = {}
        for port in ports:
            self._queues[port] = queue = self._queues[port].with_(**changes)
            host, plane = port
            seed = port_seed(queue.impairment.seed, host, plane) if self._is_seeded else None
            lines.setdefault(host, []).append(netem.batch_line(f"plane{plane}", queue.words(seed=seed)))
        for host, told in lines.items():
            netem.run_batch("tc", self._netns_of(host), told)
