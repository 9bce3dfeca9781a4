# SPDX-License-Identifier: Apache-2.0
"""Record batches of a stream as samples: what its files hold becomes what a model reads."""

from __future__ import annotations

from typing import Any

from sennit.runtime.data.arrow_columns import Piece, Place, raw_samples
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import Schema


class Encoder:
    """Encodes the rows of one stream. How a stream is cut into record batches changes no sample."""

    def __init__(self, schema: Schema, preprocessing: Preprocessing, types: Any = None) -> None:
        """`preprocessing`: fitted to the stream, or taken from a checkpoint.

        `types`: a `pyarrow.Schema` with the type of each column of the stream. A file may have a column of type null:
        its nulls are those of the stream's type, so null lists where the others have lists. None: all files have the
        same types.
        """
        self.schema = schema
        self.preprocessing = preprocessing
        self._types = types

    def encode(self, batch: Any, place: Place) -> Samples:
        """The rows of a `pyarrow.RecordBatch`: dense features scaled, ids as rows of tables.

        The batch has the columns of the schema, with types that `check_types` allows. `place`: where it is from. Raises
        DataError for a value that the schema does not allow.
        """
        raw = raw_samples(place.file_name, [Piece(self._typed(batch), place)], self.schema)
        return self.preprocessing.apply(raw).samples()

    def _typed(self, batch: Any) -> Any:
        """The batch with columns of type null as the stream has them."""
        if self._types is None:
            return batch
        for number, field in enumerate(batch.schema):
            kind = self._types.field(field.name).type if field.name in self._types.names else field.type
            if str(field.type) == "null" != str(kind):
                batch = batch.set_column(number, field.name, batch.column(number).cast(kind))
        return batch
