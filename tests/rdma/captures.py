# SPDX-License-Identifier: Apache-2.0
"""Frames from a cable, and how decoders read their packets: ours, scapy's, Wireshark's."""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from sennit.transport.oracle import roce

# linux/if_ether.h. Any other value would hide what this machine sends.
ETH_P_ALL: Final = 3
ETH_P_IP: Final = 0x0800
ETH_P_IPV6: Final = 0x86DD
ETHERNET_BYTES: Final = 14
IPV6_BYTES: Final = 40
UDP_BYTES: Final = 8
FRAME_MAX_BYTES: Final = 65_536
# asm-generic/socket.h. Root may exceed net.core.rmem_max. Otherwise a capture would lose frames.
SO_RCVBUFFORCE: Final = 33
BUFFER_BYTES: Final = 64 << 20
TSHARK_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A RoCE packet, with the header fields before it that the ICRC covers."""

    source: tuple[str, int]
    destination: tuple[str, int]
    identification: int
    """The field of IPv4; 0 in IPv6."""
    datagram: bytes

    @property
    def opcode(self) -> int:
        return self.datagram[0]

    @property
    def icrc(self) -> int:
        return int.from_bytes(self.datagram[-roce.ICRC_BYTES :], "little")

    def computed_icrc(self) -> int:
        body = self.datagram[: -roce.ICRC_BYTES]
        return roce.icrc(body, self.source, self.destination, identification=self.identification)


class Tap:
    """Captures everything that an interface sends and receives while it is open."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((interface, 0))
        self._socket.setblocking(False)

    def frames(self) -> list[bytes]:
        """Returns the frames with RoCE packets since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(FRAME_MAX_BYTES))
        return [frame for frame in found if list(packets([frame]))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def packets(frames: list[bytes]) -> Iterator[Captured]:
    """Yields the RoCE packets of frames. Skips IP options and extension headers."""
    for frame in frames:
        (kind,) = struct.unpack_from(">H", frame, ETHERNET_BYTES - 2)
        ip = frame[ETHERNET_BYTES:]
        if kind == ETH_P_IP:
            udp, protocol = ip[(ip[0] & 0x0F) * 4 :], ip[9]
            addresses = ip[12:16], ip[16:20]
        elif kind == ETH_P_IPV6:
            udp, protocol = ip[IPV6_BYTES:], ip[6]
            addresses = ip[8:24], ip[24:40]
        else:
            continue
        if protocol != roce.PROTOCOL_UDP:
            continue
        source_port, destination_port, udp_bytes = struct.unpack_from(">HHH", udp)
        if destination_port != roce.ROCE_UDP_PORT:
            continue
        source, destination = (str(ipaddress.ip_address(address)) for address in addresses)
        yield Captured(
            source=(source, source_port),
            destination=(destination, destination_port),
            identification=int.from_bytes(ip[4:6], "big") if kind == ETH_P_IP else 0,
            datagram=udp[UDP_BYTES:udp_bytes],
        )


def check_with_scapy(frames: list[bytes]) -> None:
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import UDP
    from scapy.layers.l2 import Ether

    for frame in frames:
        packet = Ether(frame)
        datagram = bytes(packet[UDP].payload)
        transport = BTH(datagram)
        transport.icrc = None  # scapy must compute it from the whole packet
        packet[UDP].remove_payload()
        assert bytes(packet / transport)[-roce.ICRC_BYTES :] == datagram[-roce.ICRC_BYTES :], packet.summary()


def check_with_wireshark(frames: list[bytes], folder: Path) -> None:
    """Compares with Wireshark. Does nothing if tshark is not installed."""
    from scapy.layers.l2 import Ether
    from scapy.utils import wrpcap

    tshark = shutil.which("tshark")
    if tshark is None:
        return
    path = folder / "capture.pcap"
    wrpcap(str(path), [Ether(frame) for frame in frames])
    command = [tshark, "-r", str(path), "-Y", "infiniband", "-T", "fields", "-e", "_ws.malformed"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TSHARK_TIMEOUT_S)
    lines = done.stdout.splitlines()
    assert len(lines) == len(frames)
    assert not any(line.strip() for line in lines)
