# SPDX-License-Identifier: Apache-2.0
"""What each thread of each rank worked on, and what it waited for, moment by moment."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from sennit.runtime.timeline.spans import COLLECTIVE, EXPOSED, MAIN, PHASE, STEP, TASK, WAIT, Span

NOTHING: Final = "nothing recorded"

Key: TypeAlias = tuple[str, int]
"""Group and sequence number of a collective."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread waited."""

    start_ns: int
    end_ns: int
    thread: str = ""
    """The thread of this rank whose task it waited for; of a thread that had no task, the one that then gave it one."""

    collective: Span | None = None
    is_idle: bool = False
    """Whether the thread had no task."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A thread worked on one thing, or waited for one."""

    start_ns: int
    end_ns: int
    what: str | Wait


@dataclass(slots=True)
class Thread:
    """Waits do not overlap, the earliest first. Nor does work, which is named after its innermost span."""

    name: str
    waits: list[Wait] = field(default_factory=list)
    work: list[Piece] = field(default_factory=list)
    _wait_starts: list[int] = field(default_factory=list)
    _work_ends: list[int] = field(default_factory=list)

    def index(self) -> None:
        """Makes the lists that searches use anew. Call it after `waits` or `work` has changed."""
        self._wait_starts = [wait.start_ns for wait in self.waits]
        self._work_ends = [piece.end_ns for piece in self.work]

    def wait_before(self, time_ns: int) -> Wait | None:
        """The last wait that began before this moment."""
        place = bisect.bisect_left(self._wait_starts, time_ns)
        return self.waits[place - 1] if place else None

    def between(self, start_ns: int, end_ns: int) -> Iterator[Piece]:
        """The pieces of the thread's time from start to end, without gaps."""
        if start_ns >= end_ns:
            return
        at = start_ns
        first = self.wait_before(start_ns + 1)
        place = bisect.bisect_right(self._wait_starts, start_ns)
        # (A slice of the list would make the time of all steps grow with the square of the spans.)
        later = (self.waits[number] for number in range(place, len(self.waits)))
        for wait in itertools.chain([first] if first is not None and first.end_ns > start_ns else [], later):
            if wait.start_ns >= end_ns:
                break
            yield from self._worked(at, wait.start_ns)
            at = min(wait.end_ns, end_ns)
            yield Piece(max(wait.start_ns, start_ns), at, wait)
        yield from self._worked(at, end_ns)

    def _worked(self, start_ns: int, end_ns: int) -> Iterator[Piece]:
        at = start_ns
        place = bisect.bisect_right(self._work_ends, start_ns)
        while at < end_ns:
            piece = self.work[place] if place < len(self.work) else None
            if piece is None or piece.start_ns >= end_ns:
                yield Piece(at, end_ns, NOTHING)
                return
            if piece.start_ns > at:
                yield Piece(at, piece.start_ns, NOTHING)
            until = min(piece.end_ns, end_ns)
            yield Piece(max(piece.start_ns, at), until, piece.what)
            at, place = until, place + 1


@dataclass(slots=True)
class RankThreads:
    """The threads of one rank."""

    rank: int
    threads: dict[str, Thread]
    steps: dict[int, Span]
    collectives: list[Span]

    def thread(self, name: str) -> Thread:
        return self.threads.setdefault(name, Thread(name))


def key_of(collective: Span) -> Key | None:
    """The key of a collective, equal on all ranks. None: a message between two ranks."""
    sequence = int(collective.facts["sequence"])
    return (str(collective.facts["group"]), sequence) if sequence else None


def threads_of(spans: Iterable[Span]) -> list[RankThreads]:
    """The ranks in order."""
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind != EXPOSED:
            by_rank[span.rank].append(span)
    return [_rank(rank, found) for rank, found in sorted(by_rank.items())]


def _rank(rank: int, spans: list[Span]) -> RankThreads:
    collectives = [one for one in spans if one.kind == COLLECTIVE]
    known = {key: one for one in collectives if (key := key_of(one)) is not None}
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind != COLLECTIVE:
            tracks[span.track].append(span)
    threads = {}
    for name, found in tracks.items():
        waits = [_wait(one, known) for one in found if one.kind == WAIT]
        if name != MAIN:
            waits += _idle([one for one in found if one.kind == TASK])
        thread = Thread(name, waits=_apart(waits), work=_innermost(one for one in found if one.kind != WAIT))
        thread.index()
        threads[name] = thread
    steps = {int(one.facts["step"]): one for one in spans if one.kind == STEP}
    return RankThreads(rank, threads, steps, collectives)


def _wait(span: Span, known: dict[Key, Span]) -> Wait:
    if "thread" in span.facts:
        return Wait(span.start_ns, span.end_ns, thread=str(span.facts["thread"]))
    # A message between two ranks, or a collective whose span was lost, has no other span than this one.
    key = key_of(span)
    return Wait(span.start_ns, span.end_ns, collective=span if key is None else known.get(key, span))


def _idle(tasks: Iterable[Span]) -> Iterator[Wait]:
    """A thread between two tasks waits until the main thread has the second one for it."""
    end_ns = 0
    for task in sorted(tasks, key=lambda one: one.start_ns):
        submitted_ns = task.start_ns - int(task.facts["queued_ns"])
        if submitted_ns > end_ns:
            yield Wait(end_ns, submitted_ns, thread=MAIN, is_idle=True)
        end_ns = task.end_ns


def _apart(waits: Iterable[Wait]) -> list[Wait]:
    """Times of two clocks overlap by nanoseconds: the earlier wait has them."""
    found: list[Wait] = []
    for wait in sorted(waits, key=lambda one: (one.start_ns, one.end_ns)):
        start_ns = max(wait.start_ns, found[-1].end_ns) if found else wait.start_ns
        if start_ns < wait.end_ns:
            found.append(Wait(start_ns, wait.end_ns, wait.thread, wait.collective, wait.is_idle))
    return found


def _innermost(spans: Iterable[Span]) -> list[Piece]:
    """Flattens spans that lie in each other."""
    found: list[Piece] = []
    open_spans: list[Span] = []
    at = 0

    def until(time_ns: int) -> None:
        nonlocal at
        if open_spans and time_ns > at:
            found.append(Piece(at, time_ns, _title(open_spans[-1])))
        at = max(at, time_ns)

    for span in sorted(spans, key=lambda one: (one.start_ns, -one.end_ns)):
        while open_spans and open_spans[-1].end_ns <= span.start_ns:
            until(open_spans[-1].end_ns)
            open_spans.pop()
        until(span.start_ns)
        open_spans.append(span)
    while open_spans:
        until(open_spans[-1].end_ns)
        open_spans.pop()
    return found


def _title(span: Span) -> str:
    if span.kind == STEP:
        return "rest of the step"
    return span.name if span.kind == PHASE else f"task {span.name}"
