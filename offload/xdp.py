# SPDX-License-Identifier: Apache-2.0
"""The target `xdp`: the kernel runs the plan on each packet as it arrives and writes batches into an arena."""

from __future__ import annotations

import contextlib
import errno
import socket

from sennit.ebpf.library import BpfError
from sennit.ebpf.links import Link, attach_xdp
from sennit.ebpf.loader import Program, RunTimes
from sennit.ebpf.maps import BpfMap
from sennit.ebpf.pins import PinFolder
from sennit.offload.arena_receiver import ArenaReceiver
from sennit.offload.batches import BatchLayout
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.errors import TargetUnavailable
from sennit.offload.framing import LOOPBACK, Ends, frame
from sennit.offload.interfaces import own_ends
from sennit.offload.plan_program import RING, PlanProgram
from sennit.offload.sketch import DEFAULT_SHAPE, SketchShape

# Receivers of one session on one machine that may have pinned counters.
RECEIVERS_MAX = 64


class XdpReceiver(ArenaReceiver):
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
        """`fragments`: packets may come in several pieces, as at an interface with an MTU above 1,500. The program then
        copies each packet before it reads it. `repeatable` adds a program for measuring that accepts the same packet
        again and again.
        """
        super().__init__(layout, session=session, udp_port=udp_port, sketch=sketch)
        self._loaded = PlanProgram(
            layout,
            session=session,
            udp_port=udp_port,
            sketches=self.sketches,
            fragments=fragments,
            repeatable=repeatable,
        )
        self.source, self.object = self._loaded.source, self._loaded.object
        self.take_over(self.object.arena(RING).memory, self.object.map("counters"))
        self.receive_at(LOOPBACK)
        self.attached: Link | Dispatcher | None = None
        """What brings packets, if this process attached it. It is closed with the receiver."""

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
        self._loaded.receive_at(destination)

    def attach(self, interface: str, address: str | None = None) -> None:
        """Attaches to an interface, in the driver if it can run programs. An interface takes one receiver.

        It takes what is for the interface's hardware address and this address, and leaves the packets of others to the
        host. None: the one of `interfaces.interface_address`.
        """
        self.receive_at(own_ends(interface, address))
        self.attached = attach_xdp(self.program, socket.if_nametoindex(interface))

    def check(self) -> None:
        """Raises TargetUnavailable if the interface has gone, or somebody detached the program."""
        if self.attached is not None and not self.attached.is_attached:
            raise TargetUnavailable("xdp: the program is at no interface any more: that has gone, or it was detached")

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

    def close(self) -> None:
        """Batches are views of the arena, so they become invalid here."""
        if self.attached is not None:
            self.attached.close()
        if self._run_times is not None:
            self._run_times.close()
        if self.pins:
            self.pins.close()
        self._loaded.close()


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
