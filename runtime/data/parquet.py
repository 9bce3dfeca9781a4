# SPDX-License-Identifier: Apache-2.0
"""Reads Parquet files as a data set, row group by row group, checked against their schema file.

Every error names the file, the column and the row group, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.features import Feature, RawSamples, dense_column, dense_fields, dense_matrix
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
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
    """Reads the schema's columns from all files, in this order. `name` is the name of the data set."""
    groups = [group for file in files for group in _row_groups(file, schema) if len(group.table)]
    if not groups:
        raise DataError(f"{', '.join(str(file) for file in files)}: no rows")
    labels = _labels(groups, schema.label)
    # Without dense columns, a constant column is used: the bottom MLP then learns the tables' common vector.
    dense = [_numbers(groups, part) for part in schema.dense] or [np.ones(len(labels), np.float32)]
    return RawSamples(
        name=name,
        dense=dense_matrix(dense),
        dense_fields=schema.dense or dense_fields(["constant"]),
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


def _labels(groups: list[_RowGroup], name: str) -> npt.NDArray[np.float32]:
    parts = []
    for group in groups:
        column, place = group.table[name], group.place(name)
        if column.null_count:
            raise DataError(f"{place}: {column.null_count} nulls; allowed: none in the label")
        values = np.asarray(column.to_numpy(), dtype=np.float64)
        strange = values[(values != 0) & (values != 1)]
        if len(strange):
            raise DataError(f"{place}: label {strange[0]}; allowed: 0 and 1")
        parts.append(values.astype(np.float32))
    return np.concatenate(parts)


def _numbers(groups: list[_RowGroup], part: DenseField) -> npt.NDArray[np.float32]:
    """The column with NaN for null. A NaN in the file is an error."""
    parts = []
    for group in groups:
        column, place = group.table[part.name].combine_chunks(), group.place(part.name)
        is_null = np.asarray(column.is_null().to_numpy(zero_copy_only=False))
        values = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.float64)
        _check_finite(place, values, values, "value {}; allowed: finite numbers and null")
        made = dense_column(part, values.astype(np.float32))
        _check_finite(place, made, values, "value {}; allowed: what clamp and log1p make a finite float32 of")
        parts.append(np.where(is_null, np.float32(np.nan), made))
    return np.concatenate(parts)


def _check_finite(place: str, made: npt.NDArray[Any], values: npt.NDArray[np.float64], message: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(made))
    if len(wrong):
        raise DataError(f"{place}: {message.format(values[wrong[0]])}")


def _feature(groups: list[_RowGroup], part: SparseField) -> Feature:
    """Reads a column of ids.

    A null list is empty. A null id is a category with a dictionary, and is left out otherwise.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    columns: list[Any] = []
    lengths: list[npt.NDArray[np.int64]] = []
    lists = [hasattr(_column(group, part), "value_lengths") for group in groups]
    for group, is_list in zip(groups, lists, strict=True):
        column, place = _column(group, part), group.place(part.name)
        if is_list != lists[0]:
            raise DataError(f"{place}: {column.type}, but in {groups[0].file} it is {groups[0].table[part.name].type}")
        if is_list:
            counts = np.asarray(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
            # `flatten` yields nothing for null lists, whatever bytes they cover.
            column = column.flatten()
        else:
            counts = np.ones(len(column), np.int64)
        if part.encode != "dictionary" and column.null_count:
            owner = np.repeat(np.arange(len(counts)), counts)
            is_there = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
            counts = np.bincount(owner[is_there], minlength=len(counts))
            column = column.drop_null()
        lengths.append(counts)
        columns.append(_plain(arrow, compute, column))
    kinds = {column.type for column in columns}
    if len(kinds) > 1:
        found = " and ".join(sorted(map(str, kinds)))
        raise DataError(f"{groups[0].place(part.name)}: {found} in one data set; allowed: one type")
    counts = np.concatenate(lengths)
    is_single = not lists[0] and bool((counts == 1).all())
    offsets = None if is_single else np.concatenate([[0], np.cumsum(counts)])
    if part.encode == "dictionary":
        return Feature.categories(part.name, arrow.chunked_array(columns), offsets, first=part.first)
    ids = []
    for group, column in zip(groups, columns, strict=True):
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if part.encode == "id":
            _check_rows(group.place(part.name), part, values)
        # Ids of 2^63 or more are hashed by their bits.
        ids.append(values.astype(np.int64))
    assert part.rows is not None
    return Feature(
        name=part.name,
        row_count=part.rows,
        values=np.concatenate(ids),
        offsets=offsets,
        salt=part.salt if part.encode == "hash" else None,
        first=part.first,
    )


def _column(group: _RowGroup, part: SparseField) -> Any:
    return group.table[part.name].combine_chunks()


def _plain(arrow: Any, compute: Any, column: Any) -> Any:
    """The column without its dictionary, with one type for all integers that fit int64, and one for all text."""
    kind = column.type
    if arrow.types.is_dictionary(kind):
        column = compute.cast(column, kind.value_type)
        kind = column.type
    wide = arrow.large_string() if arrow.types.is_large_string(kind) or arrow.types.is_string(kind) else arrow.int64()
    return column if arrow.types.is_uint64(kind) else compute.cast(column, wide)


def _check_rows(place: str, part: SparseField, values: npt.NDArray[Any]) -> None:
    wrong = values[(values < 0) | (values >= part.rows)]
    if len(wrong):
        raise DataError(f"{place}: row id {int(wrong[0])}; allowed in table {part.name}: [0, {part.rows})")
