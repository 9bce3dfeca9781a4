# SPDX-License-Identifier: Apache-2.0
"""The session `paths`: what each path carries, what it loses, its round trips and its states."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final

from rich.table import Table

from sennit.command_line import red
from sennit.runtime.trace import histogram
from sennit.runtime.trace.target import Target
from sennit.runtime.trace.tracing import Tracing
from sennit.transport import tracepoints
from sennit.transport.tracepoints import PathState

LIBRARY: Final = tracepoints
PROGRAM: Final = "paths"
PROBES: Final = ("packet_sent", "packet_received", "rtt_sample", "packet_lost", "path_state")
COUNTS: Final = (
    "sent_packets", "sent_bytes", "retransmitted_packets", "received_packets", "received_bytes", "duplicate_packets",
    "lost_packets", "state_changes",
)  # fmt: skip


@dataclass(kw_only=True)
class Path:
    """One path from a rank to a peer. Packets are data packets."""

    KEY: ClassVar[tuple[str, ...]] = ("rank", "peer", "path")
    LEVELS: ClassVar[tuple[str, ...]] = ("state",)

    rank: int
    peer: int
    path: int
    sent_packets: int = 0
    sent_bytes: int = 0
    retransmitted_packets: int = 0
    """Retransmissions among the sent packets."""
    received_packets: int = 0
    received_bytes: int = 0
    duplicate_packets: int = 0
    """Repeated packets, not counted as received."""
    lost_packets: int = 0
    state_changes: int = 0
    state: int = PathState.GOOD
    """The last one seen: of `PathState`, if this version knows it."""
    state_s: dict[str, float] = field(default_factory=dict)
    """Seconds in each state, until its last measured round trip."""
    rtt_us: Counter[int] = field(default_factory=Counter)
    """Counts by slot (histogram.py)."""

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "state": tracepoints.state_name(self.state),
            **histogram.summary(self.rtt_us, "rtt_us", (50, 90, 99), "rtt_"),
        }


def attach(target: Target) -> Tracing:
    """Watches the library of the target. Raises SessionError."""
    return Tracing(PROGRAM, PROBES, target)


def collect(tracing: Tracing) -> list[Path]:
    """What the program has seen so far. Ranks with equal numbers in several jobs are counted together."""
    paths: dict[tuple[int, int, int], Path] = {}
    seen_ns: dict[tuple[int, int, int], int] = {}
    for key, value in tracing.entries("paths", "path_key"):
        name = int(key["rank"]), int(key["peer"]), int(key["path"])
        path = paths.setdefault(name, Path(rank=name[0], peer=name[1], path=name[2]))
        for count in COUNTS:
            setattr(path, count, getattr(path, count) + int(value[count]))
        path.rtt_us += histogram.from_array(value["rtt_us"])
        state = int(value["state"])
        in_state_ns = value["state_ns"].astype(int).tolist()
        in_state_ns[min(state, len(in_state_ns) - 1)] += int(value["seen_ns"]) - int(value["state_since_ns"])
        for number, time_ns in enumerate(in_state_ns):
            if time_ns > 0:
                title = tracepoints.state_name(number)
                path.state_s[title] = path.state_s.get(title, 0.0) + time_ns / 1e9
        if int(value["seen_ns"]) >= seen_ns.get(name, 0):
            path.state, seen_ns[name] = state, int(value["seen_ns"])
    return [paths[name] for name in sorted(paths)]


def table(paths: list[Path]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in ("rank", "peer", "path", "sent", "MB", "again", "received", "MB", "lost"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("RTT p50 µs", "p90 µs", "p99 µs"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("RTT", no_wrap=True)
    shown.add_column("changes", justify="right", no_wrap=True)
    shown.add_column("seconds in states")
    for path in paths:
        shown.add_row(
            f"{path.rank}",
            f"{path.peer}",
            f"{path.path}",
            f"{path.sent_packets:,}",
            f"{path.sent_bytes / 1e6:,.1f}",
            f"{path.retransmitted_packets:,}",
            f"{path.received_packets:,}",
            f"{path.received_bytes / 1e6:,.1f}",
            red(f"{path.lost_packets:,}") if path.lost_packets else "0",
            *(f"{histogram.percentile(path.rtt_us, share):,}" for share in (0.5, 0.9, 0.99)),
            histogram.bars(path.rtt_us),
            f"{path.state_changes:,}",
            " ".join(f"{name} {time_s:.2f}" for name, time_s in path.state_s.items()),
        )
    return shown
