# SPDX-License-Identifier: Apache-2.0
"""A feeder's supply of records that has all of them from the beginning."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Hashable

import numpy as np
from numpy.typing import NDArray

from sennit.offload.ingest.protocol import Terms
from sennit.offload.ingest.record_supply import Part
from sennit.offload.record_store import RecordStore


class WholeStore:
    """A `RecordSupply` of one chunk."""

    def __init__(self, store: RecordStore, part_of: Callable[[Terms, int], NDArray[np.int64]]) -> None:
        """`part_of(terms, batch)`: the record numbers of the rank's part."""
        self._store, self._part_of = store, part_of
        self._quiet = socket.socketpair()

    def part(self, terms: Terms, batch: int) -> Part:
        return Part("all", self._part_of(terms, batch))

    def store(self, chunk: Hashable, batch: int) -> RecordStore | None:
        return self._store

    def keep(self, chunks: Collection[Hashable]) -> None:
        pass

    def fileno(self) -> int:
        return self._quiet[0].fileno()

    def receive(self) -> None:
        raise AssertionError("nothing comes")

    def close(self) -> None:
        for end in self._quiet:
            end.close()
