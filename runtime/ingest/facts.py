# SPDX-License-Identifier: Apache-2.0
"""Samples as records: what a feeder says of a data set in memory, and the records of some of its samples."""

from __future__ import annotations

import hashlib

import numpy as np
from torch import Tensor

from sennit.offload.columns import ColumnValues, Ragged
from sennit.offload.ingest.facts import Facts, TableFacts
from sennit.offload.operators import ClampList
from sennit.offload.plan import Plan, Sparse
from sennit.offload.records import Rows
from sennit.offload.schema import LIST_MAX_LENGTH, Dense, Ids, Schema
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import Column, Samples


def facts_of(samples: Samples) -> Facts:
    """Fields are named by their number, since the names of columns may be any text.

    Ids are as wide as their table's rows need. Where a record could hold more, the plan clamps them: no record that
    arrives can name a row that is not there.
    """
    dense = tuple(Dense(name=f"d{number}") for number in range(samples.dense.shape[1]))
    ids = tuple(_field(number, column) for number, column in enumerate(samples.columns))
    columns, sparse = {}, []
    for number, (field, column) in enumerate(zip(ids, samples.columns, strict=True)):
        name = field.name
        if field.type.low < 0 or field.type.high >= column.row_count:
            name = f"c{number}"
            columns[name] = ClampList(column=field.name, low=0, high=column.row_count - 1)
        sparse.append(Sparse(column=name, rows=column.row_count))
    return Facts(
        name=samples.name,
        fingerprint=fingerprint(samples),
        sample_count=len(samples),
        tables=tuple(
            TableFacts(name=column.name, row_count=column.row_count, mean_length=column.mean_length)
            for column in samples.columns
        ),
        dense_names=samples.dense_names or tuple(part.name for part in dense),
        plan=Plan(
            schema=Schema(dense=dense, ids=ids),
            columns=columns,
            dense=tuple(part.name for part in dense),
            sparse=tuple(sparse),
        ),
    )


def rows_of(samples: Samples, numbers: Tensor) -> Rows:
    """The records of these samples, in that order."""
    columns: dict[str, ColumnValues] = {}
    for number, values in enumerate(samples.dense[numbers].T):
        columns[f"d{number}"] = np.ascontiguousarray(values.numpy())
    for number, column in enumerate(samples.columns):
        lengths, ids = column.gather(numbers)
        columns[f"t{number}"] = Ragged(lengths.numpy(), ids.numpy())
    return Rows(labels=samples.labels[numbers].numpy(), columns=columns)


def fingerprint(samples: Samples) -> str:
    """SHA-256 of all that is in them."""
    digest = hashlib.sha256()
    for tensor in (samples.dense, samples.labels):
        digest.update(tensor.contiguous().numpy().data)
    for column in samples.columns:
        digest.update(f"{column.name}/{column.row_count}/{column.values.dtype}".encode())
        for part in (column.values, column.offsets):
            if part is not None:
                digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _field(number: int, column: Column) -> Ids:
    width_bytes = next(width for width in (1, 2, 4, 8) if width == 8 or column.row_count <= 1 << 8 * width)
    if column.offsets is None:
        return Ids(name=f"t{number}", width_bytes=width_bytes)
    longest = int((column.offsets[1:] - column.offsets[:-1]).max())
    if longest > LIST_MAX_LENGTH:
        raise DataError(f"table {column.name}: a sample with {longest} ids; a record holds at most {LIST_MAX_LENGTH}")
    return Ids(name=f"t{number}", width_bytes=width_bytes, length=max(1, longest), is_list=True)
