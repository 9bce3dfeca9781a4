# SPDX-License-Identifier: Apache-2.0
"""Columns of Arrow as samples, and samples as batches: one native call a column, no Python object a row.

Columns are read where they lie, through the Arrow PyCapsule interface (`__arrow_c_array__`). A column with a value that
is not allowed, or of a type that is not for its encoder, gives no result: the caller then says what is wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.offload._native import BatchEncoder, IdEncoder, NumberEncoder, SamplesInMemory, Vocabulary
from sennit.offload._native import content_hash as _content_hash
from sennit.offload._native import text_ids as _text_ids
from sennit.offload.operators import Log1p
from sennit.offload.tables import function_table

__all__ = [
    "BatchEncoder",
    "IdEncoder",
    "NumberEncoder",
    "SamplesInMemory",
    "TableIds",
    "content_hash",
    "number_encoder",
    "text_ids",
    "vocabulary",
]

TableIds = tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.int64] | None]
"""Rows of one table, and the offsets of samples unless each has one row."""


def number_encoder(*, clamp: tuple[float, float] | None, log1p: bool, mean: float, deviation: float) -> NumberEncoder:
    """(f(x) - mean) / deviation, where f is the operators `Clamp` and `Log1p` if they are asked for; 0 for null."""
    return NumberEncoder(clamp=clamp, table=_log1p_table() if log1p else None, mean=mean, deviation=deviation)


def vocabulary(values: Any) -> Vocabulary:
    """For a `pyarrow.Array` of int64, uint64 or large_string without nulls: value i has row i + 1, all others row 0."""
    return Vocabulary(values.__arrow_c_array__())


def text_ids(texts: Any) -> NDArray[np.int64]:
    """The ids that text is hashed by: XXH64 with seed 0 of its UTF-8 bytes, the 64 bits taken with a sign.

    `texts`: a `pyarrow.Array` of large_string without nulls.
    """
    return _text_ids(texts.__arrow_c_array__())


def content_hash(content: bytes) -> int:
    """XXH64 with seed 0 of these bytes. Of a block of text it takes a third of the time of zlib's CRC-32."""
    return _content_hash(content)


@lru_cache(maxsize=1)
def _log1p_table() -> NDArray[np.uint32]:
    """One for all columns, so that it stays in the processor's cache."""
    return function_table(Log1p(column="x"))
