# SPDX-License-Identifier: Apache-2.0
"""Targets: what runs a plan. All make the same batches, bit for bit."""

from __future__ import annotations

import enum
from types import TracebackType
from typing import Protocol, Self

from sennit.offload.admission import FeedCounters
from sennit.offload.batches import Batch, BatchLayout
from sennit.offload.sketch import DEFAULT_SHAPE, Sketch, SketchShape


class Target(enum.StrEnum):
    """Who computes."""

    NUMPY = "numpy"  # the reference
    CPU = "cpu"  # the native core, a batch at a time
    XDP = "xdp"  # a program of its own in the kernel, on every packet as it arrives


class Receiver(Protocol):
    """Takes the records of one session into a ring of batches.

    A batch is complete when `rows_taken` says that all its records have come. Slots are the senders' credit: the
    `slots` batches after the last one released can be sent. A packet before its turn is counted and must be sent again.
    """

    layout: BatchLayout
    session: int

    def deliver(self, datagram: bytes) -> None:
        """Takes one datagram, as if it had arrived."""

    def rows_taken(self, batch: int) -> int:
        """How many of the batch's records have come, and whence the sender must go on."""

    def row_ahead(self, batch: int) -> int:
        """The highest row that came out of sequence since the last one taken; 0: no gap is known.

        Where there is one, the row `rows_taken` is missing. Every packet taken clears it, so that a second gap is known
        from the first.
        """

    def batch(self, number: int) -> Batch:
        """The batch as far as it has come."""

    def release(self, batch: int) -> None:
        """Gives the slot to the batch that is `slots` later. Views of the batch are then worth nothing."""

    def sketch(self) -> Sketch | None:
        """How often ids were in the rows so far, those of open batches included; None where it is off."""

    def counters(self) -> FeedCounters:
        """What became of every datagram, by name."""

    def close(self) -> None:
        """Ends it and the memory of its batches."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def compile_plan(
    layout: BatchLayout,
    target: Target,
    *,
    session: int,
    udp_port: int = 0,
    sketch: SketchShape | None = DEFAULT_SHAPE,
) -> Receiver:
    """A receiver for a plan, which keeps a sketch of ids unless that is None.

    NotOffloadable and TargetUnavailable say what stands against it, and what to do.
    """
    if target is Target.XDP:
        from sennit.offload.xdp import XdpReceiver

        return XdpReceiver(layout, session=session, udp_port=udp_port, sketch=sketch)
    if target is Target.CPU:
        from sennit.offload.cpu import CpuReceiver

        return CpuReceiver(layout, session=session, sketch=sketch)
    from sennit.offload.host_receiver import HostReceiver

    return HostReceiver(layout, session=session, sketch=sketch)
