# SPDX-License-Identifier: Apache-2.0
"""The session `packets`: the packets of one flow at an interface, as a file for Wireshark."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from sennit.closing import Closing
from sennit.command_line import ANOTHER_FILE
from sennit.ebpf import kernel_features
from sennit.ebpf.compiler import CompileError, compile_program
from sennit.ebpf.library import BpfError
from sennit.ebpf.links import attach_tcx
from sennit.ebpf.loader import BpfObject
from sennit.ebpf.ringbuffer import RingBuffer
from sennit.runtime.trace import pcapng
from sennit.runtime.trace.super_packets import wire_packets
from sennit.runtime.trace.target import SessionError

PROGRAM: Final = "packets"
DRAIN_EVERY_S: Final = 0.05
# linux/sockios.h, linux/if.h
_SIOCGIFHWADDR: Final = 0x8927
_REQUEST: Final = struct.Struct("16sH22x")
# linux/if_arp.h: interface types with Ethernet headers.
_ARPHRD_ETHER: Final = 1
_ARPHRD_LOOPBACK: Final = 772


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Selects packets with RoCEv2's destination port; None means any."""

    peer: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    """Source or destination address."""
    qpn: int | None = None
    """The destination queue pair."""
    source_port: int | None = None


class PacketCapture(Closing):
    """Captures from construction on. `drain` writes what has arrived."""

    def __init__(self, interface: str, flow: Flow, path: Path, count: int | None) -> None:
        """`count`: the most packets to capture. Raises `SessionError`, as everything here."""
        kind = _kind_of(interface)
        if kind not in (_ARPHRD_ETHER, _ARPHRD_LOOPBACK):
            raise SessionError(f"{interface} has no Ethernet headers (its type is {kind})")
        for feature in ("privileges", "libbpf"):
            found = kernel_features.probe(feature)
            if not found.available:
                raise SessionError(f"{found.absent_because}: {found.remedy}")
        self.packets = 0
        """Packets written, counted as on the wire."""
        self._count = count
        mapped = flow.peer
        if isinstance(mapped, ipaddress.IPv4Address):
            mapped = ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + mapped.packed)
        constants = {
            "has_peer": mapped is not None,
            "peer": list(mapped.packed if mapped is not None else bytes(16)),
            "has_qpn": flow.qpn is not None,
            "qpn": flow.qpn or 0,
            "has_source_port": flow.source_port is not None,
            "source_port": flow.source_port or 0,
        }
        index = socket.if_nametoindex(interface)
        with contextlib.ExitStack() as held:
            try:
                self._object = held.enter_context(BpfObject(compile_program(PROGRAM), read_only=constants))
                self._head = self._object.btf.dtype("head")
                self._ring = held.enter_context(RingBuffer(self._object.map("packets")))
                self._links = [
                    held.enter_context(attach_tcx(self._object.program("packets_in"), index)),
                    held.enter_context(attach_tcx(self._object.program("packets_out"), index, egress=True)),
                ]
            except (BpfError, CompileError) as error:
                raise SessionError(f"{interface}: {error}") from None
            self._path = path
            with self._writing():
                self._writer = pcapng.Writer(path, interface, "sennit trace packets")
            self._held = held.pop_all()
        # pcap-ng counts from 1970, the program from boot.
        self._since_1970_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def drain(self) -> bool:
        """Writes what has arrived. True when the wanted number is reached."""
        with self._writing():
            for record in self._ring.read(0):
                head = np.frombuffer(record, self._head, 1)[0]
                frame = record[self._head.itemsize : self._head.itemsize + int(head["size_bytes"])]
                time_ns = int(head["time_ns"]) + self._since_1970_ns
                for packet in wire_packets(frame, int(head["segment_bytes"])):
                    if self.packets == self._count:
                        return True
                    self._writer.packet(time_ns, packet, int(head["direction"]))
                    self.packets += 1
        return self.packets == self._count

    def dropped(self) -> int:
        """Packets of the flow missing in the file: the ring buffer was full, or they were larger than 64 KiB."""
        missed = self._object.map("missed").values(0)[0]
        return int(missed["ring_full"]) + int(missed["too_large"])

    def close(self) -> None:
        """Stops, and completes the file with the counts of packets in it and missing."""
        with self._held, self._writing(), self._writer:
            for link in self._links:
                link.close()
            self.drain()
            dropped = self.dropped()
            now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + self._since_1970_ns
            self._writer.statistics(now_ns, received=self.packets + dropped, dropped=dropped)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Names the file that cannot be written."""
        try:
            yield
        except BpfError:
            raise
        except OSError as error:
            raise SessionError(
                f"{self._path}: {error.strerror}, after {self.packets:,} packets; {ANOTHER_FILE}"
            ) from None


def _kind_of(interface: str) -> int:
    # (/sys may show another network namespace if the process entered this one later.)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFHWADDR, _REQUEST.pack(interface.encode(), 0))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise SessionError(f"there is no interface {interface!r} here; there are {names}") from None
    return int(_REQUEST.unpack(answer)[1])
