# SPDX-License-Identifier: Apache-2.0
"""The target `xdp`: a plan runs in the kernel on each packet as it arrives, and batches appear in an arena."""

from __future__ import annotations

import errno
import socket

from sennit.closing import Closing
from sennit.ebpf.compiler import ToolMissing, compile_source
from sennit.ebpf.features import missing_privileges
from sennit.ebpf.library import BpfError
from sennit.ebpf.links import attach_xdp
from sennit.ebpf.loader import BpfObject, Program
from sennit.ebpf.maps import BpfMap
from sennit.ebpf.pins import PinFolder
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.cost import cpu_ns_per_record
from sennit.offload.errors import NotOffloadable, TargetUnavailable
from sennit.offload.framing import frame
from sennit.offload.operators import Cross
from sennit.offload.plan import Graph
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape
from sennit.offload.xdp_sketch import SlotSketches
from sennit.offload.xdp_source import generate

RING = "ring"
# Of one session on one machine, with counters that are pinned.
RECEIVERS_MAX = 64


class XdpReceiver(Closing):
    """Takes the records of one session. Batch `n` is there when `rows_taken(n)` is all that was sent of it."""

    def __init__(
        self,
        layout: BatchLayout,
        *,
        session: int,
        udp_port: int,
        sketch: SketchShape | None = DEFAULT_SHAPE,
        repeatable: bool = False,
    ) -> None:
        """`repeatable` adds a program for measuring, which takes the same packet again and again."""
        self.layout, self.session, self.udp_port = layout, session, udp_port
        self.sketches = SlotSketches(layout, sketch) if sketch and layout.plan.sparse else None
        """Where the program counts ids."""

        self.source = generate(layout, sketches=self.sketches, repeatable=repeatable)
        try:
            self.object = BpfObject(
                compile_source("feed", self.source.text),
                read_only={"settings": (session, udp_port, 0), **self.source.tables},
                arenas={RING: layout.ring_bytes + (self.sketches.size_bytes if self.sketches else 0)},
            )
        except ToolMissing as error:
            raise TargetUnavailable(f"xdp: {error}; the target cpu needs no compiler") from error
        except BpfError as error:
            raise _explained(error, layout) from error
        self.memory = self.object.arena(RING).memory
        layout.prepare(self.memory)
        self.attached: Closing | None = None
        """What brings it its packets, and ends with it."""

        self.pins = _pinned(self.object.map("counters"), f"ingest-{session:08x}")
        """Where bpftool finds the counters. None: there is no BPF file system, and none can be mounted."""

    @property
    def program(self) -> Program:
        """To be attached to the interface that the records come in at."""
        return self.object.program("feed")

    @property
    def repeated_program(self) -> Program:
        return self.object.program("feed_again")

    def attach(self, interface: str) -> None:
        """Takes what comes in there, in the driver where that can run programs. An interface takes one receiver."""
        self.attached = attach_xdp(self.program, socket.if_nametoindex(interface))

    def deliver(self, datagram: bytes) -> None:
        """Runs the program on one datagram without any interface."""
        self.program.test_run(frame(datagram, self.udp_port))

    def rows_taken(self, batch: int) -> int:
        """How many of the batch's records have come, and whence the sender must go on."""
        state = self.layout.state(self.memory, batch % self.layout.slots)
        return int(state["next_row"][0]) if int(state["batch"][0]) == batch else 0

    def row_ahead(self, batch: int) -> int:
        """The highest row that came out of sequence since the last one taken; 0: no gap is known."""
        state = self.layout.state(self.memory, batch % self.layout.slots)
        return int(state["ahead_row"][0]) if int(state["batch"][0]) == batch else 0

    def batch(self, number: int) -> Batch:
        return self.layout.batch(self.memory, number)

    def release(self, batch: int) -> None:
        """Gives the batch's slot to the batch that is `slots` later: its sender's credit."""
        if self.sketches:
            self.sketches.released(self.memory, batch)
        following = (batch + self.layout.slots) % (1 << 32)
        self.layout.open(self.memory, batch % self.layout.slots, following)

    def sketch(self) -> Sketch | None:
        """How often ids were in the rows so far, those of open batches included; None where it is off."""
        counted = self.counters()
        return self.sketches.total(self.memory, counted.records - counted.filtered) if self.sketches else None

    def counters(self) -> FeedCounters:
        counted = self.object.map("counters").values(0)
        total = {name: int(counted[name].sum()) for name in counted.dtype.names or ()}
        return FeedCounters(
            datagrams={verdict: total[verdict.name.lower()] for verdict in Verdict},
            records=total["records"],
            filtered=total["filtered"],
            body_bytes=total["body_bytes"],
        )

    def close(self) -> None:
        """Batches are views of the arena, which ends here."""
        if self.attached is not None:
            self.attached.close()
        if self.pins:
            self.pins.close()
        self.object.close()


def _pinned(counters: BpfMap, name: str) -> PinFolder | None:
    """Receivers of one session on one machine get numbers behind the name."""
    for number in range(1, RECEIVERS_MAX + 1):
        try:
            folder = PinFolder(name if number == 1 else f"{name}-{number}")
        except BpfError as error:
            if error.errno == errno.EBUSY:
                continue
            return None
        folder.pin(counters)
        return folder
    return None


def _work(graph: Graph, column: str) -> tuple[bool, float]:
    """Loops in loops come first: they are what the verifier walks longest."""
    operator = graph.columns[column]
    return isinstance(operator, Cross), cpu_ns_per_record(operator, graph.types[column])


def _explained(error: BpfError, layout: BatchLayout) -> Exception:
    """What the user can do about it, where that is known."""
    lacking = missing_privileges()
    if error.errno in (errno.EPERM, errno.EACCES) and lacking:
        return TargetUnavailable(f"xdp: this process lacks {', '.join(lacking)}; the target cpu needs none")
    if error.errno in (errno.E2BIG, errno.ENOMEM):
        graph = layout.plan.graph
        longest = max(graph.order, key=lambda name: _work(graph, name), default=None)
        if longest is not None:
            operator = graph.columns[longest]
            reason = "the kernel's verifier gave up on the program, and this column is the most work in it"
            cost = cpu_ns_per_record(operator, graph.types[longest])
            return NotOffloadable(longest, type(operator).__name__, reason, cost)
    return error
