# SPDX-License-Identifier: Apache-2.0
"""`sennit bench group`: what it takes to make a group of many ranks, sennit beside gloo, through torch.distributed.

All ranks are processes of this machine. They make a group, sum 4 KiB, and leave it, with one backend after the other.
The first turn of each backend counts bytes and memory, and is not timed.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sennit.runtime.backend.torch_versions import PrefixStore, Store
from sennit.runtime.training import launch
from sennit.testbed.bench import collectives, machine
from sennit.testbed.bench.report import format_seconds
from sennit.testbed.bench.results import quantile

OURS: Final = "sennit"
PEERS: Final = (OURS, "gloo")
ELEMENTS: Final = 1_024
TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    transport: str = "auto"
    """Value of SENNIT_TRANSPORT."""

    world: int = 64
    """Ranks, all on this machine."""

    against: tuple[str, ...] = ("gloo",)
    """Peers, from `PEERS`."""

    rounds: int = 5
    """Timed groups of each peer."""

    def __post_init__(self) -> None:
        for peer in self.against:
            if peer not in PEERS:
                raise ValueError(f"peer {peer!r}: known are {', '.join(PEERS)}")

    def peers(self) -> list[str]:
        return list(dict.fromkeys((OURS, *self.against)))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One group on one rank. Times are readings of `time.monotonic`, which all ranks share."""

    peer: str
    begin_s: float
    end_s: float
    read_bytes: int
    """What the rank read from the store."""

    memory_bytes: int
    """How much more memory of its own the rank holds than before, without shared memory."""

    segments: dict[int, int]
    """Bytes of the segments that the rank has open in /dev/shm, its own and those of others, by inode."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one peer."""

    seconds: list[float]
    """From the first rank's call of `init_process_group` to the end of the last rank's AllReduce, by round."""

    read_bytes_a_peer: float
    """Bytes that a rank reads from the store, divided by the number of its peers. The mean of all ranks."""

    memory_bytes: float
    """The most that the group adds to a rank, with its share of the segments."""


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


class CountingStore(Store):
    """A rank's view of a store. Counts what is read."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.read_bytes = 0

    def get(self, key: str, /) -> bytes:
        value: bytes = self._store.get(key)
        self.read_bytes += len(value)
        return value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self.read_bytes += sum(map(len, values))
        return values


def _pass_on(name: str) -> Any:
    def method(self: CountingStore, *arguments: Any) -> Any:
        return getattr(self._store, name)(*arguments)

    return method


for _name in ("set", "multi_set", "add", "check", "wait", "compare_set", "delete_key", "append", "has_extended_api"):
    setattr(CountingStore, _name, _pass_on(_name))


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a rank fails, or if a sum is wrong."""
    # The store ends with this object.
    _store, address = launch.serve_store(0, timeout_s=TIMEOUT_S)
    by_rank = launch.run_ranks(_take_turns, settings, settings.world, address=address, store_timeout_s=TIMEOUT_S)
    results = {}
    for peer in settings.peers():
        # [turn][rank]
        counted, *timed = zip(*([turn for turn in turns if turn.peer == peer] for turns in by_rank), strict=True)
        results[peer] = Result(
            seconds=[max(turn.end_s for turn in ranks) - min(turn.begin_s for turn in ranks) for ranks in timed],
            read_bytes_a_peer=statistics.mean(turn.read_bytes for turn in counted) / (settings.world - 1),
            memory_bytes=max(turn.memory_bytes for turn in counted) + _shared_bytes(counted) / settings.world,
        )
    return Report(settings=settings, machine=machine.describe(), results=results)


def _take_turns(settings: Settings, rank: int, world: int, store: Store) -> list[Turn]:
    os.environ.update(collectives.Settings(transport=settings.transport).environment())
    torch.set_num_threads(1)
    turns = []
    for number, peer in enumerate(settings.peers() * (1 + settings.rounds)):
        of_turn = PrefixStore(f"turn-{number}", store)
        is_counted = number < len(settings.peers())
        turns.append(_take_turn(peer, rank, world, of_turn, is_counted=is_counted))
    return turns


def _take_turn(peer: str, rank: int, world: int, store: Store, *, is_counted: bool) -> Turn:
    values = torch.full((ELEMENTS,), float(rank))
    counting = CountingStore(store)
    before_bytes = _anonymous_bytes()
    _meet(store, "begin", world)
    begin_s = time.monotonic()
    dist.init_process_group(
        peer,
        store=counting if is_counted else store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dist.all_reduce(values)
    end_s = time.monotonic()
    memory_bytes = _anonymous_bytes() - before_bytes
    segments = _segments()
    if not bool((values == sum(range(world))).all()):
        raise RuntimeError(f"{peer}: wrong sum")
    _meet(store, "end", world)
    dist.destroy_process_group()
    return Turn(
        peer=peer,
        begin_s=begin_s,
        end_s=end_s,
        read_bytes=counting.read_bytes,
        memory_bytes=memory_bytes,
        segments=segments,
    )


def _meet(store: Store, name: str, world: int) -> None:
    if store.add(name, 1) == world:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def _segments() -> dict[int, int]:
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(link).startswith("/dev/shm/"):
                found = link.stat()
                sizes[found.st_ino] = found.st_blocks * 512
    return sizes


def _shared_bytes(turns: Iterable[Turn]) -> int:
    segments: dict[int, int] = {}
    for turn in turns:
        segments |= turn.segments
    return sum(segments.values())


def render(report: Report, console: Console) -> None:
    """One line per peer: the speed-up of sennit, and what a rank takes."""
    settings = report.settings
    table = Table(
        title=f"a group of {settings.world} ranks on one machine, transport {settings.transport}, "
        f"{settings.rounds} rounds"
    )
    for heading in ("peer", f"peer / {OURS}", "first AllReduce  (p10 - p90)", "store bytes a peer", "MiB a rank"):
        table.add_column(heading, justify="left" if heading == "peer" else "right", no_wrap=True)
    for peer, result in report.results.items():
        table.add_row(
            peer,
            f"{report.ratio(peer):.2f}",
            _spread(result.seconds),
            f"{result.read_bytes_a_peer:.0f}",
            f"{result.memory_bytes / (1 << 20):.1f}",
        )
    console.print(table)


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = (quantile(list(seconds), fraction) for fraction in (0.1, 0.5, 0.9))
    return f"{format_seconds(middle)}  ({format_seconds(low)} - {format_seconds(high)})"
