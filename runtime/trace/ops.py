# SPDX-License-Identifier: Apache-2.0
"""The session `ops`: latency and throughput of operations, by kind and size."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rich.table import Table

from sennit.command_line import red
from sennit.runtime.trace import histogram, session
from sennit.runtime.trace.target import Target
from sennit.transport import tracepoints
from sennit.transport.plans.signature import Kind
from sennit.transport.sizes import format_size

LIBRARY: Final = tracepoints
PROGRAM: Final = "ops"
PROBES: Final = ("operation_begin", "operation_end")


@dataclass(kw_only=True)
class Group:
    """Operations of one kind and size. The size is all bytes sent, or received if that is more."""

    KEY: ClassVar[tuple[str, ...]] = ("kind", "bytes_log2", "rank")
    LEVELS: ClassVar[tuple[str, ...]] = ()

    kind: str
    bytes_log2: int
    rank: int | None
    count: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    time_ns: int = 0
    latencies_us: Counter[int] = field(default_factory=Counter)
    """Counts by slot (histogram.py)."""

    def as_json(self) -> dict[str, object]:
        return {
            "operation": self.kind,
            "rank": self.rank,
            "size_at_least_bytes": 1 << self.bytes_log2,
            "count": self.count,
            "failed": self.failed,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "time_ns": self.time_ns,
            **histogram.summary(self.latencies_us, "latency_us", (50, 90, 99)),
        }


def attach(target: Target) -> AbstractContextManager[session.BccProgram]:
    """Watches the library of the target. Raises SessionError."""
    return session.open_bcc(PROGRAM, PROBES, target)


def collect(program: Any, *, by_rank: bool) -> list[Group]:
    """What the program has seen so far."""
    groups: dict[tuple[int, int, int | None], Group] = {}

    def group_of(key: Any) -> Group:
        rank = key.rank if by_rank else None
        return groups.setdefault(
            (key.kind, key.size_log2, rank), Group(kind=_name(key.kind), bytes_log2=key.size_log2, rank=rank)
        )

    for key, total in program["totals"].items():
        group = group_of(key)
        group.count += total.count
        group.failed += total.failed
        group.sent_bytes += total.sent_bytes
        group.received_bytes += total.received_bytes
        group.time_ns += total.time_ns
    for key, count in program["latencies"].items():
        group_of(key.group).latencies_us[key.slot] += count.value
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], key[1], key[2] or 0))]


def table(groups: list[Group]) -> Table:
    columns = ["operation", "size", "rank", "count", "failed", "p50 µs", "p90 µs", "p99 µs", "GB/s", "latency"]
    shown = Table(box=None, pad_edge=False)
    for name in columns:
        shown.add_column(name, justify="left" if name in ("operation", "latency") else "right", no_wrap=True)
    for group in groups:
        moved_bytes = max(group.sent_bytes, group.received_bytes)
        shown.add_row(
            group.kind,
            format_size(1 << group.bytes_log2 if moved_bytes else 0),
            "all" if group.rank is None else f"{group.rank}",
            f"{group.count:,}",
            red(f"{group.failed:,}") if group.failed else "0",
            *(f"{histogram.percentile(group.latencies_us, share):,}" for share in (0.5, 0.9, 0.99)),
            f"{moved_bytes / group.time_ns:.2f}" if group.time_ns else "",
            histogram.bars(group.latencies_us),
        )
    return shown


def _name(kind: int) -> str:
    try:
        return Kind(kind).name.lower()
    except ValueError:
        return f"kind {kind}"
