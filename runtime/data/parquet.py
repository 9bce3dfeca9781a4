# SPDX-License-Identifier: Apache-2.0
"""Parquet files as a data set: read row group by row group, checked against their schema file.

Every complaint names the file, the column and the row group, and what would have been allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.features import Feature, RawSamples, dense_column, dense_matrix
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.data.samples import vocabulary
from sennit.runtime.data.schema import DenseField, Schema, SparseField

_PURPOSE = "a Parquet data set"
_NUMBERS = "integer, floating-point or boolean"


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: DataFile
    number: int
    table: Any

    def place(self, column: str) -> str:
        return f"{self.file}: column {column}, row group {self.number}"


def load(name: str, files: Sequence[DataFile], schema: Schema) -> RawSamples:
    """Reads the columns that the schema names, of all files, in their order. `name` is what the data set is called."""
    groups = [group for file in files for group in _row_groups(file, schema) if len(group.table)]
    if not groups:
        raise DataError(f"{', '.join(str(file) for file in files)}: no rows")
    labels = _numbers(groups, DenseField(name=schema.label), check=_check_labels)
    # Without dense columns one constant stands in: the bottom MLP then learns the tables' common vector.
    dense = [_numbers(groups, part) for part in schema.dense] or [np.ones(len(labels), np.float32)]
    return RawSamples(
        name=name,
        dense=dense_matrix(dense),
        dense_names=tuple(part.name for part in schema.dense) or ("constant",),
        labels=torch.from_numpy(labels),
        features=tuple(_feature(groups, part) for part in schema.sparse),
    )


def _row_groups(file: DataFile, schema: Schema) -> Iterator[_RowGroup]:
    parquet = require("pyarrow.parquet", package="pyarrow", purpose=_PURPOSE)
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    with file.open() as stream:
        try:
            source = parquet.ParquetFile(stream)
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
        with source:
            _check_types(file, schema, source.schema_arrow, arrow.types)
            for number in range(source.num_row_groups):
                try:
                    table = source.read_row_group(number, columns=schema.columns)
                except (OSError, arrow.ArrowException) as error:
                    raise DataError(f"{file}: row group {number} cannot be read: {error}") from error
                yield _RowGroup(file, number, table)


def _check_types(file: DataFile, schema: Schema, found: Any, types: Any) -> None:
    present = set(found.names)
    for name in schema.columns:
        if name not in present:
            raise DataError(f"{file}: no column {name}; there are: {', '.join(sorted(present))}")
    for name in (schema.label, *(part.name for part in schema.dense)):
        kind = found.field(name).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise DataError(f"{file}: column {name} is {kind}; allowed: {_NUMBERS}")
    for part in schema.sparse:
        kind = found.field(part.name).type
        bag = types.is_list(kind) or types.is_large_list(kind)
        inner = kind.value_type if bag else kind
        if types.is_dictionary(inner):
            inner = inner.value_type
        text = types.is_string(inner) or types.is_large_string(inner)
        if not (types.is_integer(inner) or (part.encode == "dictionary" and text)):
            allowed = "integer or list of integers"
            if part.encode == "dictionary":
                allowed = "integer, string, or list of these"
            raise DataError(f"{file}: column {part.name} is {kind}; allowed with encode = {part.encode!r}: {allowed}")
        if part.first is not None and not bag:
            raise DataError(f"{file}: column {part.name} is {kind}; allowed with first = {part.first}: lists")


Check = Callable[[str, npt.NDArray[np.float64]], None]


def _check_labels(place: str, values: npt.NDArray[np.float64]) -> None:
    strange = values[(values != 0) & (values != 1)]
    if len(strange):
        raise DataError(f"{place}: label {strange[0]}; allowed: 0 and 1")


def _numbers(groups: list[_RowGroup], part: DenseField, check: Check | None = None) -> npt.NDArray[np.float32]:
    parts = []
    for group in groups:
        column, place = group.table[part.name], group.place(part.name)
        if column.null_count:
            raise DataError(f"{place}: {column.null_count} nulls; allowed: none")
        values = np.asarray(column.to_numpy(), dtype=np.float64)
        _check_finite(place, values, values, "value {}; allowed: finite numbers")
        if check is not None:
            check(place, values)
        made = dense_column(part, values.astype(np.float32))
        _check_finite(place, made, values, "value {}; allowed: what clamp and log1p make a finite float32 of")
        parts.append(made)
    return np.concatenate(parts)


def _check_finite(place: str, made: npt.NDArray[Any], values: npt.NDArray[np.float64], message: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(made))
    if len(wrong):
        raise DataError(f"{place}: {message.format(values[wrong[0]])}")


def _feature(groups: list[_RowGroup], part: SparseField) -> Feature:
    ids: list[Any] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for group in groups:
        column, place = group.table[part.name].combine_chunks(), group.place(part.name)
        if column.null_count:
            raise DataError(f"{place}: {column.null_count} nulls; allowed: none (an empty list is an empty bag)")
        is_list = hasattr(column, "value_lengths")
        if group is not groups[0] and is_list != bool(lengths):
            raise DataError(f"{place}: {column.type}, but in {groups[0].file} it is {groups[0].table[part.name].type}")
        if is_list:
            lengths.append(np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64))
            column = column.flatten()
            if column.null_count:
                raise DataError(f"{place}: {column.null_count} nulls inside lists; allowed: none")
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        if part.encode == "dictionary":
            ids.extend(column.to_pylist())
            continue
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if part.encode == "id":
            _check_rows(place, part, values)
        # Ids above 2^63 are hashed by their bits.
        ids.append(values.astype(np.int64))
    row_count, encoded = vocabulary(ids) if part.encode == "dictionary" else (part.rows, np.concatenate(ids))
    assert row_count is not None
    return Feature(
        name=part.name,
        row_count=max(1, row_count),
        values=encoded.astype(np.int64, copy=False),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]) if lengths else None,
        salt=part.salt if part.encode == "hash" else None,
        first=part.first,
    )


def _check_rows(place: str, part: SparseField, values: npt.NDArray[Any]) -> None:
    wrong = values[(values < 0) | (values >= part.rows)]
    if len(wrong):
        raise DataError(f"{place}: row id {int(wrong[0])}; allowed in table {part.name}: [0, {part.rows})")
