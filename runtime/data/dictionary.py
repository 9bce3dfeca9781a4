# SPDX-License-Identifier: Apache-2.0
"""Columns of categories as codes: the index of each value among the distinct values in sorted order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.packages import require

NULL: Final = -1
"""The code of a null."""

Values = npt.NDArray[np.object_] | npt.NDArray[np.int64] | npt.NDArray[np.uint64]


def encode(column: Any) -> tuple[npt.NDArray[np.int64], Values]:
    """Returns (codes, distinct values in rising order) of an Arrow array or chunked array of strings or integers.

    Text is sorted by code points. The distinct values are those of the whole column. Which of them a model knows is
    decided later, by its training rows (`preprocessing`).
    """
    compute = require("pyarrow.compute", package="pyarrow", purpose="a column of categories")
    arrow = require("pyarrow", package="pyarrow", purpose="a column of categories")
    if arrow.types.is_dictionary(column.type):
        column = compute.cast(column, column.type.value_type)
    encoded = column.dictionary_encode()
    if isinstance(encoded, arrow.ChunkedArray):
        # Each chunk may have a dictionary.
        encoded = encoded.unify_dictionaries().combine_chunks()
        if isinstance(encoded, arrow.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else column.combine_chunks().dictionary_encode()
    values = np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False))
    if values.dtype.kind in "iu" and values.dtype != np.uint64:
        values = values.astype(np.int64)
    elif values.dtype.kind not in "iu":
        values = values.astype(object)
    order = np.argsort(values, kind="stable")
    # One more for nulls.
    code_of = np.empty(len(values) + 1, np.int64)
    code_of[order] = np.arange(len(values))
    code_of[-1] = NULL
    indices = np.asarray(encoded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False))
    return code_of[indices], values[order]
