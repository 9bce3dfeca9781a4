# SPDX-License-Identifier: Apache-2.0
"""A count-min sketch of the ids in batches: how often each row of an embedding table is used, for sharding planners.

Count-min: Cormode and Muthukrishnan, Journal of Algorithms 55 (2005). All targets fill the same sketch, bit for bit:
the numbers of batch and row say which rows are sampled, and an id alone says which cells count it.
ebpf/include/sketch.h is the same in C.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from sennit.offload import hashing
from sennit.offload.batches import Batch
from sennit.offload.errors import SketchError
from sennit.offload.plan import FeaturePlan

SAMPLE_SEED: Final = 0x53414D504C45
HASH_SEED: Final = 0x534B45544348
# A 64-bit hash holds this many 16-bit fields, one for each line of cells.
DEPTH_MAX: Final = 4
WIDTH_MAX: Final = 1 << 16
ONE_ROW_IN_MAX: Final = 1 << 20
FILE_VERSION: Final = 1
# Rows whose estimates are computed at once.
_CHUNK_ROWS: Final = 1 << 16
_UNKNOWN_ROWS: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchShape:
    """Size and sampling rate of a sketch. Each table has depth * width cells."""

    width: int = 4096
    """Cells per line, a power of two."""

    depth: int = 4
    """Lines. Each id has one cell in every line."""

    one_row_in: int = 64
    """One of this many successive rows is counted: a power of two, 1 counts all rows."""

    def __post_init__(self) -> None:
        for name, value, most in (("width", self.width, WIDTH_MAX), ("one_row_in", self.one_row_in, ONE_ROW_IN_MAX)):
            if not 1 <= value <= most or value & value - 1:
                raise SketchError(f"a sketch with {name} {value}; allowed: powers of two from 1 to {most}")
        if not 1 <= self.depth <= DEPTH_MAX:
            raise SketchError(f"a sketch with depth {self.depth}; allowed: 1 to {DEPTH_MAX}")


DEFAULT_SHAPE: Final = SketchShape()


def sampled_rows(batch: int, rows: int, one_row_in: int) -> NDArray[np.int64]:
    """The counted rows of a batch: one of every `one_row_in` successive rows, drawn by SplitMix64."""
    strata = np.arange(-(-rows // one_row_in), dtype=np.uint64)
    draws = hashing.splitmix64(SAMPLE_SEED, np.uint64((batch & 0xFFFFFFFF) << 32) | strata)
    found = strata * np.uint64(one_row_in) + (draws & np.uint64(one_row_in - 1))
    return found[found < rows].astype(np.int64)


class Sketch:
    """Counts of sampled ids.

    With N sampled ids in a table's sketch, an id's sampled count is never above `estimate / one_row_in`, and below it
    by more than e * N / width with a probability of at most exp(-depth) (Theorem 1 of the paper). Sampling adds a
    relative standard deviation of about sqrt(one_row_in / n) to an id that n rows have.
    """

    def __init__(self, *, tables: Sequence[str], table_rows: Sequence[int | None], shape: SketchShape) -> None:
        self.shape = shape
        self.tables = tuple(tables)
        """The sparse columns of the plan, one for each table."""

        self.table_rows = tuple(table_rows)
        """Rows of each embedding table; None if the plan does not say."""

        self.rows = 0
        """Rows of all batches, sampled or not."""

        self.note = ""
        """A note for readers of these counts. A merge keeps it."""

        self.counts = np.zeros((len(self.tables), shape.depth, shape.width), np.uint64)
        """[T, depth, width]: sampled ids per cell."""

    @classmethod
    def of_plan(cls, plan: FeaturePlan, shape: SketchShape) -> Self:
        return cls(
            tables=[table.column for table in plan.sparse],
            table_rows=[table.rows for table in plan.sparse],
            shape=shape,
        )

    def add(self, plan: FeaturePlan, batch: Batch) -> None:
        """Counts a complete batch of the plan. Call it once per batch."""
        rows = len(batch.labels)
        chosen = sampled_rows(batch.number, rows, self.shape.one_row_in)
        columns = zip(plan.tables, batch.lengths, batch.values, strict=True)
        self.add_sampled(
            [
                ids_of_rows(lengths, values, chosen)
                if table.is_list
                else values.reshape(rows, table.length)[chosen].reshape(-1)
                for table, lengths, values in columns
            ]
        )
        self.rows += rows

    def add_sampled(self, ids: Sequence[NDArray[np.int64]]) -> None:
        """Counts ids of sampled rows, given for each table."""
        if not ids:
            return
        tables = np.repeat(np.arange(len(ids), dtype=np.uint64), [len(column) for column in ids])
        self._count(tables, _cells(np.concatenate(ids), self.shape))

    def _count(self, tables: NDArray[np.uint64], cells: NDArray[np.uint64]) -> None:
        lines = tables * np.uint64(self.shape.depth) + np.arange(self.shape.depth, dtype=np.uint64)[:, None]
        np.add.at(self.counts.reshape(-1), lines * np.uint64(self.shape.width) + cells, np.uint64(1))

    def estimate(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Estimates how often each of these ids [n] occurred in all rows: a multiple of `one_row_in`."""
        counts = self.counts[self._number(table)]
        cells = _cells(np.asarray(ids, np.int64), self.shape).view(np.int64)
        least: NDArray[np.uint64] = counts[0].take(cells[0])
        for line in range(1, self.shape.depth):
            np.minimum(least, counts[line].take(cells[line]), out=least)
        return least * np.uint64(self.shape.one_row_in)

    def hot_rows(self, table: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The `count` most used rows of a table with their estimates; most used first, ties by row number.

        Every row of the table is looked up. Rows that were never sampled are left out, so there may be fewer.
        """
        rows = self.table_rows[self._number(table)]
        if rows is None:
            raise SketchError(f"table {table!r}: the plan does not say how many rows it has (Sparse(rows=...))")
        if count < 1:
            raise SketchError(f"the {count} hottest rows of table {table!r}; allowed: 1 or more")
        hot, estimates = np.empty(0, np.int64), np.empty(0, np.uint64)
        for begin in range(0, rows, _CHUNK_ROWS):
            chunk = np.arange(begin, min(begin + _CHUNK_ROWS, rows))
            found = self.estimate(table, chunk)
            is_used = found > (estimates[-1] if len(estimates) == count else 0)
            hot, estimates = np.concatenate([hot, chunk[is_used]]), np.concatenate([estimates, found[is_used]])
            order = np.lexsort((hot, -estimates.astype(np.int64)))[:count]
            hot, estimates = hot[order], estimates[order]
        return hot, estimates

    def ids_sampled(self, table: str) -> int:
        """N of the error bound: the sampled ids of the table."""
        return int(self.counts[self._number(table), 0].sum())

    def without_noise(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sampled counts of these ids [n], less what other ids put into their cells on average. Sums over ids are
        unbiased.

        Deng and Rafiei, "New estimation algorithms for streaming data: Count-min can do more" (2007), with the mean in
        place of the median. The result for a rare id may be negative.
        """
        counts, width = self.counts[self._number(table)].astype(np.float64), self.shape.width
        cells = _cells(np.asarray(ids, np.int64), self.shape).view(np.int64)
        found: NDArray[np.float64] = np.mean([line.take(cell) for line, cell in zip(counts, cells, strict=True)], 0)
        found = (found * width - counts[0].sum()) / max(width - 1, 1)
        return found

    def stand_out(self, table: str, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids among these [n] of which every cell counts more than usual cells do, and their sampled counts."""
        counts = self.counts[self._number(table)]
        usual = float(np.median(counts))
        found = self.estimate(table, ids) // np.uint64(self.shape.one_row_in)
        is_seen = found > usual + 3 * usual**0.5
        seen = found[is_seen].astype(np.float64)
        # Rare ids are in these cells, too.
        rare = (float(counts[0].sum()) - float(seen.sum())) / max(self.shape.width - len(seen), 1)
        return np.asarray(ids)[is_seen], np.maximum(seen - max(rare, 0.0), 1.0)

    def remove(self, table: str, ids: NDArray[np.int64], counts: NDArray[np.float64]) -> None:
        """Takes distinct ids out again, as often as `counts` says."""
        own = self.counts[self._number(table)]
        for line, cells in zip(own, _cells(np.asarray(ids, np.int64), self.shape).view(np.int64), strict=True):
            taken = np.bincount(cells, counts, self.shape.width).astype(np.uint64)
            line -= np.minimum(line, taken)

    def since(self, earlier: Sketch | None) -> Sketch:
        """What was counted after `earlier`, which is of the same run; None: all of it, in a copy."""
        found = Sketch(tables=self.tables, table_rows=self.table_rows, shape=self.shape)
        found.merge(self)
        if earlier is not None:
            found.counts -= earlier.counts
            found.rows -= earlier.rows
        return found

    def merge(self, other: Sketch) -> None:
        """Adds the counts of another sketch of the same tables and shape, from another rank or run."""
        mine, its = (self.tables, self.table_rows, self.shape), (other.tables, other.table_rows, other.shape)
        if mine != its:
            raise SketchError(f"a sketch of {its} cannot be merged into one of {mine}")
        self.counts += other.counts
        self.rows += other.rows

    def with_open(self, slots: int, count: Callable[[Sketch, int], None]) -> Sketch:
        """A copy of this sketch of released batches, to which `count` has added those in the slots 0 to `slots` - 1."""
        total = Sketch(tables=self.tables, table_rows=self.table_rows, shape=self.shape)
        total.merge(self)
        for slot in range(slots):
            count(total, slot)
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file (docs/reference/feature-plans.md lists its fields)."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                version=np.array(FILE_VERSION),
                tables=np.array(self.tables, dtype=np.str_),
                table_rows=np.array([_UNKNOWN_ROWS if rows is None else rows for rows in self.table_rows], np.int64),
                one_row_in=np.array(self.shape.one_row_in),
                rows=np.array(self.rows),
                note=np.array(self.note, dtype=np.str_),
                counts=self.counts,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote. Raises SketchError for anything else."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                version = int(file["version"])
                if version != FILE_VERSION:
                    raise SketchError(f"{os.fspath(path)}: a sketch of version {version}; allowed: {FILE_VERSION}")
                counts = file["counts"]
                _, depth, width = counts.shape
                made = cls(
                    tables=[str(name) for name in file["tables"]],
                    table_rows=[None if rows == _UNKNOWN_ROWS else int(rows) for rows in file["table_rows"]],
                    shape=SketchShape(width=width, depth=depth, one_row_in=int(file["one_row_in"])),
                )
                made.rows = int(file["rows"])
                made.note = str(file["note"]) if "note" in file else ""
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, SketchError):
                raise
            raise SketchError(f"{os.fspath(path)}: no sketch: {error}") from None
        if counts.shape != made.counts.shape or counts.dtype != made.counts.dtype:
            raise SketchError(f"{os.fspath(path)}: counts {counts.dtype}{counts.shape} of {len(made.tables)} tables")
        made.counts = counts
        return made

    def _number(self, table: str) -> int:
        if table not in self.tables:
            raise SketchError(f"no table {table!r}; known are {', '.join(self.tables)}")
        return self.tables.index(table)


def _cells(ids: NDArray[np.int64], shape: SketchShape) -> NDArray[np.uint64]:
    """[depth, n]: the cell of each id in each line."""
    hashed = hashing.splitmix64(HASH_SEED, ids.view(np.uint64))
    shifts = np.arange(shape.depth, dtype=np.uint64)[:, None] * np.uint64(16)
    cells: NDArray[np.uint64] = hashed >> shifts & np.uint64(shape.width - 1)
    return cells


def ids_of_rows(lengths: NDArray[np.int32], values: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of some rows of a table with varying lengths."""
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[chosen]
    found = lengths[chosen]
    before = np.cumsum(found, dtype=np.int64) - found
    ids: NDArray[np.int64] = values[np.repeat(starts - before, found) + np.arange(found.sum())]
    return ids
