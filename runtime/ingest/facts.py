# SPDX-License-Identifier: Apache-2.0
"""Encodes a feeder's samples as records, and describes them for trainers."""

from __future__ import annotations

from typing import Final

import numpy as np

from sennit.offload.errors import RecordError, SchemaError
from sennit.offload.ingest.facts import Facts, TableFacts
from sennit.offload.operators import Operator
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.schema import LIST_MAX_LENGTH, WIDTHS_BYTES, Dense, Ids, Schema
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.raw_samples import Feature, RawSamples

_LABEL_BYTES: Final = 1
_DENSE_BYTES: Final = 4


def encode(raw: RawSamples, fingerprint: str, *, body_max_bytes: int) -> tuple[Facts, RecordStore]:
    """Returns the facts of the data, with the plan by which trainers make batches, and the records.

    `fingerprint` is that of the samples before preprocessing. Trainers compare it with checkpoints and other feeders.

    Fields are named by number, because column names may be any text. Lists are sent whole. Only if the longest record
    would exceed `body_max_bytes` are they cut here to their `first` ids, as the plan cuts them, too.
    """
    more = {"sample weights": raw.sample_weights is not None, "several labels": len(raw.label_names) > 1}
    for what, is_there in more.items():
        if is_there:
            raise DataError(f"{raw.name} has {what}; allowed: data without, because records have no place for them")
    fields = [_Field(number, feature) for number, feature in enumerate(raw.features)]
    longest_bytes = _LABEL_BYTES + _DENSE_BYTES * raw.dense.shape[1] + sum(field.longest_bytes for field in fields)
    if longest_bytes > body_max_bytes or any(field.longest > LIST_MAX_LENGTH for field in fields):
        fields = [_Field(number, feature.cut()) for number, feature in enumerate(raw.features)]
    for field in fields:
        if field.longest > LIST_MAX_LENGTH:
            raise DataError(
                f"table {field.feature.name}: a sample with {field.longest} ids; a record holds at most "
                f"{LIST_MAX_LENGTH} (first = N in the schema file shortens lists)"
            )
    numbers = tuple(Dense(name=f"d{number}") for number in range(raw.dense.shape[1]))
    try:
        schema = Schema(dense=numbers, ids=tuple(field.ids for field in fields))
        store = RecordStore.encode(
            schema,
            Columns(
                labels=raw.labels.numpy(),
                dense=np.ascontiguousarray(raw.dense.numpy(), np.float32),
                ids=tuple(field.column for field in fields),
            ),
        )
    except (SchemaError, RecordError) as error:
        raise DataError(f"{raw.name}: {error}") from error
    columns: dict[str, Operator] = {}
    sparse = []
    for field in fields:
        made = field.feature.operators(field.ids.name, field.ids.type)
        columns |= made
        sparse.append(Sparse(column=[field.ids.name, *made][-1], rows=field.feature.row_count))
    facts = Facts(
        name=raw.name,
        fingerprint=fingerprint,
        sample_count=len(raw),
        tables=tuple(
            TableFacts(name=feature.name, rows=feature.row_count, mean_length=feature.mean_length)
            for feature in raw.features
        ),
        dense_names=raw.dense_names or tuple(part.name for part in numbers),
        plan=FeaturePlan(
            schema=schema, columns=columns, dense=tuple(part.name for part in numbers), sparse=tuple(sparse)
        ),
    )
    return facts, store


class _Field:
    """One feature in a record: a fixed number of ids if it is the same in all samples, else a list."""

    def __init__(self, number: int, feature: Feature) -> None:
        self.feature = feature
        lengths = feature.lengths
        self.longest = int(lengths.max(initial=1))
        is_list = bool((lengths != self.longest).any())
        low, high = 0, feature.row_count - 1
        if feature.salt is not None and len(feature.values):
            low, high = int(feature.values.min()), int(feature.values.max())
        width_bytes = next(width for width in WIDTHS_BYTES if _fits(low, high, width))
        self.ids = Ids(name=f"t{number}", width_bytes=width_bytes, signed=low < 0, length=self.longest, is_list=is_list)
        self.column = IdColumn(values=feature.values, offsets=feature.offsets if is_list else None)

    @property
    def longest_bytes(self) -> int:
        return self.ids.length_bytes + self.ids.width_bytes * self.longest


def _fits(low: int, high: int, width_bytes: int) -> bool:
    """Ids of 8 bytes are signed; shorter ones may be unsigned."""
    bits = 8 * width_bytes - (1 if low < 0 or width_bytes == 8 else 0)
    return high < 1 << bits and low >= -(1 << bits)
