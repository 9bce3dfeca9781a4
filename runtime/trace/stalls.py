# SPDX-License-Identifier: Apache-2.0
"""The session `stalls`: whether a job waits for the network, for its receivers' credit or for the reduction."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Final

from rich.table import Table
from rich.text import Text

from sennit.runtime.trace import histogram
from sennit.runtime.trace.target import Target
from sennit.runtime.trace.tracing import Tracing
from sennit.transport import tracepoints

LIBRARY: Final = tracepoints
PROGRAM: Final = "stalls"
PROBES: Final = (
    "operation_begin", "operation_end", "step_begin", "step_end", "credit_stall_begin", "credit_stall_end",
)  # fmt: skip
NO_PEER: Final = 0xFFFFFFFF


class Kind(IntEnum):
    """The kinds of waits: `enum wait_kind` of programs/stalls.bpf.c."""

    SEND = 0
    RECEIVE = 1
    COPY = 2
    REDUCE = 3
    ENCODE = 4
    DECODE = 5
    CREDIT = 6
    OPERATION = 7


ORDER: Final = (Kind.OPERATION, Kind.SEND, Kind.RECEIVE, Kind.REDUCE, Kind.ENCODE, Kind.DECODE, Kind.COPY, Kind.CREDIT)


@dataclass(kw_only=True)
class Wait:
    """The waits of a rank, over all peers or for one."""

    KEY: ClassVar[tuple[str, ...]] = ("rank", "kind", "peer")
    LEVELS: ClassVar[tuple[str, ...]] = ("open",)

    rank: int
    kind: Kind
    peer: int | None
    count: int = 0
    """Finished waits."""
    time_s: float = 0.0
    """Their total time; several may overlap."""
    open: int = 0
    """Current waits. This and the following only over all peers."""
    busy_s: float = 0.0
    """Time with at least one wait."""
    whole_s: float = 0.0
    """Time in which an operation was in flight."""
    failed: int = 0
    """Durations of operations."""
    time_us: Counter[int] = field(default_factory=Counter)
    """Counts by slot (histogram.py)."""

    @property
    def share(self) -> float:
        """`busy_s` as a share of the time in which an operation was in flight."""
        return self.busy_s / self.whole_s if self.whole_s > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        whole = {"open": self.open, "busy_s": self.busy_s, "share": self.share} if self.peer is None else {}
        return {
            "rank": self.rank,
            "wait": self.kind.name.lower(),
            "peer": self.peer,
            "count": self.count,
            "time_s": self.time_s,
            **whole,
            **({"failed": self.failed} if self.kind is Kind.OPERATION else {}),
            **histogram.summary(self.time_us, "time_us", (50, 90, 99)),
        }


def attach(target: Target) -> Tracing:
    """Watches the library of the target. Raises SessionError."""
    return Tracing(PROGRAM, PROBES, target)


def collect(tracing: Tracing, *, by_peer: bool) -> list[Wait]:
    """What the program has seen so far. Current waits count up to now."""
    waits: dict[tuple[int, int, int], Wait] = {}

    def wait_of(rank: int, kind: Kind, peer: int | None) -> Wait:
        key = rank, ORDER.index(kind), -1 if peer is None else peer
        return waits.setdefault(key, Wait(rank=rank, kind=kind, peer=peer))

    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for key, value in tracing.entries("ranks", "rank_key"):
        rank = int(key["rank"])
        for kind in Kind:
            busy_ns, open_now = int(value["busy_ns"][kind]), int(value["open"][kind])
            if open_now:
                busy_ns += now_ns - int(value["since_ns"][kind])
            if not busy_ns:
                continue
            wait = wait_of(rank, kind, None)
            wait.open += open_now
            wait.busy_s += busy_ns / 1e9
            wait.failed += int(value["failed"]) if kind is Kind.OPERATION else 0
    for key, value in tracing.entries("waits", "wait_key"):
        rank, kind, peer = int(key["rank"]), Kind(int(key["kind"])), int(key["peer"])
        for one in (None, peer) if by_peer and peer != NO_PEER else (None,):
            wait = wait_of(rank, kind, one)
            wait.count += int(value["count"])
            wait.time_s += int(value["time_ns"]) / 1e9
            wait.time_us += histogram.from_array(value["time_us"])
    for wait in waits.values():
        whole = waits.get((wait.rank, 0, -1))
        if wait.peer is None and whole is not None:
            wait.whole_s = whole.busy_s
    return [waits[key] for key in sorted(waits)]


def table(waits: list[Wait]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("rank", justify="right", no_wrap=True)
    shown.add_column("waits for", no_wrap=True)
    for name in ("peer", "count", "now", "seconds", "share", "p50 µs", "p90 µs", "p99 µs"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("time", no_wrap=True)
    for wait in waits:
        is_whole = wait.peer is None
        shown.add_row(
            f"{wait.rank}" if wait.kind is Kind.OPERATION else "",
            Text(wait.kind.name.lower()).append(f" ({wait.failed:,} failed)" if wait.failed else "", style="red"),
            "all" if is_whole else f"{wait.peer}",
            f"{wait.count:,}",
            f"{wait.open:,}" if is_whole else "",
            f"{wait.busy_s if is_whole else wait.time_s:.3f}",
            f"{wait.share:.0%}" if is_whole else "",
            *(f"{histogram.percentile(wait.time_us, share):,}" for share in (0.5, 0.9, 0.99)),
            histogram.bars(wait.time_us),
        )
    return shown
