# SPDX-License-Identifier: Apache-2.0
"""What the steps really waited for, and so what overlaps hid.

A step that waits for another thread waits for whatever that thread does: its work, or the collective that it waits for
in turn. So each moment of a step counts once: as work of the main thread, or as the one thing that held it up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sennit.runtime.timeline.spans import EXPOSED, MAIN, Span
from sennit.runtime.timeline.threads import NOTHING, Piece, RankThreads, Wait, threads_of

# A chain of waits longer than the number of threads is a circle: the times are damaged.
DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class Reason:
    """What a stretch of a thread's time went into."""

    start_ns: int
    end_ns: int
    thread: str
    """The thread that worked, or that waited for the collective."""

    what: str
    collective: Span | None = None


def reasons(rank: RankThreads, thread: str, start_ns: int, end_ns: int, depth: int = 0) -> Iterator[Reason]:
    """What the thread's time from start to end went into, following its waits into other threads. Without gaps."""
    for piece in rank.thread(thread).between(start_ns, end_ns):
        yield from _reasons_of(rank, thread, piece, depth)


def _reasons_of(rank: RankThreads, thread: str, piece: Piece, depth: int) -> Iterator[Reason]:
    what = piece.what
    if not isinstance(what, Wait):
        yield Reason(piece.start_ns, piece.end_ns, thread, what)
    elif what.collective is not None:
        yield Reason(piece.start_ns, piece.end_ns, thread, _plain(what.collective.name), what.collective)
    elif what.is_idle or depth == DEPTH_MAX or what.thread == thread:
        yield Reason(piece.start_ns, piece.end_ns, thread, NOTHING)
    else:
        yield from reasons(rank, what.thread, piece.start_ns, piece.end_ns, depth + 1)


def _plain(name: str) -> str:
    return name.removeprefix("wait for ")


def exposed(spans: Iterable[Span]) -> list[Span]:
    """The stretches in which a step waited for communication, itself or through another thread: for the file."""
    found = []
    for rank in threads_of(spans):
        for step in rank.steps.values():
            for reason in reasons(rank, MAIN, step.start_ns, step.end_ns):
                if reason.collective is not None:
                    found.append(
                        Span(
                            rank=rank.rank,
                            track=MAIN,
                            kind=EXPOSED,
                            name=reason.what,
                            start_ns=reason.start_ns,
                            end_ns=reason.end_ns,
                            facts={"thread": reason.thread},
                        )
                    )
    return found


@dataclass(slots=True)
class Share:
    """How long something took, all ranks and steps together, and how much of it a step waited for."""

    busy_ns: int = 0
    exposed_ns: int = 0
    count: int = 0
    sent_bytes: int = 0

    @property
    def hidden_ns(self) -> int:
        return max(0, self.busy_ns - self.exposed_ns)


def shares(ranks: Iterable[RankThreads]) -> dict[tuple[str, str], Share]:
    """By (thread, what): of each collective from its post to its end, and of the work of threads beside the main one.

    Collectives have names that begin with "collective ".
    """
    found: dict[tuple[str, str], Share] = defaultdict(Share)
    for rank in ranks:
        if not rank.steps:
            continue
        begin = min(step.start_ns for step in rank.steps.values())
        end = max(step.end_ns for step in rank.steps.values())
        for collective in rank.collectives:
            if begin <= collective.start_ns and collective.end_ns <= end:
                share = found[collective.track, f"collective {collective.name}"]
                share.busy_ns += collective.length_ns
                share.count += 1
                share.sent_bytes += int(collective.facts["sent_bytes"])
        for thread in rank.threads.values():
            if thread.name != MAIN:
                for piece in thread.between(begin, end):
                    if isinstance(piece.what, str) and piece.what != NOTHING:
                        found[thread.name, piece.what].busy_ns += piece.end_ns - piece.start_ns
        for step in rank.steps.values():
            for reason in reasons(rank, MAIN, step.start_ns, step.end_ns):
                name = reason.what if reason.collective is None else f"collective {reason.what}"
                if reason.thread != MAIN or reason.collective is not None:
                    found[reason.thread, name].exposed_ns += reason.end_ns - reason.start_ns
    return {key: share for key, share in found.items() if share.busy_ns}
