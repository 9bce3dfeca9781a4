# SPDX-License-Identifier: Apache-2.0
"""Ways to receive the same records from a link into columns, for `sennit bench offload --end-to-end`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from sennit.closing import Closing
from sennit.ebpf.compiler import find_clang
from sennit.ebpf.links import XdpMode, attach_xdp
from sennit.ebpf.loader import Program
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.cpu import CpuReceiver
from sennit.offload.interfaces import own_ends
from sennit.offload.operators import Clamp, PositiveModulus
from sennit.offload.records import HEADER
from sennit.offload.targets import Receiver
from sennit.offload.xdp import XdpReceiver
from sennit.testbed.topology import cable

RECEIVE_BUFFER_BYTES: Final = 256 << 20
LOOP_SOURCE: Final = Path(__file__).with_name("recvmmsg_loop.c")
COMPILE_TIMEOUT_S: Final = 60.0
_SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h


@contextlib.contextmanager
def attached(link: cable.Cable, program: Program) -> Iterator[None]:
    """An XDP program at the far end."""
    with link.within(cable.FAR, lambda: attach_xdp(program, socket.if_nametoindex(cable.FAR), XdpMode.NATIVE)):
        yield


class Peer(Closing):
    """Receives one batch after the other. Call `take` until all rows are there."""

    name: str
    packets_at_a_time: int = 1 << 16
    """The best number of waiting packets. More would leave the cache, fewer would be joined less."""

    def __init__(self, layout: BatchLayout, udp_port: int) -> None:
        self.layout, self.udp_port = layout, udp_port

    @contextlib.contextmanager
    def listening(self, link: cable.Cable) -> Iterator[None]:
        """While the context is open, this peer receives everything that arrives at the far end."""
        yield

    @abstractmethod
    def take(self, batch: int) -> int:
        """Takes the waiting packets. Returns the number of the batch's rows received so far."""

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """The columns of a batch, computed by the plan's operators."""

    def release(self, batch: int) -> None:
        """Releases a batch: its columns are no longer used."""


class _ReceiverPeer(Peer):
    """A receiver of sennit."""

    receiver: Receiver

    def take(self, batch: int) -> int:
        return self.receiver.rows_taken(batch)

    def batch(self, number: int) -> Batch:
        found = self.receiver.batch(number)
        found.tensors()
        return found

    def release(self, batch: int) -> None:
        self.receiver.release(batch)

    def close(self) -> None:
        self.receiver.close()


class XdpPeer(_ReceiverPeer):
    """Receives with XDP into an arena that torch sees."""

    name = "XDP"
    receiver: XdpReceiver

    def __init__(self, layout: BatchLayout, udp_port: int, *, session: int) -> None:
        super().__init__(layout, udp_port)
        self.receiver = XdpReceiver(layout, session=session, udp_port=udp_port, sketch=None)

    @contextlib.contextmanager
    def listening(self, link: cable.Cable) -> Iterator[None]:
        self.receiver.receive_at(link.within(cable.FAR, own_ends, cable.FAR))
        with attached(link, self.receiver.program):
            yield


class NativePeer(_ReceiverPeer):
    """The target `cpu`: recvmmsg with UDP_GRO in its own thread, operators over whole columns."""

    name = "cpu"
    receiver: CpuReceiver

    def __init__(self, layout: BatchLayout, udp_port: int, link: cable.Cable, *, session: int) -> None:
        super().__init__(layout, udp_port)
        self.receiver = CpuReceiver(layout, session=session, sketch=None)
        link.within(
            cable.FAR,
            lambda: self.receiver.listen(cable.FAR_ADDRESS, udp_port, receive_buffer_bytes=RECEIVE_BUFFER_BYTES),
        )

    def take(self, batch: int) -> int:
        os.sched_yield()  # Both run on the same processor.
        return super().take(batch)


class _SocketPeer(Peer):
    """A socket at the far end, and one buffer for the columns of a batch."""

    packets_at_a_time = 1024

    def __init__(self, layout: BatchLayout, udp_port: int, link: cable.Cable) -> None:
        super().__init__(layout, udp_port)
        rows, plan = layout.batch_rows, layout.plan
        self._taken = {0: 0}
        """Rows of the current batch."""

        self._labels = np.zeros(rows, np.float32)
        self._dense = np.zeros((rows, len(plan.dense)), np.float32)
        self._values = np.zeros((len(plan.sparse), rows + 8), np.int64)  # no powers of two
        self._lengths = np.ones((len(plan.sparse), rows), np.int32)
        self.socket = link.within(cable.FAR, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        self.socket.bind((cable.FAR_ADDRESS, udp_port))
        self.socket.setblocking(False)

    def batch(self, number: int) -> Batch:
        rows = self.layout.batch_rows
        found = Batch(
            number=number,
            labels=self._labels,
            dense=self._dense,
            lengths=self._lengths,
            values=tuple(self._values[:, :rows]),
        )
        found.tensors()
        return found

    def release(self, batch: int) -> None:
        self._taken = {(batch + 1) % (1 << 32): 0}

    def close(self) -> None:
        self.socket.close()


class LoopPeer(_SocketPeer):
    """The least that C can do with recvmmsg (recvmmsg_loop.c), in this thread."""

    name = "C loop"

    def __init__(self, layout: BatchLayout, udp_port: int, link: cable.Cable, *, first_rows: int) -> None:
        super().__init__(layout, udp_port, link)
        with tempfile.TemporaryDirectory(prefix="sennit-bench-") as folder:
            library = Path(folder) / "loop.so"
            command = [find_clang(), "-O3", "-march=native", "-shared", "-fPIC", f"-DFIRST_ROWS={first_rows}"]
            subprocess.run([*command, str(LOOP_SOURCE), "-o", str(library)], timeout=COMPILE_TIMEOUT_S, check=True)
            self._take = ctypes.CDLL(str(library)).take
        self._take.argtypes = [ctypes.c_int, ctypes.c_uint32, *[ctypes.c_int] * 3, *[ctypes.c_void_p] * 3]

    def take(self, batch: int) -> int:
        columns = [column.ctypes.data for column in (self._labels, self._dense, self._values)]
        rows, pitch = self.layout.batch_rows, self._values.shape[1]
        begin = self._taken.get(batch, 0)
        taken = int(self._take(self.socket.fileno(), batch, begin, rows, pitch, *columns))
        self._taken[batch] = taken
        return taken


class PythonPeer(_SocketPeer):
    """recv_into for each datagram, then NumPy over the whole batch."""

    name = "Python"

    def __init__(self, layout: BatchLayout, udp_port: int, link: cable.Cable, *, packet_bytes: int) -> None:
        super().__init__(layout, udp_port, link)
        schema = layout.plan.schema
        fields = [("label", "u1"), ("dense", "<f4", len(schema.dense)), ("ids", "<u4", len(schema.ids))]
        self._record = np.dtype(fields)
        self._per_packet = (packet_bytes - HEADER.size) // self._record.itemsize
        self._memory = np.zeros((layout.batch_rows // self._per_packet, packet_bytes), np.uint8)
        self._places = [packet.data for packet in self._memory]
        operators = layout.plan.columns
        clamps = [operators[name] for name in layout.plan.dense]
        moduli = [operators[table.column] for table in layout.plan.sparse]
        self._bounds = [(part.low, part.high) for part in clamps if isinstance(part, Clamp)]
        self._divisors = np.array([part.divisor for part in moduli if isinstance(part, PositiveModulus)], np.uint32)

    def take(self, batch: int) -> int:
        receive, taken = self.socket.recv_into, self._taken.get(batch, 0)
        number = taken // self._per_packet
        try:
            while number < len(self._places):
                receive(self._places[number])
                header = HEADER.unpack_from(self._places[number])
                if (header[5], header[6]) == (batch, number * self._per_packet):
                    number += 1
        except BlockingIOError:
            pass
        self._taken[batch] = number * self._per_packet
        return self._taken[batch]

    def batch(self, number: int) -> Batch:
        records = np.ascontiguousarray(self._memory[:, HEADER.size :]).view(self._record).reshape(-1)
        self._labels[:] = records["label"]
        for column, (low, high) in enumerate(self._bounds):
            np.clip(records["dense"][:, column], low, high, out=self._dense[:, column])
        rows = self.layout.batch_rows
        for column, divisor in enumerate(self._divisors):
            self._values[column, :rows] = records["ids"][:, column] % divisor
        return super().batch(number)
