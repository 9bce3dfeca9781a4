# SPDX-License-Identifier: Apache-2.0
"""Delays packets: a process in the switch's namespace that keeps each packet for a while and passes it on.

For kernels without sch_netem. The switch sends packets of delayed ports to one end of a veth pair. The relay reads
them at the other end with their offload headers (PACKET_VNET_HDR), so super-packets stay whole and checksums that are
not yet computed stay so. It writes each packet to the switch port of its destination when its time has come.

Runs as `python -m sennit.testbed.topology.relay INTERFACE DESCRIPTOR`, and ends when its standard input does.
"""

from __future__ import annotations

import errno
import heapq
import select
import socket
import struct
import sys
import time
from typing import Final

from sennit.testbed.packet_socket import packet_socket
from sennit.testbed.topology.relay_table import READY, RelayTable

# linux/if_packet.h, linux/if_ether.h, asm-generic/socket.h
SOL_PACKET: Final = 263
PACKET_STATISTICS: Final = 6
PACKET_VNET_HDR: Final = 15
ETH_P_ALL: Final = 0x0003
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33

BUFFER_BYTES: Final = 64 << 20
# struct virtio_net_hdr, then the Ethernet header; the addresses are 02:5e:00:00:<plane>:<host>.
OFFLOAD_HEADER_BYTES: Final = 10
PACKET_MAX_BYTES: Final = OFFLOAD_HEADER_BYTES + 14 + 65_536
DESTINATION_PLANE: Final = OFFLOAD_HEADER_BYTES + 4
SOURCE_PLANE: Final = OFFLOAD_HEADER_BYTES + 10
# Packets read before due ones are sent. Reading must keep up; sending may be late by this many packets.
READ_BATCH: Final = 64
STATISTICS_INTERVAL_NS: Final = 50_000_000


def _packet_socket(protocol: int) -> socket.socket:
    made = packet_socket(protocol)
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    made.setblocking(False)
    return made


class Relay:
    """Packets by due time, and a socket for each port that they leave by."""

    def __init__(self, interface: str, table: RelayTable) -> None:
        self._table = table
        self._inlet = _packet_socket(ETH_P_ALL)
        self._inlet.bind((interface, ETH_P_ALL))
        self._outlets: dict[tuple[int, int], socket.socket] = {}
        self._waiting: list[tuple[int, int, bytes]] = []
        self._serial = 0
        self._statistics_due_ns = 0

    def run(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            wake_ns = self._waiting[0][0] if self._waiting else now_ns + STATISTICS_INTERVAL_NS
            wait_s = min(max(wake_ns - now_ns, 0), STATISTICS_INTERVAL_NS) / 1e9
            readable, _, _ = select.select([self._inlet, sys.stdin], [], [], wait_s)
            if sys.stdin in readable:
                return
            if readable:
                self._read()
            self._send_due()
            self._read_statistics()

    def _read(self) -> None:
        for _ in range(READ_BATCH):
            try:
                packet = self._inlet.recv(PACKET_MAX_BYTES)
            except BlockingIOError:
                return
            self._table.count_received()
            plane, host = packet[SOURCE_PLANE], packet[SOURCE_PLANE + 1]
            due_ns = time.monotonic_ns() + 1_000 * self._table.delay_us(host, plane)
            # The serial number keeps equal times in order.
            heapq.heappush(self._waiting, (due_ns, self._serial, packet))
            self._serial += 1

    def _send_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._waiting and self._waiting[0][0] <= now_ns:
            _, _, packet = heapq.heappop(self._waiting)
            plane, host = packet[DESTINATION_PLANE], packet[DESTINATION_PLANE + 1]
            outlet = self._outlets.get((plane, host))
            try:
                if outlet is None:
                    outlet = self._outlets[plane, host] = _packet_socket(0)
                    outlet.bind((f"p{plane}h{host}", 0))
                outlet.send(packet)
                self._table.count_sent()
            except OSError as error:
                # The port is down or its queue is full: lost, as in a switch.
                if error.errno not in (errno.ENOBUFS, errno.ENETDOWN, errno.ENODEV, errno.EAGAIN):
                    raise
                self._table.count_lost()

    def _read_statistics(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._statistics_due_ns:
            self._statistics_due_ns = now_ns + STATISTICS_INTERVAL_NS
            _, dropped = struct.unpack("II", self._inlet.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
            self._table.count_overrun(dropped)


def main() -> None:
    interface, descriptor = sys.argv[1:]
    relay = Relay(interface, RelayTable(int(descriptor)))
    print(READY, flush=True)
    relay.run()


if __name__ == "__main__":
    main()
