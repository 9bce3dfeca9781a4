# SPDX-License-Identifier: Apache-2.0
"""Record batches of a stream as samples: what its files hold becomes what a model reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from sennit.offload.arrow_columns import (
    BatchEncoder,
    IdEncoder,
    NumberEncoder,
    TableIds,
    number_encoder,
    vocabulary,
)
from sennit.runtime.data.arrow_columns import Piece, id_type_of, raw_samples
from sennit.runtime.data.column_types import Place, cast, is_binary, is_list, plain
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Encoding, Preprocessing, Scale
from sennit.runtime.data.raw_samples import Feature
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.schema import DenseField, Schema

_PURPOSE: Final = "a stream of record batches"


class Encoder:
    """Encodes the rows of one stream. How a stream is cut into record batches changes no sample.

    Native code encodes all columns in one call. If it meets a value that is not allowed, or a type that it does not
    know, the rows go through `raw_samples` and `Preprocessing.apply`, which define the result and the message.
    """

    def __init__(self, schema: Schema, preprocessing: Preprocessing, types: Any = None, *, hashes: bool = True) -> None:
        """`preprocessing`: fitted to the stream, or of a checkpoint. Raises DataError for one of other features.
        `hashes`: False if somebody else hashes ids, which then stay as they are, int64.

        `types`: a `pyarrow.Schema` with the type of each column of the stream. A file may have a column of type null:
        its nulls are those of the stream's type, so null lists where the others have lists. None: all files have the
        same types.
        """
        if not preprocessing.is_of(schema):
            here = [*map(_named, schema.dense), *(part.name for part in schema.sparse)]
            model = [*(_named(scale.field) for scale in preprocessing.scales)]
            model += [one.name for one in preprocessing.encodings]
            raise DataError(
                f"data with the features {', '.join(here)}; allowed: those of the model, {', '.join(model)}"
            )
        fields = [] if types is None else [types.field(part.name) for part in schema.sparse if part.name in types.names]
        preprocessing.check_schema("data", schema, {field.name: id_type_of(field.type) for field in fields})
        self.schema = schema
        self.preprocessing = preprocessing
        self._types, self._hashes = types, hashes
        self._ids = [_id_encoder(encoding, hashes) for encoding in preprocessing.encodings]
        self._encoder = self._native()
        self._layout: _Layout | None = None

    def _native(self) -> BatchEncoder:
        operates, scales = not self.schema.has_operated, self.preprocessing.scales
        # Without dense columns there is a constant one, which no batch has.
        numbers = [_number_encoder(scale, operates=operates) for scale in scales] if self.schema.dense else []
        return BatchEncoder(numbers, self._ids)

    def scaled(self, scales: tuple[Scale, ...]) -> Encoder:
        """The same with other means and deviations."""
        if scales is self.preprocessing.scales:
            return self
        other = copy.copy(self)
        other.rescale(scales)
        return other

    def rescale(self, scales: tuple[Scale, ...]) -> None:
        """Takes other means and deviations from now on."""
        self.preprocessing = self.preprocessing.scaled(scales)
        self._encoder = self._native()

    def encode(self, batch: Any, place: Place) -> Samples:
        """The rows of a `pyarrow.RecordBatch`: dense features scaled, ids as rows of tables.

        The batch has the columns of the schema, with types that `check_types` allows. `place`: where it is from. Raises
        DataError for a value that the schema does not allow.
        """
        layout = self._layout
        if layout is None or layout.found != batch.schema:
            layout = self._layout = _Layout.of(self.schema, batch.schema, self._types)
        for number, kind in layout.casts:
            batch = batch.set_column(number, batch.schema.names[number], cast(batch.column(number), kind))
        found = self._encoder.encode(
            batch.__arrow_c_array__(), layout.numbers, layout.ids, layout.labels, layout.weight
        )
        if found is None:
            raw = self.preprocessing.apply(raw_samples(place.file_name, [Piece(batch, place)], self.schema))
            return raw.samples(Feature.column if self._hashes else _unhashed)
        dense, labels, weights, ids = found
        return Samples(
            name=place.file_name,
            dense=torch.from_numpy(dense) if self.schema.dense else self._constant(batch.num_rows),
            labels=torch.from_numpy(labels),
            label_names=self.schema.labels,
            sample_weights=None if weights is None else torch.from_numpy(weights),
            columns=tuple(map(_column, self.preprocessing.encodings, ids)),
            dense_names=tuple(scale.field.name for scale in self.preprocessing.scales),
            are_checked=True,
        )

    def encode_lists(self, lists: Mapping[str, Any]) -> dict[int, Column] | None:
        """Columns of a stream as lists of ids, by their numbers among the features; None: `encode` says what is wrong.

        `lists`: for each of these columns a `pyarrow.LargeListArray` of integers or large_string.
        """
        batch = require("pyarrow", package="pyarrow", purpose=_PURPOSE).RecordBatch.from_pydict(dict(lists))
        numbers = [number for number, part in enumerate(self.schema.sparse) if part.name in lists]
        places = [batch.schema.names.index(self.schema.sparse[number].name) for number in numbers]
        native = BatchEncoder([], [self._ids[number] for number in numbers])
        found = native.encode(batch.__arrow_c_array__(), [], places, [], None)
        if found is None:
            return None
        encodings = self.preprocessing.encodings
        return {number: _column(encodings[number], ids) for number, ids in zip(numbers, found[3], strict=True)}

    def _constant(self, rows: int) -> torch.Tensor:
        (scale,) = self.preprocessing.scales
        one = (torch.ones(1, 1, dtype=torch.float64) - scale.mean) / scale.deviation
        return torch.nan_to_num_(one, nan=0.0).to(torch.float32).repeat(rows, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the columns are in batches of one `pyarrow.Schema`."""

    found: Any
    numbers: list[int]
    ids: list[int]
    labels: list[int]
    weight: int | None
    casts: list[tuple[int, Any]]
    """Columns that native code does not read as they are, and the types that it reads."""

    @classmethod
    def of(cls, schema: Schema, found: Any, types: Any) -> Self:
        """`types`: as `Encoder` has them."""
        place = {name: number for number, name in enumerate(found.names)}
        casts = []
        for name in schema.columns:
            kind = own = found.field(place[name]).type
            if str(own) == "null" and types is not None and name in types.names:
                kind = types.field(name).type
            kind = _plain(kind)
            if kind is not own:
                casts.append((place[name], kind))
        return cls(
            found=found,
            numbers=[place[part.name] for part in schema.dense],
            ids=[place[part.name] for part in schema.sparse],
            labels=[place[name] for name in schema.labels],
            weight=None if schema.sample_weight is None else place[schema.sample_weight],
            casts=casts,
        )


def _named(field: DenseField) -> str:
    return field.name if field.running is None else f"{field.name} (running = {field.running})"


def _column(encoding: Encoding, ids: TableIds) -> Column:
    values, offsets = ids
    return Column(
        name=encoding.name,
        row_count=encoding.row_count,
        values=torch.from_numpy(values),
        offsets=None if offsets is None else torch.from_numpy(offsets),
    )


def _unhashed(feature: Feature) -> Column:
    """The ids of a table, which are still to be hashed if they have a salt."""
    return feature.column() if feature.salt is None else feature.unhashed()


def _number_encoder(scale: Scale, *, operates: bool) -> NumberEncoder:
    field = scale.field if operates else DenseField(name=scale.field.name)
    return number_encoder(clamp=field.clamp, log1p=field.log1p, mean=scale.mean, deviation=scale.deviation)


def _id_encoder(encoding: Encoding, hashes: bool) -> IdEncoder:
    known = None
    if encoding.vocabulary is not None:
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        is_text = encoding.vocabulary.dtype == object
        known = vocabulary(arrow.array(encoding.vocabulary, arrow.large_string() if is_text else None))
    if encoding.is_dynamic or encoding.is_value:
        # As ids that somebody else hashes.
        return IdEncoder(rows=encoding.row_count, first=encoding.first, salt=0, vocabulary=None, hashes=False)
    return IdEncoder(rows=encoding.row_count, first=encoding.first, salt=encoding.salt, vocabulary=known, hashes=hashes)


def _plain(kind: Any) -> Any:
    """The type itself if native code reads it, or else one that it reads and that Arrow casts this one to."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    types, kind = arrow.types, plain(kind)
    if is_binary(kind):
        return arrow.large_string()
    if types.is_boolean(kind) or types.is_float16(kind):
        return arrow.float32()
    if types.is_decimal(kind):
        return arrow.float64()
    if is_list(kind):
        inner = kind.value_type
        return kind if _plain(inner) is inner else arrow.large_list(_plain(inner))
    return kind
