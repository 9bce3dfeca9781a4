# SPDX-License-Identifier: Apache-2.0
"""The load of the end-to-end benchmark: an XDP program without a socket sends the packets of batch after batch."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import compile_program
from sennit.ebpf.links import XdpMode, attach_xdp
from sennit.ebpf.loader import BpfObject
from sennit.offload.framing import Ends, frame
from sennit.offload.records import sealed
from sennit.testbed.topology import cable

# The interfaces that a frame passes.
ENDS: Final = Ends(
    source_hardware=bytes.fromhex(cable.NEAR_HARDWARE_ADDRESS.replace(":", "")),
    hardware=bytes.fromhex(cable.FAR_HARDWARE_ADDRESS.replace(":", "")),
    source=socket.inet_pton(socket.AF_INET6, cable.NEAR_ADDRESS),
    address=socket.inet_pton(socket.AF_INET6, cable.FAR_ADDRESS),
)


# The batch number in a header (docs/reference/records.md).
BATCH_AT: Final = 12


class RecordSource(Closing):
    """Packets of one batch, all with the same size and number of records, for `batches` batches in a row."""

    def __init__(self, datagrams: Sequence[bytes], link: cable.Cable, batches: int) -> None:
        self._datagrams, self._batches = datagrams, batches
        frames = [frame(datagram, 0, ENDS, with_checksum=True) for datagram in datagrams]
        self._first, self.count = frames[0], len(frames)
        if any(len(each) != len(self._first) for each in frames):
            raise ValueError(f"frames of {sorted({len(each) for each in frames})} bytes; allowed: one size")
        self._place_bytes = (len(self._first) + 7) // 8 * 8
        self._object = BpfObject(
            compile_program("frames"),
            max_entries={"frames": batches * self.count},
            value_bytes={"frames": self._place_bytes},
            read_only={"frame_bytes": len(self._first)},
        )
        self._program = self._object.program("send_frame")
        self._interface_index = link.within(cable.NEAR, socket.if_nametoindex, cable.NEAR)
        self._prepared = range(0)
        # An attached program is in the kernel's table of direct calls to XDP programs. Otherwise each run would enter
        # it there and remove it again, which takes 20 ms. Nothing arrives at this interface.
        self._link = link.within(
            cable.NEAR, lambda: attach_xdp(self._program, socket.if_nametoindex("lo"), XdpMode.GENERIC)
        )

    def prepare(self, first: int) -> None:
        """Makes the packets of `first` and the batches after it, which takes far longer than to send them."""
        self._prepared = range(first, first + self._batches)
        stored = self._object.map("frames")
        for batch in self._prepared:
            for number, datagram in enumerate(self._datagrams, (batch - first) * self.count):
                numbered = sealed(datagram[:BATCH_AT] + batch.to_bytes(4, "big") + datagram[BATCH_AT + 4 :])
                stored.write(number, frame(numbered, 0, ENDS, with_checksum=True).ljust(self._place_bytes, b"\0"))

    def send(self, udp_port: int, batch: int, begin: int, end: int) -> None:
        """Sends packets `begin` to `end` - 1 of a prepared batch to this port. The link may drop some.

        Raises ValueError if the batch is not prepared.
        """
        place = self._prepared.index(batch) * self.count + begin
        self._object.map("state").write(0, struct.pack("=3I", place, self._interface_index, udp_port))
        self._program.send(self._first, end - begin)

    def close(self) -> None:
        self._link.close()
        self._object.close()


class FrameSink(Closing):
    """Drops what arrives at an interface: the remaining cost is the load's."""

    def __init__(self) -> None:
        self._object = BpfObject(compile_program("frames"))
        self.program = self._object.program("drop_frame")

    def close(self) -> None:
        self._object.close()
