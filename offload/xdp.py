# SPDX-License-Identifier: Apache-2.0
"""The target `xdp`: the kernel runs the plan on each packet as it arrives and writes batches into an arena."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import ToolMissing, compile_source
from sennit.ebpf.kernel_features import missing_privileges
from sennit.ebpf.library import BpfError
from sennit.ebpf.links import attach_xdp
from sennit.ebpf.loader import BpfObject, Program, RunTimes
from sennit.ebpf.maps import BpfMap
from sennit.ebpf.pins import PinFolder
from sennit.offload._native import KernelSlots
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.errors import NotOffloadable, TargetUnavailable
from sennit.offload.framing import ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_BYTES, LOOPBACK, Ends, frame
from sennit.offload.interfaces import own_ends
from sennit.offload.operators import Cross, cpu_ns_per_record
from sennit.offload.plan import Graph
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape
from sennit.offload.xdp_sketch import SlotSketches
from sennit.offload.xdp_source import generate

RING = "ring"
# A processor has a slot for microseconds. A hypervisor may stop it for longer.
SLOT_TIMEOUT_MS: Final = 5000
# Receivers of one session on one machine that may have pinned counters.
RECEIVERS_MAX = 64


class XdpReceiver(Closing):
    """Receives the records of one session. Batch `n` is complete when `rows_taken(n)` equals the rows sent."""

    def __init__(
        self,
        layout: BatchLayout,
        *,
        session: int,
        udp_port: int,
        sketch: SketchShape | None = DEFAULT_SHAPE,
        fragments: bool = False,
        repeatable: bool = False,
    ) -> None:
        """`fragments`: packets may come in several pieces, as at an interface with an MTU above 3,506. The program then
        copies each packet before it reads it. `repeatable` adds a program for measuring that accepts the same packet
        again and again.
        """
        self.layout, self.session, self.udp_port = layout, session, udp_port
        self.sketches = SlotSketches(layout, sketch) if sketch and layout.plan.sparse else None
        """The memory in which the program counts ids."""

        self.source = generate(layout, sketches=self.sketches, fragments=fragments, repeatable=repeatable)
        try:
            self.object = BpfObject(
                compile_source("feed", self.source.text),
                read_only={"settings": (session, udp_port, 0), **self.source.tables},
                arenas={RING: layout.ring_bytes + (self.sketches.size_bytes if self.sketches else 0)},
                xdp_fragments=fragments,
            )
        except ToolMissing as error:
            raise TargetUnavailable(f"xdp: {error}; the target cpu needs no compiler") from error
        except BpfError as error:
            raise _explained(error, layout) from error
        self.memory = self.object.arena(RING).memory
        layout.prepare(self.memory)
        self._slots = KernelSlots(self.memory, layout.slots, layout.slot_bytes)
        for batch in range(layout.slots):
            self._slots.open(batch)
        self.receive_at(LOOPBACK)
        self.attached: Closing | None = None
        """The attachments that bring packets. They are closed with the receiver."""

        self._run_times: RunTimes | None = None
        self._counted: tuple[Program, ...] = ()

        self.pins = _pinned(self.object.map("counters"), f"ingest-{session:08x}")
        """Where bpftool finds the counters; None if there is no BPF file system and none can be mounted."""

    @property
    def program(self) -> Program:
        """The program, to be attached to the interface where the records arrive."""
        return self.object.program("feed")

    @property
    def repeated_program(self) -> Program:
        return self.object.program("feed_again")

    def receive_at(self, destination: Ends) -> None:
        """Takes packets for these addresses only. They are those of LOOPBACK until this or `attach` is called."""
        self.destination = destination
        address = destination.address
        kind = ETHERTYPE_IPV4 if len(address) == IPV4_BYTES else ETHERTYPE_IPV6
        self.object.write_variable("own", destination.hardware + kind.to_bytes(2, "big") + address.ljust(16, b"\0"))

    def attach(self, interface: str) -> None:
        """Attaches to an interface, in the driver if it can run programs. An interface takes one receiver.

        It takes what is for the interface's own addresses, and leaves the packets of others to the host.
        """
        self.receive_at(own_ends(interface))
        self.attached = attach_xdp(self.program, socket.if_nametoindex(interface))

    def count_time(self, *before: Program) -> None:
        """Counts how long the program runs, from now on. Without CAP_SYS_ADMIN it does nothing.

        `before`: programs that hand packets on. The kernel counts the time of this one as theirs.
        """
        self._counted = (self.program, *before)
        with contextlib.suppress(BpfError):
            self._run_times = RunTimes()

    def program_ns(self) -> int | None:
        """Processor time of the program and of those before it, since `count_time`. None: not counted."""
        if self._run_times is None:
            return None
        return sum(program.statistics().run_time_ns for program in self._counted)

    def deliver(self, datagram: bytes) -> None:
        """Runs the program on one datagram without an interface."""
        self.program.test_run(frame(datagram, self.udp_port, self.destination))

    def rows_taken(self, batch: int) -> int:
        """The number of the batch's records received so far. The sender must continue from there."""
        return self._slots.rows_taken(batch)

    def row_ahead(self, batch: int) -> int:
        """The highest row received out of sequence since the last row taken in order; 0 if no gap is known."""
        return self._slots.row_ahead(batch)

    def batch(self, number: int) -> Batch:
        state = self._slots.claim(number, timeout_ms=SLOT_TIMEOUT_MS)
        try:
            rows = self._slots.rows_kept(number)
            cursors = self.layout.cursor_values(self.memory, number % self.layout.slots).copy()
        finally:
            self._slots.give_back(number, state)
        return self.layout.batch(self.memory, number, rows, cursors)

    def release(self, batch: int) -> None:
        """Assigns the slot to the batch `slots` later, which gives its sender credit.

        Raises OSError (ETIMEDOUT) if a processor does not leave the slot.
        """
        self._slots.claim(batch, timeout_ms=SLOT_TIMEOUT_MS)
        if self.sketches:
            self.sketches.released(self.memory, batch)
        self.layout.cursor_values(self.memory, batch % self.layout.slots)[:] = 0
        self._slots.open((batch + self.layout.slots) % (1 << 32))

    def sketch(self) -> Sketch | None:
        """How often ids occurred so far, open batches included; None if the sketch is off."""
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
        """Batches are views of the arena, so they become invalid here."""
        if self.attached is not None:
            self.attached.close()
        if self._run_times is not None:
            self._run_times.close()
        if self.pins:
            self.pins.close()
        self.object.close()


def _pinned(counters: BpfMap, name: str) -> PinFolder | None:
    """Numbers the receivers of one session on one machine, behind the name."""
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
    """Nested loops first: the verifier spends most time on them."""
    operator = graph.columns[column]
    return isinstance(operator, Cross), cpu_ns_per_record(operator, graph.types[column])


def _explained(error: BpfError, layout: BatchLayout) -> Exception:
    """What the user can do about it, if known."""
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
