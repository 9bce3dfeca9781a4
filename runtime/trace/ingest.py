# SPDX-License-Identifier: Apache-2.0
"""The session `ingest`.

It shows whether batches wait for the trainer or the trainer for batches, and which datagrams are refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final

from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from sennit.offload import tracepoints
from sennit.offload.admission import Verdict
from sennit.offload.ingest.leases import Why
from sennit.runtime.trace import histogram
from sennit.runtime.trace.target import Target
from sennit.runtime.trace.tracing import Tracing

LIBRARY: Final = tracepoints
PROGRAM: Final = "ingest"
PROBES: Final = (
    "batch_begun", "batch_complete", "batch_wanted", "batch_taken", "batch_released", "rows_requested",
    "datagram_refused", "packets_sent",
)  # fmt: skip
TIMES: Final = ("filling_us", "waiting_us", "starved_us")


@dataclass(kw_only=True)
class Trainer:
    """One rank that takes batches."""

    KEY: ClassVar[tuple[str, ...]] = ("process", "rank")
    LEVELS: ClassVar[tuple[str, ...]] = ()

    process: int
    rank: int
    batches: int = 0
    """Complete batches."""
    rows: int = 0
    """Records in complete batches."""
    later_batches: int = 0
    """Complete batches without the first one."""
    seconds: float = 0.0
    """Seconds from the first complete batch to the last."""
    released: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    """Orders to feeders, by reason."""
    refused: dict[str, int] = field(default_factory=dict)
    """Datagrams that the target `cpu` refused, by verdict, for the whole process."""
    times: dict[str, Counter[int]] = field(default_factory=dict)
    """Microseconds by name, as counts by slot (histogram.py). filling: from a batch's first row to its last. waiting:
    it was complete and not taken. starved: the trainer wanted it and did not have it.
    """

    @property
    def batches_per_s(self) -> float:
        return self.later_batches / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        shown: dict[str, object] = {
            "process": self.process, "rank": self.rank, "batches": self.batches, "rows": self.rows,
            "batches_per_s": self.batches_per_s, "released": self.released, "asked": self.asked,
            "refused": self.refused,
        }  # fmt: skip
        for name, counts in self.times.items():
            shown |= histogram.summary(counts, name, (50, 90, 99), name.removesuffix("us"))
        return shown


@dataclass(kw_only=True)
class Feeder:
    """One process that sends records, in one session."""

    KEY: ClassVar[tuple[str, ...]] = ("process", "session")
    LEVELS: ClassVar[tuple[str, ...]] = ()

    process: int
    session: int
    packets: int
    rows: int
    """Datagrams, repetitions included."""
    calls: int
    blocked: int
    """Calls that found no room in the socket."""
    errors: int

    def as_json(self) -> dict[str, object]:
        return {"feeder": self.process, "session": self.session, "packets": self.packets, "rows": self.rows,
                "calls": self.calls, "blocked": self.blocked, "errors": self.errors}  # fmt: skip


def attach(target: Target) -> Tracing:
    """Watches the library of the target. Raises SessionError."""
    return Tracing(PROGRAM, PROBES, target)


def collect(tracing: Tracing) -> list[Trainer | Feeder]:
    """What the program has seen so far, ranks first."""
    trainers = []
    refused: dict[int, Counter[str]] = {}
    for key, value in tracing.entries("refused", "process_key"):
        refused.setdefault(int(key["process"]), Counter()).update(_by_name(Verdict, value["datagrams"]))
    for key, value in tracing.entries("trainers", "trainer_key"):
        process = int(key["process"])
        trainers.append(
            Trainer(
                process=process,
                rank=int(key["rank"]),
                batches=int(value["batches"]),
                later_batches=max(0, int(value["batches"]) - 1),
                rows=int(value["rows"]),
                seconds=(int(value["last_ns"]) - int(value["first_ns"])) / 1e9,
                released=int(value["released"]),
                asked=_by_name(Why, value["asked"]),
                refused={name: count for name, count in refused.get(process, Counter()).items() if count},
                times={name: histogram.from_array(value[name]) for name in TIMES},
            )
        )
    feeders = [
        Feeder(
            process=int(key["process"]),
            session=int(key["session"]),
            **{name: int(value[name]) for name in ("packets", "rows", "calls", "blocked", "errors")},
        )
        for key, value in tracing.entries("feeders", "process_key")
    ]
    trainers.sort(key=lambda trainer: (trainer.rank, trainer.process))
    feeders.sort(key=lambda feeder: (feeder.process, feeder.session))
    return [*trainers, *feeders]


def table(rows: list[Trainer | Feeder]) -> Group:
    trainers, feeders = Table(box=None, pad_edge=False), Table(box=None, pad_edge=False)
    for name in ("rank", "batches", "a second", "rows"):
        trainers.add_column(name, justify="right", no_wrap=True)
    for name in ("filled in: p50 µs", "p99 µs", "waits: p50 µs", "p99 µs", "waited for: p50 µs", "p99 µs"):
        trainers.add_column(name, justify="right")
    trainers.add_column("asked again")
    trainers.add_column("refused")
    for name in ("feeder", "packets", "rows", "calls", "blocked", "errors"):
        feeders.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if isinstance(row, Feeder):
            numbers = (row.packets, row.rows, row.calls, row.blocked, row.errors)
            feeders.add_row(f"{row.process}", *(f"{number:,}" for number in numbers))
            continue
        again = {name: count for name, count in row.asked.items() if name != Why.OPENED.name.lower()}
        trainers.add_row(
            f"{row.rank}",
            f"{row.batches:,}",
            f"{row.batches_per_s:,.1f}",
            f"{row.rows:,}",
            *(f"{histogram.percentile(row.times[name], share):,}" for name in TIMES for share in (0.5, 0.99)),
            _named(again),
            _named(row.refused),
        )
    return Group(*(shown for shown in (trainers, feeders) if shown.row_count))


def _by_name(kinds: type[IntEnum], counts: NDArray[Any]) -> dict[str, int]:
    """Counts by the names of their numbers. A number that this version does not know is shown if it was met."""
    known = {int(kind): kind.name.lower() for kind in kinds}
    return {
        known.get(number, f"{number}"): int(count) for number, count in enumerate(counts) if count or number in known
    }


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "nothing"
