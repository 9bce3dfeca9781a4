# SPDX-License-Identifier: Apache-2.0
"""The kinds of work that a placement gives to ranks: rows of the matrix that `cost` adds up."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Kind(IntEnum):
    """What a rank does for its shards. Seconds are those of one thread that nobody disturbs."""

    IDS = 0
    """Seconds to take in ids."""
    IDS_SENT = 1
    """Bytes that come for each sample of any rank."""
    LOOKUP = 2
    """Seconds."""
    SUMS_SENT = 3
    """Bytes that go back for each sample."""
    BAGS = 4
    """Seconds to put sums of a sample together, for each sample of the rank."""
    PACKED = 5
    """Seconds to pack the gradients of a sample."""
    GRADIENTS_SENT = 6
    """Bytes that come for each sample."""
    UPDATE = 7
    """Seconds."""
    ROWS = 8
    """Seconds of the file, if rows are there."""
    MEMORY = 9
    """Bytes, of the tier that tables are in."""
    SUMMED = 10
    """Of replicas: seconds if sums of rows travel."""
    SUMMED_BYTES = 11
    """And the bytes that each rank gives."""
    LISTED = 12
    """Seconds if lookups travel, and their bytes."""
    LISTED_BYTES = 13
    FOUND = 15
    """Bytes that lookups write for a sample."""
    OWN = 14
    """Bytes in the memory of the rank, whatever the tier: replicas, tensor trains, tables whose home is there."""


KINDS: Final = len(Kind)
