# SPDX-License-Identifier: Apache-2.0
"""The aggregator in the kernel: `ebpf/programs/aggregate.bpf.c` at one interface, and the daemon in the same memory."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import compile_program
from sennit.ebpf.library import BpfError
from sennit.ebpf.links import Link, XdpMode, attach_tcx, attach_xdp
from sennit.ebpf.loader import BpfObject, Program
from sennit.offload.interfaces import hardware_address, interface_index, ipv6_addresses
from sennit.transport.meeting.rails import read_interfaces

MEMORY: Final = "memory"
_OWN_ADDRESSES_MAX: Final = 8
_OWN: Final = struct.Struct("=6sH")
_ADDRESS: Final = struct.Struct("=I16s")
_NUMBER: Final = struct.Struct("=I")


class XdpPrograms(Closing):
    """The programs, loaded. Their memory is zeroed, and mapped at `address`."""

    def __init__(self, *, port: int, memory_bytes: int) -> None:
        """Raises BpfError, or CompileError where clang is missing."""
        self._object = BpfObject(compile_program("aggregate"), arenas={MEMORY: memory_bytes}, read_only={"port": port})
        self.address: Final = self._object.arena(MEMORY).address
        self.memory_bytes: Final = memory_bytes
        self._links: list[Link] = []
        self.answers_in_kernel = False
        """Whether programs send the sums. Else the daemon does."""

        self.left_out: list[str] = []
        """Addresses of the interface that the programs have no room for. Their packets go to the daemon."""

    @property
    def program(self) -> Program:
        return self._object.program("aggregate")

    def take_packets_for(self, hardware: bytes, addresses: Sequence[str], *, is_native: bool) -> None:
        """Only packets with one of these destinations are taken; the first eight addresses count."""
        packed = [socket.inet_pton(_family(found), found) for found in addresses[:_OWN_ADDRESSES_MAX]]
        places = [_ADDRESS.pack(6 if len(found) == 16 else 4, found) for found in packed]
        own = _OWN.pack(hardware, len(places)) + b"".join(places).ljust(_OWN_ADDRESSES_MAX * _ADDRESS.size, b"\0")
        self._object.write_variable("own", own)
        self._object.write_variable("is_native", _NUMBER.pack(is_native))

    def attach(self, interface: str, addresses: Sequence[str] = ()) -> None:
        """Attaches to an interface of this network namespace, in the driver if that runs programs.

        `addresses`: those of the interface that count; none: all. Raises BpfError, which says whose program is there.
        """
        index = interface_index(interface)
        wanted = {ipaddress.ip_address(found) for found in addresses}
        own = [found for found in addresses_of(interface) if not wanted or ipaddress.ip_address(found) in wanted]
        self.left_out = own[_OWN_ADDRESSES_MAX:]
        self.take_packets_for(hardware_address(interface), own, is_native=True)
        try:
            self._links.append(attach_xdp(self.program, index, XdpMode.NATIVE))
        except BpfError:
            self.take_packets_for(hardware_address(interface), own, is_native=False)
            self._links.append(attach_xdp(self.program, index, XdpMode.GENERIC))
            return
        with contextlib.suppress(BpfError):  # a kernel without tcx
            self._links.append(attach_tcx(self._object.program("answer"), index))
            self.answers_in_kernel = True

    def counters(self) -> dict[str, int]:
        """What the programs have counted. Packets that went on to the daemon are counted there."""
        counted = self._object.map("counters").values(0)
        return {name: int(counted[name].sum()) for name in counted.dtype.names or ()}

    def close(self) -> None:
        while self._links:
            self._links.pop().close()
        self._object.close()


def addresses_of(interface: str) -> list[str]:
    """All addresses of an interface of this network namespace: of IPv6, also that of its link alone, and of IPv4."""
    ipv4 = next((found.ipv4 for found in read_interfaces() if found.name == interface), ())
    return [*ipv6_addresses(interface), *ipv4]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
