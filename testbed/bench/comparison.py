# SPDX-License-Identifier: Apache-2.0
"""`sennit bench all`: sennit beside every peer that is installed, in one run: collectives, tables, a training step.

Each part is a benchmark of its own (`sennit bench collectives`, `embedding`, `sharded`) at the sizes that say most.
Within a part all peers take turns, round by round. A peer that is not installed is named with what to install.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from sennit.runtime.calibrate import machine
from sennit.runtime.training.launch import RankFailure
from sennit.testbed.bench.results import quantile
from sennit.testbed.bench.tables import embedding
from sennit.testbed.bench.training import sharded
from sennit.testbed.bench.transport import collectives
from sennit.testbed.bench.transport.conductor import WorkerError, mpirun
from sennit.transport.sizes import format_size

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SHARED: Final = "shared memory, 2 ranks"
CORE: Final = "the same without torch"
LOOPBACK: Final = "UDP on the loopback device, 2 ranks"
LOOKUPS: Final = "lookup and update, 26 tables, one thread"
STEP: Final = "training step, 26 tables, 2 ranks"
TITLES: Final = {
    "allreduce": "AllReduce",
    "alltoall": "AlltoAll",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
}
NAMES: Final = {"openmpi": "OpenMPI", "fbgemm": "FBGEMM", "torch": "plain torch", "torchrec": "TorchRec + FBGEMM"}
"""Peers as people write them; others as they are."""

Update = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case beside one peer: the time of the peer / the time of sennit, by rounds."""

    part: str
    case: str
    peer: str
    ratio: float
    """The median."""

    low: float
    """The 10th percentile."""

    high: float
    """The 90th percentile."""

    ours_s: float
    """Median seconds of sennit."""

    @classmethod
    def of(cls, part: str, case: str, peer: str, theirs: Sequence[float], ours: Sequence[float]) -> Self:
        """`theirs`, `ours`: seconds, the same round at the same place."""
        ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
        return cls(
            part=part,
            case=case,
            peer=NAMES.get(peer, peer),
            ratio=statistics.median(ratios),
            low=quantile(ratios, 0.1),
            high=quantile(ratios, 0.9),
            ours_s=statistics.median(ours),
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows of a run, and where it ran."""

    machine: dict[str, Any]
    rows: list[Row]
    absent: dict[str, str]
    """Peer -> why it did not run."""

    def as_json(self) -> dict[str, Any]:
        return {"schema": 1, "machine": self.machine, "rows": [asdict(row) for row in self.rows], "absent": self.absent}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Raises ValueError if it is not what `as_json` gives."""
        try:
            rows = [Row(**row) for row in found["rows"]]
            return cls(machine=dict(found["machine"]), rows=rows, absent=dict(found["absent"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a comparison of sennit bench all: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    rounds: int = 15
    """Turns of each peer."""

    quick: bool = False
    """Small sizes: shows that everything runs, and says little about speed."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"rounds {self.rounds}; allowed: 2 or more, or there is no spread")


def run(settings: Settings, update: Update) -> Comparison:
    """Runs all parts, for minutes. Raises one of `FAILURES` if a part fails or results differ."""
    where, absent = machine.describe(), dict[str, str]()
    parts = (_collectives, _tables, _step)
    rows = [row for part in parts for row in part(settings, absent, update)]
    return Comparison(machine=where, rows=rows, absent=absent)


def _collectives(settings: Settings, absent: dict[str, str], update: Update) -> Iterator[Row]:
    has_openmpi = importlib.util.find_spec("mpi4py") is not None and mpirun() is not None
    mpi = ("openmpi",) if has_openmpi else ()
    if not mpi:
        absent["OpenMPI"] = "not installed: pip install 'sennit[mpi]'"
    small, large = (4 * KIB,), (64 * KIB if settings.quick else 64 * MIB,)
    middle = () if settings.quick else (MIB,)
    # OpenMPI is called without torch, so that sennit is, too.
    for part, transport, ours, peers, sizes in (
        (SHARED, "shm", "sennit", ("gloo",), (*small, *middle, *large)),
        (CORE, "shm", "sennit-core", mpi, (*small, *middle, *large)),
        (LOOPBACK, "udp", "sennit", ("gloo",), large),
    ):
        if not peers:
            continue
        report = collectives.run(
            collectives.Settings(
                transport=transport, ours=ours, against=peers, sizes_bytes=sizes, rounds=settings.rounds
            ),
            lambda what, *_, part=part: update(f"{part}: {what}"),
            has_memory=False,
        )
        for row in report.rows:
            case = f"{TITLES[row.case.collective.value]}, {format_size(row.case.size_bytes)}"
            for peer in report.peers():
                yield Row.of(part, case, peer, row.samples_s[peer], row.samples_s[report.ours])


def _tables(settings: Settings, absent: dict[str, str], update: Update) -> Iterator[Row]:
    results = embedding.run(
        against=("fbgemm", "torch"),
        rounds=settings.rounds,
        seed=1,
        only="fp32, Zipf" if settings.quick else "fp32",
        on_progress=lambda what: update(f"{LOOKUPS}: {what}"),
    )
    for result in results:
        absent.update({NAMES[peer]: why for peer, why in result.absent.items()})
        for peer in result.forward_s:
            if peer != embedding.OURS:
                yield Row.of(LOOKUPS, result.shape.name, peer, result.total_s(peer), result.total_s(embedding.OURS))


def _step(settings: Settings, absent: dict[str, str], update: Update) -> Iterator[Row]:
    update(STEP)
    small: dict[str, int] = {"local_batch": 64, "rows": 1_000, "pooling": 2} if settings.quick else {}
    report = sharded.run(sharded.Settings(rounds=settings.rounds, **small))
    if report.absent is not None:
        absent[NAMES[sharded.TORCHREC]] = report.absent
        return
    ours = report.seconds[sharded.SHARDINGS[0]]
    yield Row.of(STEP, "table-wise", sharded.TORCHREC, report.seconds[sharded.TORCHREC], ours)


FAILURES: Final = (WorkerError, RankFailure, AssertionError)
"""What `run` raises when a part fails."""
