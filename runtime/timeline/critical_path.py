# SPDX-License-Identifier: Apache-2.0
"""The critical path: the chain of work and transfers of which each link had to end before the next one could begin.

It is walked backwards, from the end of the rank that ends last. Work is followed to the wait before it. A wait for a
task goes on in that task's thread. A wait for a collective is a transfer back to the post of the rank that came last,
and goes on there: this rank waited for that one. If this rank had posted last, it is a transfer back to the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sennit.runtime.timeline.spans import MAIN, Span
from sennit.runtime.timeline.threads import Key, RankThreads, Wait, key_of

WORK: Final = "work"
TRANSFER: Final = "transfer"


@dataclass(frozen=True, slots=True)
class Link:
    """One stretch of the path."""

    start_ns: int
    end_ns: int
    rank: int
    thread: str
    kind: str
    """WORK, or TRANSFER."""

    what: str

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Paths:
    """Walks the paths of a timeline."""

    def __init__(self, ranks: Sequence[RankThreads]) -> None:
        self._ranks = {rank.rank: rank for rank in ranks}
        # For each collective, the span of the rank that came last.
        self._last: dict[Key, Span] = {}
        for rank in ranks:
            for collective in rank.collectives:
                key = key_of(collective)
                if key is not None and (key not in self._last or collective.start_ns > self._last[key].start_ns):
                    self._last[key] = collective

    def of_step(self, step: int) -> list[Link]:
        """The path through one step, without the time in which some rank was still in the step before."""
        parts = [rank.steps[step] for rank in self._ranks.values() if step in rank.steps]
        before = [rank.steps[step - 1].end_ns for rank in self._ranks.values() if step - 1 in rank.steps]
        last = max(parts, key=lambda part: part.end_ns)
        begin = max([min(part.start_ns for part in parts), *before])
        return self.walk(last.rank, MAIN, begin, last.end_ns)

    def walk(self, rank: int, thread: str, begin_ns: int, end_ns: int) -> list[Link]:
        """The path to what this thread has done at the end, the earliest link first."""
        found: list[Link] = []
        at, hops = end_ns, 0

        def link(start_ns: int, kind: str, what: str) -> None:
            nonlocal at, hops
            start_ns = max(start_ns, begin_ns)
            if start_ns < at:
                found.append(Link(start_ns, at, rank, thread, kind, what))
                at, hops = start_ns, 0

        while at > begin_ns:
            one = self._ranks[rank].thread(thread)
            wait = one.wait_before(at)
            worked_from = begin_ns if wait is None else max(begin_ns, min(wait.end_ns, at))
            for piece in reversed(list(one.between(worked_from, at))):
                assert isinstance(piece.what, str)
                link(piece.start_ns, WORK, piece.what)
            if wait is None or at <= begin_ns:
                break
            # A circle of waits means damaged times, or clocks too far apart. The walk then goes on in this thread.
            hops += 1
            is_stuck = hops > len(self._ranks) * 8
            if wait.collective is not None:
                rank, thread = self._through(wait, rank, thread, link, is_stuck)
            elif is_stuck or wait.thread == thread:
                link(wait.start_ns, WORK, f"wait for {wait.thread}")
            else:
                thread = wait.thread
        return found[::-1]

    def _through(
        self, wait: Wait, rank: int, thread: str, link: Callable[[int, str, str], None], is_stuck: bool
    ) -> tuple[int, str]:
        collective = wait.collective
        assert collective is not None
        key = key_of(collective)
        name = collective.name.removeprefix("wait for ")
        last = self._last.get(key) if key is not None else None
        # The root of a broadcast ends before others come: it does not wait for them.
        is_own = last is None or last.rank == rank or not wait.start_ns < last.start_ns < wait.end_ns
        if last is None or is_own or is_stuck:
            link(wait.start_ns, TRANSFER, name)
            return rank, thread
        link(last.start_ns, TRANSFER, name)
        return last.rank, last.track
