# SPDX-License-Identifier: Apache-2.0
"""How often the rows of a table are used: in each row shard, rows in classes of like frequency.

From that follow the ids that a shard gets of a batch, and how many distinct rows they name. A row with the share p of a
table's ids is among n of them with the chance 1 - exp(-n p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sennit.offload.errors import SketchError
from sennit.offload.sketch import Sketch
from sennit.runtime.kernels.id_directory import shards_of_ids
from sennit.runtime.kernels.spec import MAX_ROW_COUNT
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError

ZIPF: Final = 1.0
"""Zipf's exponent that is assumed for rows that nobody has counted."""

# Rows whose estimates are computed at once.
_ROWS_AT_ONCE: Final = 1 << 18
# A table with fewer rows for each id of a sample has a counter for each row.
_COUNTERS_EACH: Final = 16
_SAMPLE_SEED: Final = 16
# Rows of one class differ in frequency by less than this factor.
_CLASS_RATIO: Final = 1.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one table. Classes of all row shards, one shard after the other."""

    mean_length: float
    """Ids a sample and feature."""
    shard: npt.NDArray[np.int64]
    """The row shard of each class."""
    rows: Floats
    """Rows of each class."""
    mass: Floats
    """Each class's share of the table's ids."""

    def shares(self, row_shards: int) -> Floats:
        """The share of each row shard, [row_shards]; together 1."""
        return np.bincount(self.shard, self.mass, row_shards).astype(np.float64)

    def distinct(self, ids: float, row_shards: int) -> Floats:
        """Distinct rows that `ids` ids of the whole table name in each row shard."""
        named = self.rows * -np.expm1(-ids * self.mass / np.maximum(self.rows, 1e-300))
        return np.bincount(self.shard, named, row_shards).astype(np.float64)


def assumed(table: Table, mean_length: float, exponent: float = ZIPF) -> Use:
    """Zipf's law, with the frequent rows spread evenly over row shards, as hashes spread them. 0: uniform."""
    edges = np.unique(np.round(np.geomspace(1, table.rows + 1, max(2, int(np.log(table.rows + 1) / np.log(1.5)) + 2))))
    # The integral of x^-exponent over each class.
    if exponent == 0:
        weight = np.diff(edges)
    elif abs(exponent - 1) < 1e-9:
        weight = np.diff(np.log(edges))
    else:
        weight = np.diff(edges ** (1 - exponent)) / (1 - exponent)
    parts = min(table.row_shards, 1 << 12)
    rows, mass = np.diff(edges) / parts, weight / weight.sum() / parts
    return Use(
        mean_length,
        np.repeat(np.arange(parts), len(rows)),
        np.tile(rows, parts),
        np.tile(mass, parts),
    )


def counted(table: Table, mean_length: float, ids: Any) -> Use:
    """From a sample of ids, any array of integers in [0, rows). Without ids: `assumed`."""
    ids = np.asarray(ids)
    if not len(ids):
        return assumed(table, mean_length)
    if table.ids is not None:
        # Rows by a hash of the id, which is how ids get their row shards.
        ids = shards_of_ids(torch.from_numpy(ids.astype(np.int64)), min(table.rows, MAX_ROW_COUNT)).numpy()
    if table.rows <= _COUNTERS_EACH * len(ids):
        # `bincount` and not `unique`, because sorting takes ten times as long.
        all_counts = np.bincount(ids, minlength=table.rows)
        values = np.flatnonzero(all_counts)
        return weighed(table, mean_length, values, all_counts[values])
    return weighed(table, mean_length, *np.unique(ids, return_counts=True))


def sampled(ids: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most `count` of the ids, in their order, from all of them alike: data are often sorted by time.

    One of each of `count` parts of equal size, drawn with a fixed seed, so that no period in the data is met.
    """
    if len(ids) <= count:
        return ids
    draws = np.random.default_rng(_SAMPLE_SEED).random(count)
    return ids[((np.arange(count) + draws) * (len(ids) / count)).astype(np.int64)]


def weighed(table: Table, mean_length: float, rows: Any, counts: Any) -> Use:
    """From how often each of some distinct rows was used."""
    rows, counts = np.asarray(rows, np.int64), np.asarray(counts, np.float64)
    borders = np.asarray(table.row_borders)
    shard = np.searchsorted(borders, rows, side="right") - 1
    shard, rows_of_class, of_class = _classed(shard, counts / counts.sum())
    return Use(mean_length, shard, rows_of_class, of_class)


def sketched(table: Table, sketch: Sketch) -> Use:
    """From the sketch of its ids, by the table's name. Looks at every row; without ids: `assumed`.

    Rows that stand out are counted by themselves. The others of a row shard share equally what is left of it.
    """
    sampled = sketch.ids_sampled(table.name)
    mean_length = sampled * sketch.shape.one_row_in / max(sketch.rows, 1) / len(table.features)
    if not sampled or table.ids is not None:
        # Nobody lists the ids of a dynamic table, so nobody can ask a sketch for them.
        return assumed(table, mean_length)
    borders = np.asarray(table.row_borders)
    chunks = [np.arange(low, min(low + _ROWS_AT_ONCE, table.rows)) for low in range(0, table.rows, _ROWS_AT_ONCE)]
    found = [sketch.stand_out(table.name, rows) for rows in chunks]
    seen, counts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    shard_of_seen = np.searchsorted(borders, seen, side="right") - 1
    left = sketch.since(None)
    left.remove(table.name, seen, counts)
    rest = np.zeros(table.row_shards)
    for rows, (here, _) in zip(chunks, found, strict=True):
        noise = left.without_noise(table.name, rows)
        noise[here - rows[0]] = 0
        rest += np.bincount(np.searchsorted(borders, rows, side="right") - 1, noise, table.row_shards)
    rare = np.diff(borders) - np.bincount(shard_of_seen, minlength=table.row_shards)
    rest = np.where(rare > 0, np.maximum(rest, 0), 0)
    # What is left is known better in all than by shard.
    rest = rest if rest.any() else rare.astype(np.float64)
    rest *= max(sampled - counts.sum(), 0) / max(rest.sum(), 1.0 / _ROWS_AT_ONCE)
    there = np.flatnonzero(rare)
    shard, rows_of_class, of_class = _classed(shard_of_seen, counts)
    mass = np.concatenate([of_class, rest[there]])
    return Use(
        mean_length,
        np.concatenate([shard, there]),
        np.concatenate([rows_of_class, rare[there]]).astype(np.float64),
        mass / mass.sum(),
    )


def saved(tables: Sequence[Table], path: Path) -> list[Use]:
    """From the file of a sketch that a run wrote (`sennit train --sketch`). Raises `ConfigError`."""
    try:
        sketch = Sketch.load(path)
    except OSError as error:
        raise ConfigError(f"--use {path}: {error.strerror}") from None
    except SketchError as error:
        raise ConfigError(f"--use {error}") from None
    for table in tables:
        if table.name not in sketch.tables:
            raise ConfigError(f"--use {path}: no table {table.name}; it has {', '.join(sketch.tables)}")
        rows = sketch.table_rows[sketch.tables.index(table.name)]
        if rows is not None and rows != table.rows:
            raise ConfigError(f"--use {path}: table {table.name} has {rows} rows there, and {table.rows} here")
    return [sketched(table, sketch) for table in tables]


def _classed(shard: npt.NDArray[np.int64], counts: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Rows of one shard and like counts together: the shard of each class, its rows, and the sum of their counts."""
    level = np.floor(np.log(np.maximum(counts, 1e-300)) / np.log(_CLASS_RATIO)).astype(np.int64)
    key = shard * (1 << 20) + level - level.min(initial=0)
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    of_class = np.bincount(place, counts, len(first)).astype(np.float64)
    return shard[first], np.bincount(place, minlength=len(first)).astype(np.float64), of_class


def uses(
    tables: Sequence[Table], lengths: Sequence[float], samples: Sequence[Any] | None, exponent: float
) -> list[Use]:
    """The use of all tables. `samples`: ids of each table, if there is data."""
    if samples is None:
        return [assumed(table, length, exponent) for table, length in zip(tables, lengths, strict=True)]
    return [counted(table, length, ids) for table, length, ids in zip(tables, lengths, samples, strict=True)]
