# SPDX-License-Identifier: Apache-2.0
"""The session `loss`: what is lost on which path, how soon the flow knows it, and what it does about it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

from rich.table import Table

from sennit.runtime.trace import histogram, session
from sennit.runtime.trace.target import Target
from sennit.transport import tracepoints

LIBRARY: Final = tracepoints
PROGRAM: Final = "loss"
PROBES: Final = ("packet_lost", "retransmit", "probe_timeout", "path_state")
COUNTS: Final = ("lost", "retransmitted", "moved", "timeouts", "turned_bad", "readmitted")


@dataclass(kw_only=True)
class Path:
    """One path from a rank to a peer."""

    KEY: ClassVar[tuple[str, ...]] = ("rank", "peer", "path")
    LEVELS: ClassVar[tuple[str, ...]] = ()

    rank: int
    peer: int
    path: int
    lost: int = 0
    retransmitted: int = 0
    """Packets retransmitted on this path."""
    moved: int = 0
    """Retransmitted packets that were lost on another path."""
    timeouts: int = 0
    turned_bad: int = 0
    readmitted: int = 0
    detected_us: Counter[int] = field(default_factory=Counter)
    """Time from sending to the loss verdict; counts by slot (histogram.py)."""

    def as_json(self) -> dict[str, object]:
        return asdict(self) | histogram.summary(self.detected_us, "detected_us", (50, 99), "detected_")


def attach(target: Target) -> AbstractContextManager[session.BccProgram]:
    """Watches the library of the target. Raises SessionError."""
    return session.open_bcc(PROGRAM, PROBES, target)


def collect(program: Any) -> list[Path]:
    """What the program has seen so far."""
    paths: dict[tuple[int, int, int], Path] = {}

    def path_of(key: Any) -> Path:
        return paths.setdefault((key.rank, key.peer, key.number), Path(rank=key.rank, peer=key.peer, path=key.number))

    for key, total in program["totals"].items():
        path = path_of(key)
        for name in COUNTS:
            setattr(path, name, getattr(path, name) + getattr(total, name))
    for key, count in program["latencies"].items():
        path_of(key.path).detected_us[key.slot] += count.value
    return [paths[key] for key in sorted(paths)]


def table(paths: list[Path]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in ("rank", "peer", "path", "lost", "sent again", "moved here", "timeouts", "turned bad", "readmitted"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("known after: p50 µs", "p99 µs"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("known after")
    for path in paths:
        shown.add_row(
            *(f"{value:,}" for value in (path.rank, path.peer, path.path, *(getattr(path, name) for name in COUNTS))),
            *(f"{histogram.percentile(path.detected_us, share):,}" for share in (0.5, 0.99)),
            histogram.bars(path.detected_us),
        )
    return shown
