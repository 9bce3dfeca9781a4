# SPDX-License-Identifier: Apache-2.0
"""Takes records from a UDP socket in Python."""

from __future__ import annotations

import socket
import threading
from typing import Final

from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.native import NativeTransform

RECEIVE_BUFFER_BYTES: Final = 8 << 20
_LOOK_S: Final = 0.1


class SocketReceiver(HostReceiver):
    """A receiver with a thread of its own that reads the socket."""

    def __init__(self, layout: BatchLayout, *, session: int) -> None:
        transform = NativeTransform(layout.plan.graph, layout.plan.outputs)
        super().__init__(layout, session=session, evaluate=transform)
        self._lock = threading.Lock()
        self._ends = False
        self._thread: threading.Thread | None = None

    def listen(self, address: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_DGRAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            listening.bind((address, port))
        except OSError:
            listening.close()
            raise
        listening.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._read, args=(listening,), name="sennit-datagrams", daemon=True)
        self._thread.start()

    def batch(self, number: int) -> Batch:
        with self._lock:
            return super().batch(number)

    def release(self, batch: int) -> None:
        with self._lock:
            super().release(batch)

    def close(self) -> None:
        self._ends = True
        if self._thread is not None:
            self._thread.join()
        super().close()

    def _read(self, listening: socket.socket) -> None:
        with listening:
            while not self._ends:
                try:
                    datagram = listening.recv(1 << 16)
                except TimeoutError:
                    continue
                with self._lock:
                    self.deliver(datagram)
