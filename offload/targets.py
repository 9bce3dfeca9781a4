# SPDX-License-Identifier: Apache-2.0
"""Targets run a plan. All targets make the same batches, bit for bit."""

from __future__ import annotations

import enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from sennit import extras
from sennit.offload.admission import FeedCounters
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape

if TYPE_CHECKING:
    from sennit.offload.xdp import XdpReceiver


class Target(enum.StrEnum):
    """What computes the plan."""

    NUMPY = "numpy"  # the reference
    CPU = "cpu"  # the native core, a batch at a time
    XDP = "xdp"  # a BPF program in the kernel, run on every packet as it arrives


class Receiver(Protocol):
    """Receives the records of one session into a ring of batches.

    A batch is complete when `rows_taken` says that all its records have come. Slots are the senders' credit: the
    `slots` batches after the last one released can be sent. A packet before its turn is counted and must be sent again.
    """

    layout: BatchLayout
    session: int

    def check(self) -> None:
        """Raises TargetUnavailable if no record can arrive any more: the interface has gone, or who has attached to
        it."""

    def rows_taken(self, batch: int) -> int:
        """The number of the batch's records received so far. The sender must continue from there."""

    def row_ahead(self, batch: int) -> int:
        """The highest row received out of sequence since the last row taken in order; 0 if no gap is known.

        If it is set, the row `rows_taken` is missing. Every accepted packet clears it, so a second gap can be told from
        the first.
        """

    def batch(self, number: int) -> Batch:
        """The batch with the rows received so far."""

    def release(self, batch: int) -> None:
        """Assigns the slot to the batch `slots` later. Views of the released batch become invalid."""

    def sketch(self) -> Sketch | None:
        """How often ids occurred so far, open batches included; None if the sketch is off."""

    def counters(self) -> FeedCounters:
        """Datagrams by verdict."""

    def program_ns(self) -> int | None:
        """Processor time of the kernel's program that makes the batches; None: there is none, or nobody counts."""

    def close(self) -> None:
        """Stops the receiver and frees the memory of its batches."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OwnReceiver(Receiver, Protocol):
    """A receiver whose program runs in this process, or was loaded by it."""

    def deliver(self, datagram: bytes) -> None:
        """Processes one datagram as if it had arrived."""


def compile_plan(
    layout: BatchLayout,
    target: Target,
    *,
    session: int,
    udp_port: int = 0,
    sketch: SketchShape | None = DEFAULT_SHAPE,
) -> OwnReceiver:
    """A receiver for a plan. It keeps a sketch of ids unless that is None.

    NotOffloadable and TargetUnavailable say what prevents it, and what to do.
    """
    if target is Target.XDP:
        return xdp_receiver()(layout, session=session, udp_port=udp_port, sketch=sketch)
    if target is Target.CPU:
        from sennit.offload.cpu import CpuReceiver

        return CpuReceiver(layout, session=session, sketch=sketch)
    from sennit.offload.host_receiver import HostReceiver

    return HostReceiver(layout, session=session, sketch=sketch)


def xdp_receiver() -> type[XdpReceiver]:
    """The receiver in the kernel. Its loader needs pyelftools; raises TargetUnavailable if that is missing."""
    try:
        from sennit.offload.xdp import XdpReceiver
    except ModuleNotFoundError as error:
        raise TargetUnavailable(f"xdp: {extras.explain(error) or error}") from None
    return XdpReceiver
