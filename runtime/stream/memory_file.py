# SPDX-License-Identifier: Apache-2.0
"""A data set in memory as a stream: a short one. So named data sets and those of users are trained on as files are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import Feature, RawSamples, fingerprint
from sennit.runtime.data.schema import Schema, SparseField, TimeField
from sennit.runtime.stream.files import PIECE_ROWS

_WEIGHT: Final = "sample_weight"
_TIME: Final = "time"
_PURPOSE: Final = "a data set in memory"


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryFile:
    """A `StreamFile` of samples that were loaded. Each rank has its own."""

    name: str
    digest: str
    table: Any
    """A `pyarrow.Table`."""

    is_sequential: bool = False
    skipped_rows: int = 0

    @property
    def schema(self) -> Any:
        return self.table.schema

    @property
    def block_rows(self) -> tuple[int, ...]:
        """Blocks have the size of pieces, so a shuffled order mixes short data sets well."""
        count = len(self.table)
        return tuple(min(PIECE_ROWS, count - begin) for begin in range(0, count, PIECE_ROWS))

    def where(self, block: int, row: int | None = None) -> str:
        return f"samples from {block * PIECE_ROWS}" if row is None else f"sample {block * PIECE_ROWS + row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        rows = self.table.slice(block * PIECE_ROWS + begin, PIECE_ROWS - begin)
        yield from rows.select(list(columns)).combine_chunks().to_batches()

    def span(self, block: int, column: str) -> None:
        """Samples have no statistics."""


def in_memory(raw: RawSamples) -> tuple[MemoryFile, Schema]:
    """The samples as a file, and what its columns mean. Raises DataError for samples that cannot be trained on."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    _check(raw)
    labels = raw.labels.numpy().reshape(len(raw), -1)
    dense = raw.dense.numpy()
    columns = dict(zip(raw.label_names, labels.T, strict=True))
    if raw.sample_weights is not None:
        columns[_WEIGHT] = raw.sample_weights.numpy()
    if raw.times is not None:
        columns[_TIME] = raw.times
    made = {name: arrow.array(np.ascontiguousarray(values)) for name, values in columns.items()}
    for number, part in enumerate(raw.dense_fields):
        made[part.name] = arrow.array(np.ascontiguousarray(dense[:, number]), from_pandas=True)
    made |= {feature.name: _ids(arrow, feature) for feature in raw.features}
    wanted = len(columns) + len(raw.dense_fields) + len(raw.features)
    if len(made) != wanted:
        raise DataError(f"{raw.name}: two columns have one name; allowed: a name for each")
    schema = Schema(
        labels=raw.label_names,
        dense=raw.dense_fields,
        sparse=tuple(_field(feature) for feature in raw.features),
        sample_weight=None if raw.sample_weights is None else _WEIGHT,
        time=None if raw.times is None else TimeField(column=_TIME),
        has_operated=True,
        history=raw.history,
    )
    return MemoryFile(name=raw.name, digest=fingerprint(raw), table=arrow.table(made)), schema


def _check(raw: RawSamples) -> None:
    """Raises DataError for what would be found in the middle of a run: all samples are here, so they are looked at."""
    numbers = torch.nan_to_num(raw.dense, nan=0.0, posinf=torch.inf, neginf=-torch.inf).to(torch.float32)
    replace(raw, dense=numbers, features=tuple(map(_rows, raw.features))).samples()


def _rows(feature: Feature) -> Feature:
    """The feature with rows of a table as ids, where ids are codes or of any size."""
    if feature.dictionary is not None:
        return replace(feature, values=feature.values + 1, dictionary=None, first=None)
    if feature.salt is None and not feature.is_dynamic and not feature.is_value:
        return feature
    return replace(feature, values=feature.values * 0, salt=None, first=None, is_dynamic=False, is_value=False)


def _field(feature: Feature) -> SparseField:
    return SparseField(
        name=feature.name,
        encode=feature.kind,
        rows=None if feature.dictionary is not None or feature.is_value else feature.row_count,
        salt=feature.salt or 0,
        first=feature.first,
        min_frequency=feature.min_frequency,
    )


def _ids(arrow: Any, feature: Feature) -> Any:
    values = arrow.array(feature.values)
    if feature.dictionary is not None:
        # A null has the code -1.
        codes = arrow.array(feature.values, mask=feature.values < 0)
        values = arrow.array(feature.dictionary).take(codes)
    return values if feature.offsets is None else arrow.LargeListArray.from_arrays(feature.offsets, values)
