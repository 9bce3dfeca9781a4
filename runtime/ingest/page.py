# SPDX-License-Identifier: Apache-2.0
"""A counter page for a rank's ingest, read by `sennit top` and `sennit metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sennit.transport.counter_page import CounterPage

GROUP: Final = "ingest"
PREFIX: Final = "ingest_"


class IngestPage:
    """A counter page beside that of the rank's collectives."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._page = CounterPage(rank, world_size)
        self._names: tuple[str, ...] = ()

    def show(self, counted: Mapping[str, int | float]) -> None:
        """Writes the counters, always with the same names.

        Seconds become microseconds, because counters are integers.
        """
        if not self._names:
            self._names = tuple(counted)
            self._counters = self._page.add(GROUP, [_shown_name(name) for name in counted])
        self._counters[:] = [
            int(1e6 * counted[name]) if name.endswith("_s") else int(counted[name]) for name in self._names
        ]

    def close(self) -> None:
        self._page.close()


def _shown_name(name: str) -> str:
    return PREFIX + (f"{name[:-1]}us" if name.endswith("_s") else name)
