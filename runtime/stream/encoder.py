# SPDX-License-Identifier: Apache-2.0
"""Record batches of a stream as samples: what its files hold becomes what a model reads."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from sennit.offload.arrow_columns import IdEncoder, number_encoder, vocabulary
from sennit.runtime.data.arrow_columns import Piece, Place, labels_of, raw_samples, weights_of
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Encoding, Preprocessing
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.schema import Schema

_PURPOSE: Final = "a stream of record batches"


class Encoder:
    """Encodes the rows of one stream. How a stream is cut into record batches changes no sample.

    Native code encodes a column at a time. Where it does not know a type or meets a value that is not allowed, the rows
    go through `raw_samples` and `Preprocessing.apply`, which define the result and the message.
    """

    def __init__(self, schema: Schema, preprocessing: Preprocessing, types: Any = None) -> None:
        """`preprocessing`: fitted to the stream, or taken from a checkpoint.

        `types`: a `pyarrow.Schema` with the type of each column of the stream. A file may have a column of type null:
        its nulls are those of the stream's type, so null lists where the others have lists. None: all files have the
        same types.
        """
        self.schema = schema
        self.preprocessing = preprocessing
        self._types = types
        self._numbers = [
            number_encoder(clamp=scale.field.clamp, log1p=scale.field.log1p, mean=scale.mean, deviation=scale.deviation)
            for scale in preprocessing.scales
        ]
        self._ids = [_id_encoder(encoding) for encoding in preprocessing.encodings]

    def encode(self, batch: Any, place: Place) -> Samples:
        """The rows of a `pyarrow.RecordBatch`: dense features scaled, ids as rows of tables.

        The batch has the columns of the schema, with types that `check_types` allows. `place`: where it is from. Raises
        DataError for a value that the schema does not allow.
        """
        piece = Piece(self._typed(batch), place)
        dense, columns = self._dense(piece), self._columns(piece)
        if dense is None or columns is None:
            return self.preprocessing.apply(raw_samples(place.file_name, [piece], self.schema)).samples()
        return Samples(
            name=place.file_name,
            dense=dense,
            labels=labels_of([piece], self.schema),
            label_names=self.schema.labels,
            sample_weights=weights_of([piece], self.schema),
            columns=columns,
            dense_names=tuple(scale.field.name for scale in self.preprocessing.scales),
        )

    def _typed(self, batch: Any) -> Any:
        """The batch with columns of type null as the stream has them."""
        if self._types is None:
            return batch
        for number, field in enumerate(batch.schema):
            kind = self._types.field(field.name).type if field.name in self._types.names else field.type
            if str(field.type) == "null" != str(kind):
                batch = batch.set_column(number, field.name, batch.column(number).cast(kind))
        return batch

    def _dense(self, piece: Piece) -> torch.Tensor | None:
        rows = piece.table.num_rows
        dense = torch.empty(rows, len(self._numbers))
        if not self.schema.dense:
            columns = [require("pyarrow", package="pyarrow", purpose=_PURPOSE).array(np.ones(rows, np.float32))]
        else:
            columns = [_plain(piece.column(part.name)) for part in self.schema.dense]
        fine = [
            encoder.encode(column.__arrow_c_array__(), dense.numpy(), number)
            for number, (encoder, column) in enumerate(zip(self._numbers, columns, strict=True))
        ]
        return dense if all(fine) else None

    def _columns(self, piece: Piece) -> tuple[Column, ...] | None:
        made = []
        for part, encoder, encoding in zip(self.schema.sparse, self._ids, self.preprocessing.encodings, strict=True):
            found = encoder.encode(_plain(piece.column(part.name)).__arrow_c_array__())
            if found is None:
                return None
            values, offsets = (None if array is None else torch.from_numpy(array) for array in found)
            assert values is not None
            made.append(Column(name=part.name, row_count=encoding.row_count, values=values, offsets=offsets))
        return tuple(made)


def _id_encoder(encoding: Encoding) -> IdEncoder:
    known = None
    if encoding.vocabulary is not None:
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        is_text = encoding.vocabulary.dtype == object
        known = vocabulary(arrow.array(encoding.vocabulary, arrow.large_string() if is_text else None))
    return IdEncoder(rows=encoding.row_count, first=encoding.first, salt=encoding.salt, vocabulary=known)


def _plain(column: Any) -> Any:
    """The column as one of the types that native code reads."""
    kind = _plain_type(column.type)
    return column if kind is column.type else column.cast(kind)


def _plain_type(kind: Any) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    types = arrow.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_string_view(kind):
        return arrow.large_string()
    if types.is_boolean(kind) or types.is_float16(kind):
        return arrow.float32()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        return kind if _plain_type(inner) is inner else arrow.large_list(_plain_type(inner))
    return kind
