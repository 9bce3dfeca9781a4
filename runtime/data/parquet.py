# SPDX-License-Identifier: Apache-2.0
"""Reads Parquet files as a data set, row group by row group, checked against their schema file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sennit.runtime.data.arrow_columns import PartOfFile, Piece, check_types, raw_samples
from sennit.runtime.data.column_types import Found, outside, type_of_all, typed
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.schema import Schema

_PURPOSE = "a Parquet data set"


def load(name: str, files: Sequence[DataFile], schema: Schema, evaluation: Sequence[DataFile] = ()) -> RawSamples:
    """Reads the schema's columns from all files, in this order. `name` is the name of the data set.

    `evaluation`: files of rows for evaluation alone, which come last.
    """
    groups, held_back = _groups(files, schema), _groups(evaluation, schema) if evaluation else []
    raw = raw_samples(name, _of_one_type(groups + held_back, schema), schema)
    return replace(raw, eval_rows=sum(len(group.table) for group in held_back)) if evaluation else raw


def _groups(files: Sequence[DataFile], schema: Schema) -> list[Piece]:
    groups = [group for file in files for group in _row_groups(file, schema) if len(group.table)]
    if not groups:
        raise DataError(f"{', '.join(str(file) for file in files)}: no rows")
    return groups


def _of_one_type(groups: Sequence[Piece], schema: Schema) -> list[Piece]:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)

    def column_of_all(name: str) -> list[Any]:
        columns = [group.column(name) for group in groups]

        def find(number: int) -> Found | None:
            found = outside(columns[number])
            return None if found is None else (groups[number].place.behind(found[0]), found[1])

        kinds = [(group.place.file_name, column.type) for group, column in zip(groups, columns, strict=True)]
        kind = type_of_all(name, kinds, schema.encodings, find)
        return [
            typed(name, column, kind, schema.encodings, group.place)
            for group, column in zip(groups, columns, strict=True)
        ]

    made = [column_of_all(name) for name in schema.columns]
    return [
        Piece(arrow.table(list(columns), names=schema.columns), group.place)
        for *columns, group in zip(*made, groups, strict=True)
    ]


def _row_groups(file: DataFile, schema: Schema) -> Iterator[Piece]:
    parquet = require("pyarrow.parquet", package="pyarrow", purpose=_PURPOSE)
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    with file.open() as stream:
        try:
            source = parquet.ParquetFile(stream)
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
        with source:
            check_types(file.name, schema, source.schema_arrow)
            for number in range(source.num_row_groups):
                try:
                    table = source.read_row_group(number, columns=schema.columns)
                except (OSError, arrow.ArrowException) as error:
                    raise DataError(f"{file}: row group {number} cannot be read: {error}") from error
                yield Piece(table, PartOfFile(file.name, f"row group {number}"))
