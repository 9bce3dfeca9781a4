# SPDX-License-Identifier: Apache-2.0
"""The UDP socket from one feeder to one rank. No packet exceeds the path MTU."""

from __future__ import annotations

import errno
import socket
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.ingest.protocol import Terms
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import RecordStore
from sennit.offload.records import HEADER

SEND_BUFFER_BYTES: Final = 4 << 20
# linux/in.h and linux/in6.h: level, option to set, "never fragment", option that reads the path MTU.
_PATH_MTU: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, 10, 2, 14),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 2, 24),
}
# IP and UDP headers.
_HEADERS_BYTES: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}


class RecordSocket:
    """A socket connected to a rank's record port."""

    def __init__(self, address: Any, terms: Terms, store: RecordStore) -> None:
        """Raises FeedError if not even one record fits a packet."""
        self.peer = f"{address[0]} port {address[1]}"
        self._terms, self._store = terms, store
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._level, discover, never_fragment, self._mtu_option = _PATH_MTU[family]
            self._headers_bytes = _HEADERS_BYTES[family]
            # Fragments are forbidden, because a BPF program sees packets, not reassembled datagrams.
            self._socket.setsockopt(self._level, discover, never_fragment)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._socket.setblocking(False)
            self._socket.connect(address)
            self._sender = self._make_sender()
        except BaseException:
            self._socket.close()
            raise

    def send(self, records: NDArray[np.int64], batch: int, first: int, packets_max: int) -> tuple[int, int, int]:
        """Sends rows of the batch from `first` on.

        Returns the next row, the packets sent, and the socket's error or 0.
        """
        next_row, packets, failure = self._sender.send(self._socket.fileno(), records, batch, first, packets_max)
        if failure == errno.EMSGSIZE:
            # The path MTU shrank (ICMP packet too big): packets are shorter from here on.
            before, self._sender = self._body_bytes, self._make_sender()
            failure = errno.EAGAIN if self._body_bytes < before else failure
        return next_row, packets, failure

    def close(self) -> None:
        self._socket.close()

    def _make_sender(self) -> Any:
        mtu = self._socket.getsockopt(self._level, self._mtu_option)
        self._body_bytes = min(self._terms.packet_bytes, mtu - self._headers_bytes) - HEADER.size
        try:
            return self._store.sender(session=self._terms.session, body_max_bytes=max(1, self._body_bytes))
        except ValueError as error:
            raise FeedError(
                f"{error} bytes in a packet to {self.peer} (the path's MTU is {mtu}, the trainer takes packets of "
                f"{self._terms.packet_bytes}); shorten lists with first"
            ) from error
