# SPDX-License-Identifier: Apache-2.0
"""A cache of rows in front of a store: 32 ways, LRU or LFU with ageing.

It fetches the next batch's rows during the current step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.runtime.memory import _memory
from sennit.runtime.memory.layout import Arrays
from sennit.runtime.memory.store import RowStore
from sennit.transport.errors import ArgumentError, TimeoutError

WAYS: Final = 32
NOTE_BYTES: Final = 20
"""Bytes per line of the cache's bookkeeping (`RowCache::Set` in csrc/row_cache.hpp)."""

LOCATION_BYTES: Final = 4
"""Bytes per row of a file, for its position in the log."""

SLOW: Final = "look at the load of the store's disk, or allow longer (timeout_s)"
POLICIES: Final = ("lfu", "lru")
NO_ROWS: Final[NDArray[np.int64]] = np.empty(0, np.int64)


class CachedBatch:
    """The rows of one batch. They stay where they are from `wait` to `release`."""

    def __init__(self, cache: RowCache, native: _memory.Batch) -> None:
        self._cache, self._native = cache, native

    def wait(self, timeout_s: float = 60.0) -> NDArray[np.int64]:
        """int64 [rows]: the line of each row, in the order given to `prefetch`.

        Raises `TimeoutError`; `NoRoom` if they do not fit beside other batches in use. The cache can be used then.
        """
        lines = self._cache.native.wait(self._native, timeout_s)
        if lines is None:
            raise TimeoutError(f"the rows of a batch did not come within {timeout_s:g} s; {SLOW}")
        return lines

    def release(self, *, is_dirty: bool) -> None:
        """Ends the batch. `is_dirty`: its rows were changed, and the cache writes them back before it evicts them."""
        self._cache.native.release(self._native, is_dirty)


class RowCache(Closing):
    """Lines of memory that hold rows of a store.

    A thread of the cache runs prefetches, releases and flushes in the order of the calls. So the place of each row
    depends on that order alone. After an error of the store, every later call raises it again.
    """

    def __init__(
        self,
        store: RowStore,
        *,
        line_count: int,
        spare_count: int = 0,
        policy: str = "lfu",
        arrays: Mapping[str, NDArray[np.generic]] | None = None,
    ) -> None:
        """`line_count`, a multiple of 32, and `spare_count` more for rows whose set is pinned by batches (conflicts).

        `arrays`: memory for the lines, [line_count + spare_count, columns] for each part; allocated where None.
        """
        if line_count < WAYS or line_count % WAYS or spare_count < 0:
            raise ArgumentError(f"{line_count} lines, {spare_count} spare; allowed: multiples of {WAYS}, 0 or more")
        if policy not in POLICIES:
            raise ArgumentError(f"policy {policy!r}; allowed: {', '.join(POLICIES)}")
        self.store, self.line_count, self.policy = store, line_count, policy
        total = line_count + spare_count
        self.arrays: Arrays = dict(arrays) if arrays is not None else store.layout.empty(total)
        """Memory of the lines by part, [line_count + spare_count, columns]. Write only to lines of a batch in use."""
        self.native = _memory.Cache(
            store.native, store.layout.as_bytes(self.arrays, total), line_count // WAYS, spare_count, policy == "lfu"
        )

    def prefetch(self, rows: NDArray[np.int64], begins: NDArray[np.int64] = NO_ROWS) -> CachedBatch:
        """Starts to fetch `rows`, int64 [n], which may repeat, and pins them. Returns at once.

        `begins`, int64 [m]: those of them that the caller gives new values to, in all parts, before anything reads
        them. They are not read from the store. If the batch is released unchanged, the store still has them. No other
        batch may fetch them before.
        """
        return CachedBatch(self, self.native.fetch(rows, begins))

    def read(self, rows: NDArray[np.int64], *, is_between: bool = False, timeout_s: float = 60.0) -> Arrays:
        """The current parts of `rows`, int64 [n], each once, from the cache or the store.

        No batch may be in use, unless the caller knows that no update is under way (`is_between`). Raises
        `TimeoutError`.
        """
        arrays = self.store.layout.empty(len(rows))
        if not self.native.read(rows, self.store.layout.as_bytes(arrays, len(rows)), is_between, timeout_s):
            raise TimeoutError(f"{len(rows)} rows were not read within {timeout_s:g} s; {SLOW}")
        return arrays

    def flush(self, tag: int = 0, *, timeout_s: float = 600.0) -> int:
        """Writes changed rows back and makes them durable as a generation of the store, whose number it returns.

        No batch may be in use. After a `TimeoutError` the generation may still become complete.
        """
        generation = self.native.flush(tag, timeout_s)
        if generation is None:
            raise TimeoutError(f"the generation was not durable within {timeout_s:g} s; {SLOW}")
        return generation

    def set_of(self, row: int) -> int:
        """The set whose 32 lines can hold `row`."""
        return self.native.set_of(row)

    @property
    def counters(self) -> dict[str, int]:
        """`lookups`, repetitions included; per batch and distinct row `hits`, `misses` and `conflicts` (misses that
        took a spare line); `begun`, misses that were not read; `evictions`, `write_backs`.
        """
        return self.native.counters

    def close(self) -> None:
        """Stops the thread. Changed rows that were not flushed are lost."""
        self.native.close()
