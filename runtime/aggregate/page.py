# SPDX-License-Identifier: Apache-2.0
"""A counter page for an aggregator, read by `sennit top` and `sennit metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from sennit.transport.aggregator import COUNTER_GROUP, AggregatedJob, datagrams
from sennit.transport.counter_page import CounterPage

INTERVAL_S: Final = 0.2
"""Between two updates, at least: a look at all slots of 64 jobs takes some milliseconds."""

Look = Callable[[], tuple[dict[str, int], dict[str, int], list[AggregatedJob]]]
"""Counters of programs and daemon together, those of the programs alone, and jobs."""


class AggregatorPage:
    """The page. Its process is no rank, so it has the world 0."""

    def __init__(self, look: Look, memory_bytes: int) -> None:
        self._look, self._memory_bytes = look, memory_bytes
        self._shown_s = 0.0
        self._page = CounterPage(0, 0)
        self._numbers: Any = None
        self.show()

    def show(self) -> None:
        """Writes the counters, unless that was a moment ago."""
        if (now_s := time.monotonic()) - self._shown_s < INTERVAL_S:
            return
        self._shown_s = now_s
        counters, in_kernel, jobs = self._look()
        shown = {
            "packets": datagrams(counters),
            "packets_in_kernel": datagrams(in_kernel),
            **counters,
            "jobs": len(jobs),
            "slots": sum(job.slots for job in jobs),
            "slots_open": sum(job.slots_open for job in jobs),
            "job_bytes": sum(job.memory_bytes for job in jobs),
            "memory_bytes": self._memory_bytes,
        }
        if self._numbers is None:
            self._numbers = self._page.add(COUNTER_GROUP, [f"{COUNTER_GROUP}_{name}" for name in shown])
        self._numbers[:] = list(shown.values())

    def close(self) -> None:
        self._page.close()
