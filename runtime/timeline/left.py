# SPDX-License-Identifier: Apache-2.0
"""Finds what ranks of this host have left of timelines, after errors and kills, and writes it.

A log is *left* when its rank has no lock on it: it has left the block with an error, or died. The last rank of a host
that leaves writes the timeline of all that are left there. Where no rank came to that, `sennit train` does it when its
ranks have ended, and `sennit timeline FILE`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.runtime.timeline import rank_log
from sennit.runtime.timeline.aligned import aligned
from sennit.runtime.timeline.rank_log import PREFIX, RankLog, Recording
from sennit.runtime.timeline.spans import TimelineError
from sennit.runtime.timeline.trace_file import open_new, with_word, write

# Wait this long for locks to go. A rank that dies closes its files one after the other, so peers may hear of its death
# before its lock is gone. Ranks that leave together also find each other's locks.
PATIENCE_S: Final = 1.0
LOOK_S: Final = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A timeline written from the logs that ranks have left."""

    path: Path
    ranks: tuple[int, ...]
    died: tuple[int, ...]
    """The ranks among `ranks` that died: their processes closed no log."""

    def __str__(self) -> str:
        return f"{_ranks(self.ranks)} until the failure" + (f", where {_ranks(self.died)} died" if self.died else "")


def write_left(path: Path, *, token: str = "*") -> Left | None:
    """Writes what the ranks of this host have left of the timeline `path`, if none of them still records.

    Without rank 0 the file gets the host's name, run.HOST.json.gz: rank 0's host has one of its own. Raises OSError if
    it cannot be written; then what is left stays.
    """
    written, deadline_s = None, time.monotonic() + PATIENCE_S
    while True:
        is_done = True
        with _timelines(path, token) as runs:
            for logs in runs:
                # The first log is what processes that would write them take.
                if logs[0].take() and logs[0].is_there and all(log.is_free() for log in logs):
                    written = _write([log.read() for log in logs], path) or written
                    for log in reversed(logs):
                        log.remove()
                else:
                    is_done = False
        if is_done or time.monotonic() > deadline_s:
            return written
        time.sleep(LOOK_S)


def take_left(path: Path) -> list[Recording]:
    """The recordings that ranks of this host have left of the timeline `path`. Each goes to one caller alone."""
    found = []
    with _timelines(path) as runs:
        for log in itertools.chain.from_iterable(runs):
            if log.is_free() and log.take() and log.is_there:
                found.append(log.read())
                log.remove()
    return found


def remove_left(path: Path) -> None:
    """Removes what an earlier run to the same path has left."""
    with _timelines(path) as runs:
        for log in itertools.chain.from_iterable(runs):
            if log.is_free():
                log.remove()


def left_paths() -> set[Path]:
    """The timelines of which ranks of this host have left something, or still record."""
    with _logs() as logs:
        return {log.path for log in logs}


def _write(recordings: Sequence[Recording], path: Path) -> Left | None:
    """Writes the logs of one run; None if they are empty."""
    if all(one.rank for one in recordings):
        path = with_word(path, recordings[0].host)
    with contextlib.suppress(TimelineError):
        return write_recordings(recordings, path)
    return None


def write_recordings(recordings: Sequence[Recording], path: Path) -> Left:
    """Writes what some ranks have left. Raises OSError, and `TimelineError` if there is nothing in it."""
    trace = aligned(recordings)
    write(trace, open_new(path), path)
    return Left(
        path=path,
        ranks=tuple(sorted(one.rank for one in recordings)),
        died=tuple(sorted(one.rank for one in recordings if one.has_died)),
    )


@contextlib.contextmanager
def _timelines(path: Path, token: str = "*") -> Iterator[list[list[RankLog]]]:
    """The logs of the timeline `path`, those of one run together, in the order of ranks. Closes and so unlocks them."""
    with _logs(token) as logs:
        found = defaultdict(list)
        for log in logs:
            if log.path == path.absolute():
                found[log.token].append(log)
        yield [sorted(run, key=lambda log: log.rank) for run in found.values()]


@contextlib.contextmanager
def _logs(token: str = "*") -> Iterator[list[RankLog]]:
    """The logs of this user on this host."""
    with contextlib.ExitStack() as stack:
        found = []
        for file in sorted(rank_log.FOLDER.glob(f"{PREFIX}{token}-*")):
            # The other files belong to another user, are no logs, or were removed meanwhile.
            with contextlib.suppress(OSError, TimelineError):
                found.append(stack.enter_context(contextlib.closing(RankLog.open(file))))
        yield found


def _ranks(ranks: Iterable[int]) -> str:
    numbers = ", ".join(f"{rank}" for rank in ranks)
    return f"rank{'s' if ',' in numbers else ''} {numbers}"
