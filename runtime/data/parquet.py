# SPDX-License-Identifier: Apache-2.0
"""A Parquet file as a data set: read row group by row group, checked against its schema file.

Every complaint names the column and the row group, and what would have been allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.samples import Column, Samples, vocabulary
from sennit.runtime.data.schema import Schema, SparseField

_PURPOSE = "a Parquet data set"
_NUMBERS = "integer, floating-point or boolean"


def load(path: Path, schema: Schema) -> Samples:
    """Reads the columns that the schema names."""
    parquet = require("pyarrow.parquet", package="pyarrow", purpose=_PURPOSE)
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    try:
        source = parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    with source:
        _check_types(path, schema, source.schema_arrow, arrow)
        groups = []
        for number in range(source.num_row_groups):
            try:
                groups.append(source.read_row_group(number, columns=schema.columns))
            except (OSError, arrow.ArrowException) as error:
                raise DataError(f"{path}: row group {number} cannot be read: {error}") from error
    if not groups or not sum(len(group) for group in groups):
        raise DataError(f"{path}: no rows")

    labels = _numbers(path, groups, schema.label)
    strange = np.flatnonzero((labels != 0) & (labels != 1))
    if len(strange):
        row = int(strange[0])
        raise DataError(
            f"{path}: column {schema.label}, row group {_group_of(groups, row)}: label {labels[row]}; allowed: 0 and 1"
        )
    # Without dense columns one constant stands in: the bottom MLP then learns the tables' common vector.
    dense = [_numbers(path, groups, name) for name in schema.dense] or [np.ones(len(labels))]
    return Samples(
        name=path.name,
        dense=torch.from_numpy(np.stack(dense, 1).astype(np.float32)),
        dense_names=schema.dense or ("constant",),
        labels=torch.from_numpy(labels.astype(np.float32)),
        columns=tuple(_column(path, groups, part) for part in schema.sparse),
    )


def _check_types(path: Path, schema: Schema, found: Any, arrow: Any) -> None:
    types = arrow.types
    present = set(found.names)
    for name in schema.columns:
        if name not in present:
            raise DataError(f"{path}: no column {name}; there are: {', '.join(sorted(present))}")
    for name in (schema.label, *schema.dense):
        kind = found.field(name).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise DataError(f"{path}: column {name} is {kind}; allowed: {_NUMBERS}")
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
            raise DataError(f"{path}: column {part.name} is {kind}; allowed with encode = {part.encode!r}: {allowed}")


def _group_of(groups: list[Any], row: int) -> int:
    """The row group that holds a row of the file."""
    return int(np.searchsorted(np.cumsum([len(group) for group in groups]), row, side="right"))


def _numbers(path: Path, groups: list[Any], name: str) -> npt.NDArray[np.float64]:
    parts = []
    for number, group in enumerate(groups):
        column = group[name]
        if column.null_count:
            raise DataError(f"{path}: column {name}, row group {number}: {column.null_count} nulls; allowed: none")
        values = np.asarray(column.to_numpy(), dtype=np.float64)
        if not np.isfinite(values).all():
            wrong = values[~np.isfinite(values)][0]
            raise DataError(f"{path}: column {name}, row group {number}: value {wrong}; allowed: finite numbers")
        parts.append(values)
    return np.concatenate(parts)


def _column(path: Path, groups: list[Any], part: SparseField) -> Column:
    ids: list[Any] = []
    lengths: list[npt.NDArray[np.int64]] = []
    bags = False
    for number, group in enumerate(groups):
        column = group[part.name].combine_chunks()
        where = f"{path}: column {part.name}, row group {number}"
        if column.null_count:
            raise DataError(f"{where}: {column.null_count} nulls; allowed: none (an empty list is an empty bag)")
        if hasattr(column, "value_lengths"):
            bags = True
            lengths.append(np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64))
            column = column.flatten()
            if column.null_count:
                raise DataError(f"{where}: {column.null_count} nulls inside lists; allowed: none")
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        if part.encode == "dictionary":
            ids.extend(column.to_pylist())
            continue
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if part.rows is not None and len(values):
            wrong = values[(values < 0) | (values >= part.rows)]
            if len(wrong):
                raise DataError(f"{where}: row id {int(wrong[0])}; allowed in table {part.name}: [0, {part.rows})")
        ids.append(values.astype(np.int64))
    if part.encode == "dictionary":
        row_count, encoded = vocabulary(ids)
        row_count = max(1, row_count)
    else:
        assert part.rows is not None
        row_count, encoded = part.rows, np.concatenate(ids)
    if bags:
        return Column.bags(part.name, row_count, encoded, np.concatenate(lengths))
    return Column.single(part.name, row_count, encoded)
