# SPDX-License-Identifier: Apache-2.0
"""Columns of Arrow tables as samples, checked against a schema. Files of every format are read through this.

Every error names the file, the column and the part of the file, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sennit.offload.arrow_columns import text_ids
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import NO_DENSE, Feature, RawSamples, dense_column, dense_matrix
from sennit.runtime.data.schema import DenseField, History, Schema, SparseField

_PURPOSE = "a data set of columns"
_NUMBERS = "integer, floating-point, decimal or boolean"


class Place(Protocol):
    """Where some rows are, for messages."""

    @property
    def file_name(self) -> str:
        """The name of the file, as the user would write it."""

    def of(self, column: str) -> str:
        """The place of a column of these rows."""

    def behind(self, rows: int) -> Place:
        """The place of the row that comes so many rows behind the first."""


@dataclass(frozen=True, slots=True)
class PartOfFile:
    """A part of a file."""

    file_name: str
    part: str
    """As "row group 3"."""

    row: int | None = None
    """One row of the part, from 0. None: all rows."""

    def of(self, column: str) -> str:
        return f"{self.file_name}: column {column}, {self.part}{'' if self.row is None else f', row {self.row}'}"

    def behind(self, rows: int) -> PartOfFile:
        return replace(self, row=(self.row or 0) + rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one file."""

    table: Any
    """A `pyarrow.Table` or `pyarrow.RecordBatch` with the columns of the schema, and perhaps others."""

    place: Place

    def column(self, name: str) -> Any:
        """The column as one `pyarrow.Array`."""
        found = self.table[name]
        return found.combine_chunks() if hasattr(found, "combine_chunks") else found

    def error(self, column: str, row: int | np.intp, message: str) -> DataError:
        """What is wrong with one value."""
        return DataError(f"{self.place.behind(int(row)).of(column)}: {message}")


def raw_samples(name: str, pieces: Sequence[Piece], schema: Schema) -> RawSamples:
    """The rows of all pieces, in this order, before preprocessing. `name` is the name of the data set.

    The types are those that `check_types` allows. Raises DataError for values that the schema does not allow.
    """
    labels = labels_of(pieces, schema)
    return RawSamples(
        name=name,
        dense=numbers_of(pieces, schema, schema.dense) if schema.dense else torch.ones(len(labels), 1),
        dense_fields=schema.dense or NO_DENSE,
        labels=labels,
        label_names=schema.labels,
        sample_weights=weights_of(pieces, schema),
        features=tuple(_feature(pieces, part) for part in schema.sparse),
    )


def check_types(file: str, schema: Schema, found: Any) -> None:
    """Raises DataError unless the `pyarrow.Schema` of a file has all columns of the schema, with types that it allows.

    Arrow's type "null", as pandas writes a column of None, is a column of any type whose values are all null.
    """
    types = _types()
    for name in schema.read_columns:
        if (count := found.names.count(name)) != 1:
            what = f"no column {name}; there are" if count == 0 else f"{count} columns {name}; allowed: one. There are"
            raise DataError(f"{file}: {what}: {', '.join(sorted(found.names))}")
    weights = () if schema.sample_weight is None else (schema.sample_weight,)
    for name in (*schema.labels, *weights, *(part.name for part in schema.dense)):
        kind = found.field(name).type
        if not (is_number(kind) or types.is_boolean(kind) or types.is_null(kind)):
            raise DataError(f"{file}: column {name} is {kind}; allowed: {_NUMBERS}")
    for part in schema.sparse:
        kind = found.field(part.name).type
        bag = is_list(kind)
        inner = kind.value_type if bag else kind
        if types.is_dictionary(inner):
            inner = inner.value_type
        text = part.encode not in ("id", "value") and is_text(inner)
        bytes_ = part.encode in ("hash", "dynamic") and is_binary(inner)
        if not (text or bytes_ or types.is_integer(inner) or types.is_null(inner)):
            allowed = {
                "id": "integer or list of integers",
                "value": "integer or list of integers",
                "dictionary": "integer, string, or list of these",
            }.get(part.encode, "integer, string, binary, or list of these")
            if part.encode == "dictionary" and is_binary(inner):
                allowed += '; bytes with encode = "hash" or "dynamic"'
            raise DataError(f"{file}: column {part.name} is {kind}; allowed with encode = {part.encode!r}: {allowed}")
        if part.first is not None and not (bag or types.is_null(kind)):
            raise DataError(f"{file}: column {part.name} is {kind}; allowed with first = {part.first}: lists")
    if schema.history is not None:
        _check_history(file, schema.history, found)
    if schema.group is not None:
        _check_owner(file, schema.group, found, "groups of predictions")


def _check_history(file: str, history: History, found: Any) -> None:
    for name in (*history.columns, *history.past):
        if is_list(kind := found.field(name).type):
            raise DataError(f"{file}: column {name} is {kind}; allowed in a history: one id a row")
    _check_owner(file, history.of, found, "history.of")


def _check_owner(file: str, name: str, found: Any, what: str) -> None:
    """Raises DataError unless a column can say whose each row is."""
    types, kind = _types(), found.field(name).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(inner) or is_text(inner) or is_binary(inner) or types.is_null(inner)):
        raise DataError(f"{file}: column {name} is {kind}; allowed for {what}: integer, string or binary")


# Types that have the same kind of values. Nobody else lists them.


def is_number(kind: Any) -> bool:
    """Whether values of this type of pyarrow are numbers. Booleans are none."""
    types = _types()
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    types = _types()
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: Any) -> bool:
    """Whether values of this type of pyarrow are bytes. As ids they are hashed as text is."""
    types = _types()
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_list(kind: Any) -> bool:
    """Whether values of this type of pyarrow are lists. List views are refused: where a cast to lists gets a slice of
    them, it loses values (pyarrow 26.0).
    """
    types = _types()
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _types() -> Any:
    return require("pyarrow", package="pyarrow", purpose=_PURPOSE).types


def cast_bytes(column: Any, kind: Any) -> Any:
    """A column with another type. What becomes text may be any bytes: they are hashed, and nobody else reads them."""
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    return compute.cast(column, options=compute.CastOptions(kind, allow_invalid_utf8=True))


def numbers_of(pieces: Sequence[Piece], schema: Schema, fields: Sequence[DenseField]) -> Tensor:
    """Float32 [N, fields]: these columns of the schema after their operators, NaN for null. Raises as `raw_samples`."""
    return dense_matrix([_numbers(pieces, part, operates=not schema.has_operated) for part in fields])


def labels_of(pieces: Sequence[Piece], schema: Schema) -> Tensor:
    """Float32 [N], or [N, labels] if the schema has several."""
    by_label = [_labels(pieces, name) for name in schema.labels]
    return torch.from_numpy(by_label[0] if len(by_label) == 1 else np.stack(by_label, 1))


def weights_of(pieces: Sequence[Piece], schema: Schema) -> Tensor | None:
    """Float32 [N], if the schema has a column of weights."""
    return None if schema.sample_weight is None else torch.from_numpy(_weights(pieces, schema.sample_weight))


def _labels(pieces: Sequence[Piece], name: str) -> npt.NDArray[np.float32]:
    parts = []
    for piece in pieces:
        column = piece.column(name)
        if column.null_count:
            raise piece.error(name, _first_null(column), "null; allowed: no nulls in the label")
        values = np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
        strange = np.flatnonzero((values != 0) & (values != 1))
        if len(strange):
            raise piece.error(name, strange[0], f"label {values[strange[0]]}; allowed: 0 and 1")
        parts.append(values.astype(np.float32))
    return np.concatenate(parts)


def _weights(pieces: Sequence[Piece], name: str) -> npt.NDArray[np.float32]:
    parts = []
    for piece in pieces:
        column = piece.column(name)
        if column.null_count:
            raise piece.error(name, _first_null(column), "null; allowed: no nulls in sample_weight")
        values = _float32(np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64))
        strange = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(strange):
            raise piece.error(name, strange[0], f"sample weight {values[strange[0]]}; allowed: 0 or more")
        parts.append(values)
    return np.concatenate(parts)


def _numbers(pieces: Sequence[Piece], part: DenseField, *, operates: bool) -> npt.NDArray[np.float32]:
    """The column with NaN for null. A NaN in the file is an error. `operates`: with the field's operators."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    parts = []
    for piece in pieces:
        # Integers above 2^53 are rounded.
        column = compute.cast(piece.column(part.name), arrow.float64(), safe=False)
        has_nulls = column.null_count > 0
        values = np.asarray((column.fill_null(0) if has_nulls else column).to_numpy(zero_copy_only=False))
        _check_finite(piece, part.name, values, values, "value {}; allowed: finite numbers and null")
        made = _float32(values)
        if operates:
            made = dense_column(part, made)
        _check_finite(
            piece, part.name, made, values, "value {}; allowed: what clamp and log1p make a finite float32 of"
        )
        if has_nulls:
            made = np.where(np.asarray(column.is_null().to_numpy(zero_copy_only=False)), np.float32(np.nan), made)
        parts.append(made)
    return np.concatenate(parts)


def _float32(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Infinite for numbers that are too large, without NumPy's warning: the caller reports them."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _first_null(column: Any) -> int:
    return int(np.flatnonzero(np.asarray(column.is_null().to_numpy(zero_copy_only=False)))[0])


def _check_finite(
    piece: Piece, name: str, made: npt.NDArray[Any], values: npt.NDArray[np.float64], message: str
) -> None:
    is_fine = np.isfinite(made)
    if not is_fine.all():
        wrong = int(np.argmin(is_fine))
        raise piece.error(name, wrong, message.format(values[wrong]))


def _feature(pieces: Sequence[Piece], part: SparseField) -> Feature:
    """Reads a column of ids.

    A null list is empty. A null id is a category with a dictionary, and is left out otherwise.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    # A column of type null is as the others are.
    typed = [piece for piece in pieces if not arrow.types.is_null(piece.column(part.name).type)]
    has_lists = bool(typed) and is_list(typed[0].column(part.name).type)
    columns: list[Any] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for piece in pieces:
        column = piece.column(part.name)
        if arrow.types.is_null(column.type) and has_lists:
            column = arrow.nulls(len(column), arrow.list_(arrow.null()))
        if is_list(column.type) != has_lists:
            raise _two_types(piece, typed[0], part)
        column, counts = _ids(column, has_lists)
        if part.encode != "dictionary" and column.null_count:
            owner = np.repeat(np.arange(len(counts)), counts)
            is_there = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
            counts = np.bincount(owner[is_there], minlength=len(counts))
            column = column.drop_null()
        lengths.append(counts)
        columns.append(column)
    counts = np.concatenate(lengths)
    is_single = not has_lists and bool((counts == 1).all())
    offsets = None if is_single else np.concatenate([[0], np.cumsum(counts)])
    if part.encode == "dictionary":
        categories = arrow.chunked_array(_one_type(pieces, columns, part))
        return Feature.categories(part.name, categories, offsets, first=part.first, min_frequency=part.min_frequency)
    ids = []
    id_type = "int64"
    first: tuple[Piece, bool] | None = None
    for piece, column, of_rows in zip(pieces, columns, lengths, strict=True):
        has_text = is_text(column.type)
        first = first or (None if arrow.types.is_null(column.type) else (piece, has_text))
        # The integer 5 and the text "5" have different hashes.
        if first is not None and first[1] != has_text and not arrow.types.is_null(column.type):
            raise _two_types(piece, first[0], part)
        if has_text:
            id_type = "text"
            ids.append(text_ids(column))
            continue
        if arrow.types.is_uint64(column.type):
            id_type = "uint64"
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if part.encode == "id":
            _check_rows(piece, part, values, of_rows)
        # Of ids of 2^63 or more, the bits count.
        ids.append(values.astype(np.int64))
    return Feature(
        name=part.name,
        # Values have no table. A column of ids needs a number of rows.
        row_count=part.rows or 1,
        values=np.concatenate(ids),
        offsets=offsets,
        salt=part.salt if part.encode == "hash" else None,
        first=part.first,
        is_dynamic=part.encode == "dynamic",
        is_value=part.encode == "value",
        id_type=id_type if part.encode == "dynamic" else "int64",
    )


def _ids(column: Any, has_lists: bool) -> tuple[Any, npt.NDArray[np.int64]]:
    """The ids of one piece without lists and dictionaries, and how many of them each row has.

    All text has one type, and so have all integers but uint64.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    counts = np.ones(len(column), np.int64)
    if has_lists:
        lists = compute.cast(column, arrow.large_list(column.type.value_type))
        counts = np.asarray(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        # `flatten` yields nothing for null lists, whatever bytes they cover. With a slice of lists of nulls, it can end
        # the process (pyarrow 26.0).
        is_typed = not arrow.types.is_null(lists.type.value_type)
        column = lists.flatten() if is_typed else arrow.nulls(int(counts.sum()))
    if arrow.types.is_dictionary(column.type):
        column = compute.cast(column, column.type.value_type)
    if not arrow.types.is_uint64(column.type) and not arrow.types.is_null(column.type):
        has_text = is_text(column.type) or is_binary(column.type)
        column = cast_bytes(column, arrow.large_string() if has_text else arrow.int64())
    return column, counts


def _one_type(pieces: Sequence[Piece], columns: list[Any], part: SparseField) -> list[Any]:
    """The pieces' ids with the one type that has all of them. Nulls have any type."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    found = {column.type for column in columns if not arrow.types.is_null(column.type)}
    if len(found) == 1:
        candidates = list(found)
    else:
        candidates = [] if arrow.large_string() in found else [arrow.int64(), arrow.uint64()]
    for wide in candidates:
        try:
            return [compute.cast(column, wide) for column in columns]
        except arrow.ArrowInvalid:  # negative, or above 2^63 - 1
            continue
    numbers = [number for number, column in enumerate(columns) if column.type in found]
    first = numbers[0]
    other = next(number for number in numbers if columns[number].type != columns[first].type)
    raise _two_types(pieces[other], pieces[first], part)


def _two_types(piece: Piece, first: Piece, part: SparseField) -> DataError:
    kinds = [one.column(part.name).type for one in (piece, first)]
    allowed = "one type; integers with and without sign where int64 or uint64 has them all"
    other = f"but in {first.place.file_name} it is {kinds[1]}"
    return DataError(f"{piece.place.of(part.name)}: {kinds[0]}, {other}; allowed: {allowed}")


def _check_rows(piece: Piece, part: SparseField, values: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> None:
    """`counts`: how many of the values each row has."""
    wrong = np.flatnonzero((values < 0) | (values >= part.rows))
    if len(wrong):
        row = np.searchsorted(np.cumsum(counts), wrong[0], side="right")
        message = f"row id {int(values[wrong[0]])}; allowed in table {part.name}: [0, {part.rows})"
        raise piece.error(part.name, row, message)
