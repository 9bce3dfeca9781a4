# SPDX-License-Identifier: Apache-2.0
"""Columns of Arrow tables as samples, checked against a schema. Files of every format are read through this.

Every error names the file, the column and the part of the file, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sennit.offload.arrow_columns import text_ids
from sennit.offload.columns import INT64_MAX
from sennit.runtime.data.column_types import (
    KEEP_INTEGERS,
    Place,
    arrow_types,
    cast,
    check_names,
    is_binary,
    is_list,
    is_number,
    is_text,
    plain,
)
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import NO_DENSE, Feature, RawSamples, dense_column, dense_matrix
from sennit.runtime.data.schema import DenseField, History, Schema, SparseField

_PURPOSE = "a data set of columns"
_NUMBERS = "integer, floating-point, decimal or boolean"


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

    A column has one type in all pieces (`column_types`), which `check_types` allows. Raises DataError for values that
    the schema does not allow.
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
    types = arrow_types()
    check_names(file, found.names, schema.read_columns)
    weights = () if schema.sample_weight is None else (schema.sample_weight,)
    for name in (*schema.labels, *weights, *(part.name for part in schema.dense)):
        kind = plain(shown := found.field(name).type)
        if not (is_number(kind) or types.is_boolean(kind) or types.is_null(kind)):
            raise DataError(f"{file}: column {name} is {shown}; allowed: {_NUMBERS}")
    for part in schema.sparse:
        kind = plain(shown := found.field(part.name).type)
        bag = is_list(kind)
        inner = plain(kind.value_type) if bag else kind
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
            raise DataError(
                f"{file}: column {part.name} is {shown}; allowed with encode = {part.encode!r}: {allowed}"
                + _remedy(part.name, inner, reads_text=part.encode in ("hash", "dynamic"))
            )
        if part.first is not None and not (bag or types.is_null(kind)):
            raise DataError(f"{file}: column {part.name} is {shown}; allowed with first = {part.first}: lists")
    if schema.history is not None:
        _check_history(file, schema.history, found)
    if schema.group is not None:
        _check_owner(file, schema.group, found, "groups of predictions")


def _check_history(file: str, history: History, found: Any) -> None:
    for name in (*history.columns, *history.past):
        if is_list(plain(kind := found.field(name).type)):
            raise DataError(f"{file}: column {name} is {kind}; allowed in a history: one id a row")
    _check_owner(file, history.of, found, "history.of")


def _check_owner(file: str, name: str, found: Any, what: str) -> None:
    """Raises DataError unless a column can say whose each row is."""
    types, kind = arrow_types(), plain(shown := found.field(name).type)
    if not (types.is_integer(kind) or is_text(kind) or is_binary(kind) or types.is_null(kind)):
        raise DataError(
            f"{file}: column {name} is {shown}; allowed for {what}: integer, string or binary"
            + _remedy(name, kind, reads_text=True)
        )


def _remedy(name: str, kind: Any, *, reads_text: bool) -> str:
    """What to do about a column of ids whose values have this type. `reads_text`: of a text file, it may be text."""
    types = arrow_types()
    if types.is_floating(kind):
        return f"; {KEEP_INTEGERS}"
    if reads_text and (types.is_boolean(kind) or types.is_temporal(kind)):
        return f'; in a text file: types = {{ "{name}" = "string" }} under [text] in the schema'
    return ""


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
    has_lists = is_list(pieces[0].column(part.name).type)
    columns: list[Any] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for piece in pieces:
        column, counts = _ids(piece.column(part.name), has_lists)
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
        categories = arrow.chunked_array(columns)
        return Feature.categories(part.name, categories, offsets, first=part.first, min_frequency=part.min_frequency)
    ids = []
    has_text = is_text(columns[0].type)
    for piece, column, of_rows in zip(pieces, columns, lengths, strict=True):
        if has_text:
            ids.append(text_ids(column))
            continue
        values = np.asarray(column.to_numpy(zero_copy_only=False))
        if wrong := wrong_id(part, values):
            row = np.searchsorted(np.cumsum(of_rows), wrong[0], side="right")
            raise piece.error(part.name, row, wrong[1])
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
        id_type=id_type_of(pieces[0].column(part.name).type) if part.encode in ("hash", "dynamic") else "int64",
    )


def id_type_of(kind: Any) -> str | None:
    """As in `Feature`, of a column of ids with this type of pyarrow."""
    kind = plain(kind)
    if is_list(kind):
        return id_type_of(kind.value_type)
    if arrow_types().is_null(kind):
        return None
    if is_text(kind) or is_binary(kind):
        return "text"
    return "uint64" if arrow_types().is_uint64(kind) else "int64"


def _ids(column: Any, has_lists: bool) -> tuple[Any, npt.NDArray[np.int64]]:
    """The ids of one piece without lists and dictionaries, and how many of them each row has.

    All text has one type, and so have nulls and all integers but uint64.
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
    column = cast(column, plain(column.type))
    if not arrow.types.is_uint64(column.type):
        has_text = is_text(column.type) or is_binary(column.type)
        column = cast(column, arrow.large_string() if has_text else arrow.int64())
    return column, counts


def wrong_id(part: SparseField, values: npt.NDArray[Any]) -> tuple[int, str] | None:
    """(place, what is wrong): the first of these integers that the column may not have."""
    if part.encode == "id":
        wrong = np.flatnonzero((values < 0) | (values >= part.rows))
        what, allowed = "row id", f"in table {part.name}: [0, {part.rows})"
    elif part.encode == "value" and values.dtype == np.uint64:
        # A model reads int64, where it would be a negative one.
        wrong = np.flatnonzero(values > INT64_MAX)
        what, allowed = "value", "with encode = 'value': int64"
    else:
        return None
    return (int(wrong[0]), f"{what} {int(values[wrong[0]])}; allowed {allowed}") if len(wrong) else None
