# SPDX-License-Identifier: Apache-2.0
"""Measures how much time a step spends in each named phase. Each moment of wall clock time counts once.

A phase that begins inside another one pauses it, so the phases of a run add up to its time. A whole phase is not
paused: phases inside it count as part of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class PhaseClock:
    """Seconds by phase. Not thread-safe."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0
        self._is_whole = False

    @contextmanager
    def phase(self, name: str, *, is_whole: bool = False) -> Iterator[None]:
        """Counts the time inside the block to `name`, without the time of inner phases unless it `is_whole`."""
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

    def _credit(self) -> None:
        now = time.perf_counter()
        if self._open:
            current = self._open[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now


def phase(clock: PhaseClock | None, name: str) -> AbstractContextManager[None]:
    """A phase of a clock. Without one nothing is measured."""
    return nullcontext() if clock is None else clock.phase(name)
