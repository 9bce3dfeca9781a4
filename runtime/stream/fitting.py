# SPDX-License-Identifier: Apache-2.0
"""Fits means, deviations and vocabularies to a stream in one pass over its training rows.

Ranks share the blocks. What a block gives is merged in the order of blocks, so the result has the same bits in any
world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Preprocessing, Scale, encoding_of, frequency_of
from sennit.runtime.data.raw_samples import Feature, RawSamples, Values
from sennit.runtime.data.schema import Schema
from sennit.runtime.stream.index import StreamIndex
from sennit.runtime.stream.order import Interval, Part

Floats = npt.NDArray[np.float64]

Gather = Callable[[Any], list[Any]]
"""What each rank gives -> what all ranks have given, in their order."""


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers each of D columns has, their mean, and the sum of squared distances from it."""

    count: Floats
    mean: Floats
    squares: Floats

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Moments:
        """Of [N, D] numbers. NaN is no number."""
        wide = values.astype(np.float64)
        is_there = ~np.isnan(values)
        if is_there.all():
            # The same sums, without places that count 0.
            mean = wide.sum(0) / max(len(wide), 1)
            wide -= mean
            return cls(np.full(wide.shape[1], float(len(wide))), mean, np.multiply(wide, wide, out=wide).sum(0))
        count = is_there.sum(0).astype(np.float64)
        mean = np.where(is_there, wide, 0.0).sum(0) / np.maximum(count, 1)
        return cls(count, mean, np.where(is_there, (wide - mean) ** 2, 0.0).sum(0))

    def merged(self, other: Moments) -> Moments:
        """Of both. Chan, Golub, LeVeque: Algorithms for computing the sample variance (1983), section 2."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        return Moments(count, self.mean + apart * share, self.squares + other.squares + apart**2 * self.count * share)


class Frequencies:
    """How often each value of a column occurs."""

    def __init__(self) -> None:
        self._parts: list[tuple[Values, npt.NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, values: Values, counts: npt.NDArray[np.int64]) -> None:
        """Values in any order. They may be known already."""
        if len(values):
            self._parts.append((values, counts))
            self._waiting += len(values)
            # Merging costs what all values together cost, so as many new ones are awaited.
            if len(self._parts) > 1 and self._waiting > 2 * len(self._parts[0][0]):
                self.total()

    def total(self) -> tuple[Values, npt.NDArray[np.int64]]:
        """(values in rising order, counts)"""
        if not self._parts:
            return np.empty(0, object), np.empty(0, np.int64)
        if len(self._parts) > 1:
            values, place = np.unique(np.concatenate([part for part, _ in self._parts]), return_inverse=True)
            counts = np.zeros(len(values), np.int64)
            np.add.at(counts, place, np.concatenate([part for _, part in self._parts]))
            self._parts = [(values, counts)]
        self._waiting = 0
        return self._parts[0]


def fit(
    name: str,
    index: StreamIndex,
    schema: Schema,
    part: Part,
    numbers: Interval,
    *,
    min_frequency: int = 1,
    known: Preprocessing | None = None,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = lambda found: [found],
    observe: Callable[[RawSamples], object] = lambda raw: None,
) -> Preprocessing:
    """The preprocessing fitted to these numbers of a part of the stream. Collective, by `gather`.

    `known`: of a model that is trained on (`Preprocessing.fit`). `observe` gets all rows that are read, also those
    of other parts that lie between them. Raises DataError for values that the schema does not allow, on the rank that
    has met them.
    """
    begin, end = part.rows(numbers)
    first, last = index.block_of(begin), index.block_of(end - 1)
    moments: dict[int, Moments] = {}
    frequencies = [Frequencies() for _ in schema.sparse]
    about = _about(name, index, schema)
    for block in range(first + rank, last + 1, world_size):
        block_begin = index.begin_of(block)
        for place, rows in index.read(max(begin, block_begin), min(end, int(index.ends[block])), schema.columns):
            raw = raw_samples(name, [Piece(rows, place)], schema)
            observe(raw)
            row = block_begin + place.row
            is_part = part.has(np.arange(row, row + len(rows)))
            found = Moments.of(raw.dense.numpy()[is_part])
            moments[block] = moments[block].merged(found) if block in moments else found
            for feature, counted in zip(raw.features, frequencies, strict=True):
                _count(feature, is_part, counted)
    every = gather((moments, [counted.total() for counted in frequencies]))
    by_block = dict(sorted(itertools.chain.from_iterable(moments.items() for moments, _ in every)))
    total = _merged(by_block.values(), len(about.dense_fields))
    features = [feature.at_least(min_frequency) for feature in about.features]
    if known is not None:
        known.check_features(replace(about, features=tuple(features)))
    encodings = []
    for number, feature in enumerate(features):
        counted = Frequencies()
        for _, by_rank in every:
            counted.add(*by_rank[number])
        encodings.append(encoding_of(feature, *counted.total(), None if known is None else known.encodings[number]))
    return Preprocessing(
        scales=_scales(about, total) if known is None else known.scales_for(about.dense_fields),
        encodings=tuple(encodings),
    )


def _about(name: str, index: StreamIndex, schema: Schema) -> RawSamples:
    """The features of the stream, without any sample."""
    arrow = require("pyarrow", package="pyarrow", purpose="a stream")
    types = arrow.schema([index.schema.field(column) for column in schema.columns])
    return raw_samples(name, [Piece(arrow.RecordBatch.from_pylist([], schema=types), index.place(0))], schema)


def _count(feature: Feature, is_part: npt.NDArray[np.bool_], counted: Frequencies) -> None:
    if feature.dictionary is None:
        return
    frequency = frequency_of(feature, is_part)
    there = frequency > 0
    counted.add(feature.dictionary[there], frequency[there])


def _merged(parts: Iterable[Moments], columns: int) -> Moments:
    total = Moments(np.zeros(columns), np.zeros(columns), np.zeros(columns))
    for part in parts:
        total = total.merged(part)
    return total


def _scales(about: RawSamples, total: Moments) -> tuple[Scale, ...]:
    deviations = np.sqrt(total.squares / np.maximum(total.count, 1))
    return tuple(
        Scale.of(field, float(mean), float(deviation))
        for field, mean, deviation in zip(about.dense_fields, total.mean, deviations, strict=True)
    )
