# SPDX-License-Identifier: Apache-2.0
"""The switch between the hosts: loads, attaches, configures and reads fabric.bpf.c."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from pyroute2 import IPRoute

from sennit.ebpf.compiler import compile_program
from sennit.ebpf.loader import BpfObject
from sennit.testbed.topology.impairment import (
    HELD_MAX,
    Draw,
    Impairment,
    ImpairmentCounters,
    PortConfig,
    port_seed,
    unpack_counters,
)

# fabric.bpf.c defines these by the same names; a test compares them.
HOSTS_MAX: Final = 64
PLANES_MAX: Final = 16
FIRST_PORT_IFINDEX: Final = 1000
FLAG_BLACKHOLE: Final = 1
FLAG_ORPHAN: Final = 2

# linux/pkt_sched.h: TC_H_CLSACT with TC_H_MIN_INGRESS
INGRESS: Final = 0xFFFFFFF2


def port_ifindex(host: int, plane: int) -> int:
    """The index of the switch port of a host on a plane."""
    return FIRST_PORT_IFINDEX + plane * HOSTS_MAX + host


def mac_address(host: int, plane: int) -> str:
    """A host's address on a plane; the switch forwards by it."""
    return f"02:5e:00:00:{plane:02x}:{host:02x}"


class Fabric:
    """The program and its state for each port. Ports must exist before they are attached."""

    def __init__(self, hosts: int, planes: int) -> None:
        rings = hosts * planes
        held = rings * HELD_MAX
        self._object = BpfObject(compile_program("fabric"), max_entries={"held": held, "hold_states": held})
        self._ports = {
            (host, plane): PortConfig(hold_ring=plane * hosts + host)
            for host in range(hosts)
            for plane in range(planes)
        }
        for port in self._ports:
            self._write(port)

    def attach(self) -> None:
        """Attaches the program to the ports. Must be called inside the switch's namespace."""
        descriptor = self._object.program("fabric").descriptor
        with IPRoute() as route:
            for host, plane in self._ports:
                index = port_ifindex(host, plane)
                route.tc("add", "clsact", index)
                route.tc(
                    "add-filter",
                    "bpf",
                    index,
                    fd=descriptor,
                    name="fabric",
                    parent=INGRESS,
                    classid=1,
                    direct_action=True,
                )

    def close(self) -> None:
        self._object.close()

    def impair(self, impairment: Impairment, ports: Iterable[tuple[int, int]]) -> None:
        """Restarts the dice of the ports (host, plane)."""
        for port in ports:
            self._ports[port] = replace(
                self._ports[port],
                seed=port_seed(impairment.seed, *port),
                drop_below=impairment.below(Draw.DROP),
                duplicate_below=impairment.below(Draw.DUPLICATE),
                mark_below=impairment.below(Draw.MARK),
                corrupt_below=impairment.below(Draw.CORRUPT),
                hold_below=impairment.below(Draw.HOLD),
                hold_depth=impairment.reorder_depth,
                corrupt_skip_bytes=impairment.corrupt_skip_bytes,
            )
            self._write(port)
            first = self._ports[port].hold_ring * HELD_MAX
            for entry in range(first, first + HELD_MAX):
                self._object.map("hold_states").write(entry, bytes(8))
            self._object.map("sequences").write(_number(port), bytes(8))

    def set_flag(self, flag: int, on: bool, ports: Iterable[tuple[int, int]]) -> None:
        for port in ports:
            flags = self._ports[port].flags
            self._ports[port] = replace(self._ports[port], flags=flags | flag if on else flags & ~flag)
            self._write(port)

    def set_relay(self, ifindex: int, ports: Iterable[tuple[int, int]]) -> None:
        """Sends the ports' packets out by this interface of the switch's namespace; 0: straight to the destination."""
        for port in ports:
            self._ports[port] = replace(self._ports[port], relay_ifindex=ifindex)
            self._write(port)

    def counters(self, host: int, plane: int) -> ImpairmentCounters:
        return unpack_counters(self._object.map("counters").read(_number((host, plane))))

    def _write(self, port: tuple[int, int]) -> None:
        self._object.map("configs").write(_number(port), self._ports[port].pack())


def _number(port: tuple[int, int]) -> int:
    host, plane = port
    return plane * HOSTS_MAX + host
