# SPDX-License-Identifier: Apache-2.0
"""Plain UDP sockets that play a RoCE sender. Their IP headers are known, so the ICRC can cover them."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Final, Self

from .packets import Datagram, Source

# linux/in.h, linux/in6.h: no fragments. An unconnected IPv4 socket then writes identification 0
# (docs/reference/wire.md).
IP_MTU_DISCOVER: Final = 10
IPV6_MTU_DISCOVER: Final = 23
PMTUDISC_DO: Final = 2


class Sockets:
    """The peer's socket, one with another port, and one with another address. All send to the same destination."""

    def __init__(self, local_address: str, other_address: str, remote_address: str) -> None:
        self.remote_address = remote_address
        self._remote_port = 0
        family = socket.AF_INET6 if ":" in local_address else socket.AF_INET
        self._is_ipv6 = family == socket.AF_INET6
        self._sockets = {source: socket.socket(family, socket.SOCK_DGRAM) for source in Source}
        for source, opened in self._sockets.items():
            if self._is_ipv6:
                opened.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_DO)
            else:
                opened.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_DO)
            opened.bind((other_address if source is Source.OTHER_ADDRESS else local_address, 0))

    def aim(self, port: int) -> None:
        self._remote_port = port

    @property
    def local(self) -> tuple[str, int]:
        return self._name(Source.PEER)

    def send(self, datagram: Datagram) -> None:
        opened = self._sockets[datagram.source]
        if self._is_ipv6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, datagram.hop_limit)
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, datagram.traffic_class)
        else:
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, datagram.hop_limit)
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, datagram.traffic_class)
        remote = (self.remote_address, self._remote_port)
        opened.sendto(datagram.sealed(self._name(datagram.source), remote), remote)

    def receive(self, timeout_s: float) -> bytes:
        """Returns the next datagram at the peer's socket."""
        opened = self._sockets[Source.PEER]
        opened.settimeout(timeout_s)
        return opened.recv(65_536)

    def _name(self, source: Source) -> tuple[str, int]:
        address, port = self._sockets[source].getsockname()[:2]
        return address, port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._sockets.values():
            opened.close()
