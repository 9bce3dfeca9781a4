# SPDX-License-Identifier: Apache-2.0
"""The UDP socket from one feeder to one rank. No packet exceeds the path MTU."""

from __future__ import annotations

import errno
import socket
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from sennit.offload._native import RecordSender
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

    def __init__(self, address: Any, terms: Terms) -> None:
        self.peer = f"{address[0]} port {address[1]}"
        self._terms = terms
        self._senders: WeakKeyDictionary[RecordStore, RecordSender] = WeakKeyDictionary()
        self._is_apart = False
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
            self._body_bytes = self._path_bytes()
        except BaseException:
            self._socket.close()
            raise

    def send(
        self, store: RecordStore, records: NDArray[np.int64], batch: int, first: int, packets_max: int
    ) -> tuple[int, int, int]:
        """Sends rows of the batch from `first` on. `records`: the numbers of all its rows in the store.

        Returns the next row, the packets sent, and the socket's error or 0. Raises FeedError for a record that no
        packet holds.
        """
        sender = self._senders.get(store)
        if sender is None:
            sender = self._senders[store] = self._make_sender(store)
        next_row, packets, failure = sender.send(self._socket.fileno(), records, batch, first, packets_max)
        if failure == errno.EMSGSIZE:
            # The path MTU shrank (ICMP packet too big): packets are shorter from here on.
            before, self._body_bytes = self._body_bytes, self._path_bytes()
            self._senders.clear()
            failure = errno.EAGAIN if self._body_bytes < before else failure
        return next_row, packets, failure

    def send_apart(self) -> None:
        """Gives each packet to the kernel alone from now on, for a rank that several in one message reach as one."""
        self._is_apart = True
        for sender in self._senders.values():
            sender.send_apart()

    def close(self) -> None:
        self._socket.close()

    def _path_bytes(self) -> int:
        """Bytes of records in the longest packet that the path and the trainer take."""
        self._mtu = self._socket.getsockopt(self._level, self._mtu_option)
        return max(1, min(self._terms.packet_bytes, self._mtu - self._headers_bytes) - HEADER.size)

    def _make_sender(self, store: RecordStore) -> RecordSender:
        try:
            sender = store.sender(session=self._terms.session, body_max_bytes=self._body_bytes)
        except ValueError as error:
            raise FeedError(
                f"{error} bytes in a packet to {self.peer} (the path's MTU is {self._mtu}, the trainer takes packets "
                f"of {self._terms.packet_bytes}); shorten lists with first"
            ) from error
        if self._is_apart:
            sender.send_apart()
        return sender
