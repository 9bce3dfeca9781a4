# SPDX-License-Identifier: Apache-2.0
"""Measures how much time a step spends in each named phase. Each moment of wall clock time counts once.

A phase that begins inside another one pauses it, so the phases of a run add up to its time. A whole phase is not
paused: phases inside it count as part of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class PhaseClock:
    """Seconds by phase: `seconds` of the thread that made the clock, and `beside` of other threads."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now`: seconds of the thread that calls it; `time.thread_time` counts processor time in place of time."""
        self._now = now
        self.seconds: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        """Seconds of phases in other threads, while this thread did something else, or waited. A phase that ends inside
        a whole phase of this thread does not count here, because it is part of the whole phase."""
        self._own = threading.get_ident()
        self._lock, self._other = threading.Lock(), threading.local()
        self._open: list[str] = []
        self._since = 0.0
        self._is_whole = False

    @contextmanager
    def phase(self, name: str, *, is_whole: bool = False) -> Iterator[None]:
        """Counts the time inside the block to `name`, without the time of inner phases unless it `is_whole`.

        In other threads a phase inside another one does not count.
        """
        if threading.get_ident() != self._own:
            with self._beside(name):
                yield
            return
        if self._is_whole:
            yield
            return
        self._credit()
        self._open.append(name)
        self._is_whole = is_whole
        try:
            yield
        finally:
            self._credit()
            self._open.pop()
            self._is_whole = False

    @contextmanager
    def _beside(self, name: str) -> Iterator[None]:
        if getattr(self._other, "is_inside", False):
            yield
            return
        since, self._other.is_inside = self._now(), True
        try:
            yield
        finally:
            self._other.is_inside = False
            if not self._is_whole:
                with self._lock:
                    self.beside[name] = self.beside.get(name, 0.0) + self._now() - since

    def _credit(self) -> None:
        now = self._now()
        if self._open:
            current = self._open[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now


def phase(clock: PhaseClock | None, name: str) -> AbstractContextManager[None]:
    """A phase of a clock. Without one nothing is measured."""
    return nullcontext() if clock is None else clock.phase(name)
