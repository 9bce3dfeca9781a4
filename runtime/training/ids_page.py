# SPDX-License-Identifier: Apache-2.0
"""A counter page for the ids of a rank's dynamic tables, read by `sennit top` and `sennit metrics`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.runtime.telemetry.rates import IDS
from sennit.transport.counter_page import CounterPage

INTERVAL_S: Final = 0.2
"""Between two updates, at least: a step may take less than a millisecond."""

Counters = Mapping[str, Mapping[str, int]]
"""`ShardedEmbeddingBags.id_counters`"""


class IdsPage:
    """A counter page beside that of the rank's collectives. Without dynamic tables there is none."""

    def __init__(self, rank: int, world_size: int, counters: Callable[[], Counters]) -> None:
        self._read, self._shown_s = counters, 0.0
        found = counters()
        self._page = CounterPage(rank, world_size) if found else None
        self._tables: dict[str, NDArray[np.uint64]] = {}
        if self._page is not None:
            groups = [_group(name) for name in found]
            for number, (name, counts) in enumerate(found.items()):
                # Names may be equal but for what is no letter.
                group = groups[number] if groups.count(groups[number]) == 1 else f"{IDS}table_{number}"
                self._tables[name] = self._page.add(group, [f"{IDS}{counter}" for counter in counts])

    def show(self) -> None:
        """Writes the counters, unless that was a moment ago."""
        if self._page is not None and (now_s := time.monotonic()) - self._shown_s > INTERVAL_S:
            self._shown_s = now_s
            found = self._read()
            for name, shown in self._tables.items():
                # After a move of shards the rank may have none of a table.
                shown[:] = list(found.get(name, {}).values()) or 0

    def close(self) -> None:
        if self._page is not None:
            self._page.close()


def _group(table: str) -> str:
    return IDS + re.sub(r"[^a-z0-9_]", "_", table.lower())[:48]
