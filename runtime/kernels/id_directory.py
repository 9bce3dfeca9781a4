# SPDX-License-Identifier: Apache-2.0
"""Which row of a dynamic table has which 64-bit id, and what a new row begins with. Native, in host memory.

Docs: docs/decisions/0074-ids-are-numbered-by-their-owner.md.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.checks import check_entries, check_lengths
from sennit.transport.errors import ArgumentError

_COUNT_MAX: Final = (1 << 32) - 1

_Change = tuple[Tensor, Tensor]
"""Rows, and what they had before: int64 [n, 2], or int64 [n], the second words of those that `find` has dated."""

STEPS_MAX: Final = (1 << 32) - 1
"""Training batches that a directory can count."""


class Eviction(Enum):
    """Which rows go when a table is full."""

    LRU = "lru"
    """Those that have not been in a training batch for longest."""

    LFU = "lfu"
    """Those that were looked up least since they were admitted; ties as in LRU."""


_POLICIES: Final = (Eviction.LRU, Eviction.LFU)
"""In the order of the native enumeration."""


class IdDirectory:
    """Rows 0 to n - 1 and their ids. Free rows are taken from the lowest, so rows are a function of the calls.

    Not thread-safe.
    """

    def __init__(self, entries: Tensor) -> None:
        """`entries`: int64 [rows, 2], contiguous, in host memory: the id, and above each other in 64 bits the step in
        which it was last in a training batch (low 32 bits, 0: the row is free) and how often it was looked up. The
        directory changes it. Raises `ArgumentError` if it has an id twice.
        """
        check_entries(entries)
        self.entries = entries
        self._native = self._read()
        self._changes: list[_Change] | None = None
        """What `undo` takes back, in order; None: nobody will ask."""

    def _read(self) -> _kernels.IdDirectory:
        try:
            return _kernels.IdDirectory(self.entries.data_ptr(), len(self.entries))
        except ValueError as error:
            raise ArgumentError(str(error)) from error

    def begin(self) -> None:
        """What changes from now on can be taken back, until `keep` or `undo`."""
        self._changes = []

    def keep(self) -> None:
        """What has changed since `begin` stays."""
        self._changes = None

    def undo(self) -> None:
        """Takes back what has changed since `begin`. Costs a pass over the entries if ids came or went."""
        changes, self._changes = self._changes or [], None
        for rows, before in reversed(changes):
            if before.ndim == 1:
                self._native.undo(rows.data_ptr(), len(rows), before.data_ptr())
            else:
                self.entries[rows] = before
        if any(before.ndim == 2 for _, before in changes):
            self._native = self._read()

    def _changing(self, rows: Tensor) -> None:
        """Remembers entries that are about to change."""
        if self._changes is not None and len(rows):
            self._changes.append((rows, self.entries[rows]))

    @property
    def used(self) -> int:
        """Rows that have ids."""
        return self._native.used

    @property
    def free(self) -> int:
        """Rows that have none."""
        return len(self.entries) - self.used

    @property
    def size_bytes(self) -> int:
        """Memory beside `entries`."""
        return self._native.size_bytes

    @property
    def ids(self) -> Tensor:
        """Int64 [rows]; what free rows have means nothing."""
        return self.entries[:, 0]

    @property
    def last(self) -> Tensor:
        """Int64 [rows]: the step that each row was last looked up in for training; 0: it is free."""
        return steps_of(self.entries)

    @property
    def counts(self) -> Tensor:
        """Int64 [rows]: how often each row was looked up for training."""
        return counts_of(self.entries)

    def find(self, ids: Tensor, step: int = 0, *, once: bool = False) -> tuple[Tensor, int]:
        """Int64 [n], not to be changed: the row of each of `ids`, int64 [n], or -1; and how many have none.

        `step`: that of a training batch, from 1 and rising, which counts and dates the rows. 0: of no training batch.
        `once`: a row counts once in a step, however often it is there.
        """
        ids = ids.contiguous()
        rows, before = torch.empty(len(ids), dtype=torch.int64), None
        if self._changes is not None and step:
            before = torch.empty_like(rows)
            self._changes.append((rows, before))
        address = 0 if before is None else before.data_ptr()
        return rows, self._native.find(ids.data_ptr(), len(ids), rows.data_ptr(), step, once, address)

    def admit(self, ids: Tensor, counts: Tensor, step: int) -> Tensor:
        """Gives rows to `ids`, int64 [n], distinct and none of them known: int64 [n]. `counts`: int32 [n].

        Raises `ArgumentError` if there are fewer free rows.
        """
        if len(ids) > self.free:
            raise ArgumentError(f"{len(ids)} new ids; allowed: {self.free}, the rows that are free")
        ids, counts = ids.contiguous(), counts.to(torch.int32).contiguous()
        rows = torch.empty(len(ids), dtype=torch.int64)
        self._native.admit(ids.data_ptr(), len(ids), counts.data_ptr(), step, rows.data_ptr())
        if self._changes is not None:
            self._changes.append((rows, torch.zeros(len(rows), 2, dtype=torch.int64)))
        return rows

    def count(self, rows: Tensor, counts: Tensor, step: int) -> Tensor:
        """Counts `counts` more for rows in use, each given once, and dates them. Int64 [n]: what they had before."""
        self._changing(rows)
        before = self.counts[rows]
        total = (before + counts).clamp(max=_COUNT_MAX)
        self.entries[rows, 1] = total << 32 | step
        return before

    def victims(self, count: int, policy: Eviction, step: int, scores: Tensor | None = None) -> Tensor:
        """Int64, rising: the `count` rows that go first; fewer if there are no more. None that was in batch `step`
        or a later one.

        `scores`: float64 [rows], in place of `policy`; the lowest go first. Ties go by age, and then by id.
        """
        keys = None if scores is None else scores.to(torch.float64).contiguous()
        address = 0 if keys is None else keys.data_ptr()
        return torch.tensor(self._native.victims(count, _POLICIES.index(policy), step, address), dtype=torch.int64)

    def idle(self, step: int) -> Tensor:
        """Int64 [n], rising: the rows in use that were last in a training batch before `step`."""
        last = self.last
        return ((last > 0) & (last < step)).nonzero().flatten()

    def evict(self, rows: Tensor) -> None:
        """Frees rows, int64 [n], that are in use."""
        self._changing(rows)
        rows = rows.contiguous()
        self._native.evict(rows.data_ptr(), len(rows))


def steps_of(entries: Tensor) -> Tensor:
    """`IdDirectory.last` of these entries."""
    return entries[:, 1] & STEPS_MAX


def counts_of(entries: Tensor) -> Tensor:
    """`IdDirectory.counts` of these entries."""
    return entries[:, 1] >> 32 & _COUNT_MAX


def counted(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids of `values`, int64 [n], rising, and how often each is there, int32."""
    values = values.contiguous()
    ids, counts = torch.empty_like(values), torch.empty(len(values), dtype=torch.int32)
    count = _kernels.counted_ids(values.data_ptr(), len(values), ids.data_ptr(), counts.data_ptr())
    return ids[:count], counts[:count]


def split_ids(lengths: Tensor, values: Tensor, shards: int) -> tuple[Tensor, Tensor]:
    """Deals the ids of bags to row shards by a hash of the id.

    `lengths` [bags] is int32 or int64, `values` int64 [lookups]. Returns lengths, int32 [shards, bags], and the ids: by
    shard, then by bag, in the order of the bag. Raises `ArgumentError` for lengths that do not count the ids.
    """
    lengths, values = lengths.contiguous(), values.contiguous()
    of_shards = torch.empty(shards, len(lengths), dtype=torch.int32)
    dealt = torch.empty_like(values)
    if not _kernels.split_ids(
        (lengths.data_ptr(), lengths.dtype is torch.int64),
        len(lengths),
        values.data_ptr(),
        len(values),
        shards,
        of_shards.data_ptr(),
        dealt.data_ptr(),
    ):
        check_lengths(lengths, len(values))
    return of_shards, dealt


def shards_of_ids(values: Tensor, shards: int) -> Tensor:
    """Int64 [n]: the row shard of each of `values`, int64 [n]."""
    values = values.contiguous()
    found = torch.empty_like(values)
    _kernels.shards_of_ids(values.data_ptr(), len(values), shards, found.data_ptr())
    return found


def initial_rows(ids: Tensor, *, first_column: int, columns: int, seed: int, stream: int, bound: float) -> Tensor:
    """Float32 [ids, columns], uniform in [-bound, bound): a function of `seed`, `stream`, id and column alone.

    `stream`, 32 bits: of the table.
    """
    ids = ids.contiguous()
    rows = torch.empty(len(ids), columns)
    _kernels.initial_rows(ids.data_ptr(), len(ids), first_column, columns, seed, stream, bound, rows.data_ptr())
    return rows
