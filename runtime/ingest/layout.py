# SPDX-License-Identifier: Apache-2.0
"""How the samples of a stream become records: which field has how many ids, of how many bytes.

All feeders of a run have the same layout, whichever rows they read, so it follows from all rows of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from sennit.offload.errors import RecordError, SchemaError
from sennit.offload.ingest.facts import TableFacts
from sennit.offload.operators import Operator
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.schema import LIST_MAX_LENGTH, WIDTHS_BYTES, Dense, Ids, Schema
from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import Encoding, Preprocessing
from sennit.runtime.data.raw_samples import Feature, RawSamples
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.schema import Schema as StreamSchema
from sennit.runtime.stream.source import Stream


@dataclass(slots=True)
class FeatureExtent:
    """What the rows of one feature have."""

    rows: int = 0
    ids: int = 0
    """How many ids are used."""

    shortest: int | None = None
    longest: int = 0
    low: int = 0
    high: int = 0
    """The greatest and the least id, and 0, of ids that trainers hash, or that are dynamic."""

    def add(self, feature: Feature) -> None:
        lengths = feature.lengths
        if not len(lengths):
            return
        if feature.first is not None:
            lengths = np.minimum(lengths, feature.first)
        self.add_lengths(len(lengths), int(lengths.sum()), int(lengths.min()), int(lengths.max()))
        if (feature.salt is not None or feature.is_dynamic) and len(feature.values):
            self.low = min(self.low, int(feature.values.min()))
            self.high = max(self.high, int(feature.values.max()))

    def add_lengths(self, rows: int, ids: int, shortest: int, longest: int) -> None:
        self.rows += rows
        self.ids += ids
        self.shortest = shortest if self.shortest is None else min(self.shortest, shortest)
        self.longest = max(self.longest, longest)


class Survey:
    """The extents of a stream's features, by name. One pass over the columns that need it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.extents = {part.name: FeatureExtent() for part in stream.schema.sparse}

    def add(self, raw: RawSamples) -> None:
        for feature in raw.features:
            self.extents[feature.name].add(feature)

    def read(self, begin: int, end: int) -> None:
        """Adds rows [begin, end) of the stream. Raises DataError for values that the schema does not allow."""
        index, schema = self._stream.index, self._stream.schema
        types = require("pyarrow", package="pyarrow", purpose="a stream").types

        def is_known(name: str, encode: str) -> bool:
            """Whether each row has one row of a vocabulary."""
            kind = index.schema.field(name).type
            return encode == "dictionary" and not types.is_nested(kind)

        known = [part.name for part in schema.sparse if is_known(part.name, part.encode)]
        for name in known if begin < end else ():
            self.extents[name].add_lengths(end - begin, end - begin, 1, 1)
        needed = replace(
            schema,
            dense=(),
            sparse=tuple(part for part in schema.sparse if part.name not in known),
            sample_weight=None,
        )
        if needed.sparse:
            for place, rows in index.read(begin, end, needed.columns):
                self.add(raw_samples(self._stream.name, [Piece(rows, place)], needed))


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """The records of a stream's samples. Fields are named by number, because column names may be any text.

    A record has one label. Further ones, and then the weight of a sample, are numbers behind its dense features.
    """

    name: str
    """Of the data set, for messages."""

    schema: Schema
    tables: tuple[TableFacts, ...]
    plan: FeaturePlan
    """The plan by which trainers make batches."""

    @classmethod
    def of(
        cls, name: str, columns: StreamSchema, preprocessing: Preprocessing, extents: Sequence[FeatureExtent]
    ) -> Self:
        """`extents`: in the order of the features. Raises DataError for samples that no record holds."""
        ids, tables, sparse = [], [], []
        operators: dict[str, Operator] = {}
        for number, (encoding, extent) in enumerate(zip(preprocessing.encodings, extents, strict=True)):
            field = _field(number, encoding, extent)
            made = Feature(
                name=encoding.name,
                row_count=encoding.row_count,
                values=np.zeros(0, np.int64),
                salt=encoding.salt,
                is_dynamic=encoding.is_dynamic,
            ).operators(field.name, field.type)
            operators |= made
            ids.append(field)
            rows = None if encoding.is_dynamic else encoding.row_count
            sparse.append(Sparse(column=[field.name, *made][-1], rows=rows))
            tables.append(
                TableFacts(
                    name=encoding.name,
                    rows=encoding.row_count,
                    mean_length=extent.ids / max(1, extent.rows),
                    is_dynamic=encoding.is_dynamic,
                )
            )
        count = len(preprocessing.scales) + len(columns.labels) - 1 + (columns.sample_weight is not None)
        numbers = tuple(Dense(name=f"d{number}") for number in range(count))
        try:
            schema = Schema(dense=numbers, ids=tuple(ids))
        except SchemaError as error:
            raise DataError(f"{name}: {error}") from error
        plan = FeaturePlan(
            schema=schema, columns=operators, dense=tuple(part.name for part in numbers), sparse=tuple(sparse)
        )
        return cls(name=name, schema=schema, tables=tuple(tables), plan=plan)

    def encode(self, samples: Samples) -> RecordStore:
        """The samples as records. Raises DataError for samples that are not those the layout was made for, and
        MemoryError.
        """
        fields = zip(self.schema.ids, samples.columns, strict=True)
        labels, weights = samples.labels.reshape(len(samples), -1), samples.sample_weights
        numbers = [samples.dense, labels[:, 1:], *([] if weights is None else [weights[:, None]])]
        try:
            return RecordStore.encode(
                self.schema,
                Columns(
                    labels=labels[:, 0].contiguous().numpy(),
                    dense=torch.cat(numbers, 1).numpy(),
                    ids=tuple(_ids(field, column) for field, column in fields),
                ),
            )
        except RecordError as error:
            raise DataError(f"{self.name}: {error}") from error


def check_columns(stream: Stream) -> None:
    """Raises DataError for columns that cannot be fed."""
    for part in stream.schema.running[:1]:
        raise DataError(
            f"{stream.name}: column {part.name} has running = {part.running}, but a feeder reads only what ranks ask "
            "it for; allowed: without running, or ranks that read the files themselves"
        )
    if stream.schema.history is not None:
        raise DataError(f"{stream.name}: histories, which a feeder does not send; allowed: ranks that read themselves")


def _field(number: int, encoding: Encoding, extent: FeatureExtent) -> Ids:
    longest = max(1, extent.longest)
    if longest > LIST_MAX_LENGTH:
        raise DataError(
            f"table {encoding.name}: a sample with {longest} ids; a record holds at most {LIST_MAX_LENGTH} "
            "(first = N in the schema file shortens lists)"
        )
    is_row = encoding.salt is None and not encoding.is_dynamic
    low, high = (0, encoding.row_count - 1) if is_row else (extent.low, extent.high)
    return Ids(
        name=f"t{number}",
        width_bytes=next(width for width in WIDTHS_BYTES if _fits(low, high, width)),
        signed=low < 0,
        length=longest,
        # A fixed number of ids if it is the same in all samples.
        is_list=extent.shortest != longest,
    )


def _ids(field: Ids, column: Column) -> IdColumn:
    offsets: Any = None
    if field.is_list:
        offsets = np.arange(column.sample_count + 1) if column.offsets is None else column.offsets.numpy()
    return IdColumn(values=column.values.numpy(), offsets=offsets)


def _fits(low: int, high: int, width_bytes: int) -> bool:
    """Ids of 8 bytes are signed; shorter ones may be unsigned."""
    bits = 8 * width_bytes - (1 if low < 0 or width_bytes == 8 else 0)
    return high < 1 << bits and low >= -(1 << bits)
