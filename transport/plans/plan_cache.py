# SPDX-License-Identifier: Apache-2.0
"""A cache of compiled and loaded plans, so that a repeated call compiles nothing. Drops the least recently used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from sennit.transport.plans.plan import Plan

Loaded = TypeVar("Loaded")

# Room for several hundred plans of 64 MiB operations.
DEFAULT_LIMIT_BYTES: Final = 16 << 20


class PlanCache(Generic[Loaded]):
    """Keeps the results of `load` for encoded plans, at most `limit_bytes` of encoded plans."""

    def __init__(self, load: Callable[[bytes], Loaded], limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._load = load
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Loaded, int]] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def get(self, key: Hashable, compile_plan: Callable[[], Plan]) -> Loaded:
        """Returns the loaded plan of `key`. Calls `compile_plan` only if the plan is missing."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[0]
        from sennit.transport.plans.plan_codec import encode

        # Compiled without the lock. Two threads may compile the same plan, which only costs time once.
        data = encode(compile_plan())
        loaded = self._load(data)
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                return known[0]
            self._entries[key] = (loaded, len(data))
            self._held_bytes += len(data)
            while self._held_bytes > self._limit_bytes and len(self._entries) > 1:
                _, (_, size_bytes) = self._entries.popitem(last=False)
                self._held_bytes -= size_bytes
        return loaded
