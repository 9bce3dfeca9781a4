# SPDX-License-Identifier: Apache-2.0
"""Delays packets: a process in the switch's namespace that keeps each packet for a while and passes it on.

For kernels without sch_netem. The switch sends packets of delayed ports to one end of a veth pair. The relay reads
them at the other end with their offload headers (PACKET_VNET_HDR), so super-packets stay whole and checksums that are
not yet computed stay so. It writes each packet to the switch port of its destination when its time has come. The delay
counts from the kernel's time stamp, so that a relay that wakes up late to read delays nothing.

This file makes the sockets. The loop is native (testbed/csrc/relay.cpp).

Runs as `python -m sennit.testbed.topology.relay INTERFACE DESCRIPTOR`, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Final

from sennit.testbed import _lab
from sennit.testbed.packet_socket import packet_socket
from sennit.testbed.topology.fabric import FIRST_PORT_IFINDEX, HOSTS_MAX
from sennit.testbed.topology.relay_table import READY

# linux/if_packet.h, linux/if_ether.h, asm-generic/socket.h
SOL_PACKET: Final = 263
PACKET_VNET_HDR: Final = 15
ETH_P_ALL: Final = 0x0003
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33
SO_TIMESTAMPNS: Final = 35

BUFFER_BYTES: Final = 64 << 20


def _packet_socket(protocol: int) -> socket.socket:
    made = packet_socket(protocol)
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    made.setblocking(False)
    return made


def _go_first() -> None:
    """Lets no rank that polls keep the relay waiting for a processor: a network has processors of its own."""
    # A container may not have the right to (CAP_SYS_NICE). Then the relay is later.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    interface, descriptor = sys.argv[1:]
    # Without a protocol a socket gets no packets, so before `bind` none of other interfaces.
    with _packet_socket(0) as inlet, _packet_socket(0) as outlet:
        inlet.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        inlet.bind((interface, ETH_P_ALL))
        _go_first()
        print(READY, flush=True)
        _lab.relay(
            inlet=inlet.fileno(),
            outlet=outlet.fileno(),
            table=int(descriptor),
            stop=sys.stdin.fileno(),
            first_port=FIRST_PORT_IFINDEX,
            ports_a_plane=HOSTS_MAX,
        )


if __name__ == "__main__":
    main()
