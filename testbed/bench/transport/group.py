# SPDX-License-Identifier: Apache-2.0
"""`sennit bench group`: what it takes to make a group of many ranks, sennit beside gloo, through torch.distributed.

All ranks are processes of this machine. They make a group, sum 4 KiB, and leave it, with one backend after the other.
Each round has new processes, as torchrun starts them (group_rank.py): what they import for the group counts, and
`import torch` does not, though it takes most of the run's time. With `warm`, all rounds are in processes that have
imported everything, as for later groups of a program. A further round counts bytes and memory, and is not timed. Fresh
processes have it behind their first timed one: new ones would have to import torch for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import IO, Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.calibrate import machine
from sennit.runtime.ingest.address import Address
from sennit.runtime.training import launch
from sennit.testbed.bench.ratios import spread
from sennit.testbed.bench.transport import collectives
from sennit.testbed.bench.transport.group_rank import TIMEOUT_S, Turn, result_key, take_turns

OURS: Final = "sennit"
PEERS: Final = (OURS, "gloo")
# The deadline of a round with fresh processes. A processor imports torch for one rank in a second or two.
ROUND_S: Final = 900.0
POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Against:
    """Which backends take turns, and how sennit moves bytes."""

    transport: str = "auto"
    """The value of SENNIT_TRANSPORT."""

    against: tuple[str, ...] = ("gloo",)
    """Peers, from `PEERS`."""

    def __post_init__(self) -> None:
        for peer in self.against:
            if peer not in PEERS:
                raise ValueError(f"peer {peer!r}: known are {', '.join(PEERS)}")

    def peers(self) -> list[str]:
        return list(dict.fromkeys((OURS, *self.against)))

    def environment(self) -> dict[str, str]:
        return collectives.Settings(transport=self.transport).environment()


@dataclass(frozen=True, kw_only=True)
class Settings(Against):
    """What to run."""

    world: int = 64
    """Ranks, all on this machine."""

    rounds: int = 3
    """Timed groups of each peer."""

    warm: bool = False
    """Whether ranks have imported everything before, as for a later group of a program."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one peer."""

    seconds: list[float]
    """Seconds from the first rank's call of `init_process_group` to the end of the last rank's AllReduce, by round."""

    processor_s: list[float]
    """Processor seconds of a rank in that time: the mean of all ranks, by round."""

    read_bytes_a_peer: float
    """Bytes that a rank reads from the store, divided by the number of its peers. The mean of all ranks."""

    memory_bytes: float
    """Bytes of memory that the group adds to a rank, at most, with its share of the segments."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run, with its settings and machine."""

    settings: Settings
    machine: dict[str, object]
    results: dict[str, Result]

    def ratio(self, peer: str) -> float:
        """The median over rounds of peer / sennit."""
        pairs = zip(self.results[peer].seconds, self.results[OURS].seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "results": {
                peer: {**asdict(result), "ratio": self.ratio(peer), "median_s": statistics.median(result.seconds)}
                for peer, result in self.results.items()
            },
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if a sum is wrong."""
    if settings.warm:
        by_rank = launch.run_ranks(_warm_rank, settings, settings.world, timeout_s=TIMEOUT_S)
    else:
        store, address = launch.serve_store(0, timeout_s=TIMEOUT_S)
        rounds = [_fresh_round(settings, number, store, address) for number in range(settings.rounds)]
        by_rank = [list(chain(*turns)) for turns in zip(*rounds, strict=True)]
    results = {}
    for peer in settings.peers():
        # [turn][rank]
        counted, *timed = zip(*([turn for turn in turns if turn.peer == peer] for turns in by_rank), strict=True)
        results[peer] = Result(
            seconds=[max(turn.end_s for turn in ranks) - min(turn.begin_s for turn in ranks) for ranks in timed],
            processor_s=[statistics.mean(turn.processor_s for turn in ranks) for ranks in timed],
            read_bytes_a_peer=statistics.mean(turn.read_bytes for turn in counted) / (settings.world - 1),
            memory_bytes=max(turn.memory_bytes for turn in counted) + _shared_bytes(counted) / settings.world,
        )
    return Report(settings=settings, machine=machine.describe(), results=results)


def _warm_rank(settings: Settings, rank: int, world: int, store: Store) -> list[Turn]:
    os.environ.update(settings.environment())
    peers = settings.peers()
    return [
        turn
        for number in range(settings.rounds + 1)
        for turn in take_turns(peers, rank, world, store, first=number * len(peers), are_counted=number == 0)
    ]


def _fresh_round(settings: Settings, number: int, store: Store, address: Address) -> list[list[Turn]]:
    """The turns of each rank. The peer that begins changes from round to round: it warms the processor's caches."""
    peers = settings.peers()[:: 1 if number % 2 else -1]
    module = [
        sys.executable,
        "-m",
        "sennit.testbed.bench.transport.group_rank",
        address.host,
        str(address.port),
        str(number),
    ]
    shared = {**os.environ, **settings.environment(), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(settings.world)}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(settings.world):
            log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            process = subprocess.Popen(
                [*module, *peers], env={**shared, "RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            stack.callback(_end, process)
            ranks.append((process, log))
        _await(ranks)
    told = (json.loads(store.get(result_key(number, rank))) for rank in range(settings.world))
    return [[Turn(**turn) for turn in turns] for turns in told]


def _await(ranks: Sequence[tuple[subprocess.Popen[bytes], IO[str]]]) -> None:
    """Returns when all have ended well. Raises RankFailure for the first that has not."""
    deadline_s = time.monotonic() + ROUND_S
    running = dict(enumerate(ranks))
    while running:
        for rank, (process, log) in list(running.items()):
            try:
                code = process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline_s:
                    raise launch.RankFailure(f"rank {rank} has not ended within {ROUND_S:.0f} s") from None
                continue
            del running[rank]
            if code != 0:
                log.seek(0)
                said = log.read().strip().splitlines() or [f"status {code}"]
                raise launch.RankFailure(f"rank {rank}: {said[-1]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _shared_bytes(turns: Iterable[Turn]) -> int:
    segments: dict[str, int] = {}
    for turn in turns:
        segments |= turn.segments
    return sum(segments.values())


def render(report: Report, console: Console) -> None:
    """One line per peer: the speed-up of sennit, and what a rank takes."""
    settings = report.settings
    processes = "warm" if settings.warm else "fresh"
    table = Table(
        title=f"a group of {settings.world} ranks on one machine, {processes} processes, transport "
        f"{settings.transport}, {settings.rounds} rounds"
    )
    headings = ("first AllReduce  (p10 – p90)", "processor ms a rank", "store bytes a peer", "MiB a rank")
    for heading in ("peer", f"peer / {OURS}", *headings):
        table.add_column(heading, justify="left" if heading == "peer" else "right", no_wrap=True)
    for peer, result in report.results.items():
        table.add_row(
            peer,
            f"{report.ratio(peer):.2f}",
            spread(result.seconds),
            f"{1e3 * statistics.median(result.processor_s):.0f}",
            f"{result.read_bytes_a_peer:.0f}",
            f"{result.memory_bytes / (1 << 20):.1f}",
        )
    console.print(table)
