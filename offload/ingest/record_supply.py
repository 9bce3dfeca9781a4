# SPDX-License-Identifier: Apache-2.0
"""What a feeder sends from: chunks of records that somebody else makes, in memory that several processes map."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sennit.offload.ingest.protocol import Terms
from sennit.offload.record_store import RecordStore


@dataclass(frozen=True, slots=True)
class Part:
    """The records that one rank has of a batch."""

    chunk: Hashable
    """The chunk that has all of them."""

    records: NDArray[np.int64]
    """Their numbers in the chunk, in the order of the batch's rows."""


class RecordSupply(Protocol):
    """Gives a feeder its records."""

    def part(self, terms: Terms, batch: int) -> Part:
        """Which records the rank of these terms has of a batch. Raises ValueError for a batch that there is not."""

    def store(self, chunk: Hashable, batch: int) -> RecordStore | None:
        """The records of a chunk; None: they were asked for and come later. `batch`: one of the chunk's."""

    def keep(self, chunks: Collection[Hashable]) -> None:
        """Says which chunks are in use. Others may go."""

    def fileno(self) -> int:
        """A descriptor that can be read when something has come."""

    def receive(self) -> None:
        """Takes what has come. Raises FeedError if no more chunks come, which says why."""
