# SPDX-License-Identifier: Apache-2.0
"""Columns of events as numbers of fixed width, so that they can be sorted and kept in files."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.offload.arrow_columns import text_ids
from sennit.runtime.data.arrow_columns import wrong_id
from sennit.runtime.data.column_types import cast
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.raw_samples import NULL
from sennit.runtime.data.samples import NOBODY
from sennit.runtime.data.schema import SparseField
from sennit.runtime.stream.index import Place

Ints = npt.NDArray[Any]
"""Integers of any width."""

_PURPOSE: Final = "histories"


class EventColumn:
    """What a column of ids has, as integers. Text is its hash, and with a dictionary every value is a code.

    So text takes memory only where a model has a vocabulary of it anyway.
    """

    def __init__(self, field: SparseField, kind: Any) -> None:
        """`kind`: the column's type in `pyarrow`, one id a row."""
        self.name, self.is_coded = field.name, field.encode == "dictionary"
        self._field, self._kind = field, _plain(kind)
        is_number = _is_integer(self._kind) and not self.is_coded
        self.dtype = np.dtype(np.int32 if self.is_coded else self._kind.to_pandas_dtype() if is_number else np.int64)
        self._codes: dict[Any, int] = {}

    def numbers(self, column: Any, place: Place) -> Ints:
        """[n]: of a `pyarrow.Array`. `place`: of its first value. Raises DataError for values that are not allowed."""
        if self.is_coded:
            return self._coded(_decoded(column))
        if column.null_count:
            wrong = int(np.argmax(_is_null(column)))
            raise DataError(
                f"{place.behind(wrong).of(self.name)}: null; allowed in a history: no nulls, or encode = 'dictionary'"
            )
        values = _ids(_decoded(column))
        if refused := wrong_id(self._field, values):
            raise DataError(f"{place.behind(refused[0]).of(self.name)}: {refused[1]}")
        return values

    def _coded(self, column: Any) -> Ints:
        encoded = column.dictionary_encode()
        known = encoded.dictionary.to_pylist()
        # One more for nulls.
        codes = np.array([*(self._codes.setdefault(value, len(self._codes)) for value in known), NULL], np.int32)
        found: Ints = codes[np.asarray(encoded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False))]
        return found

    @property
    def values(self) -> Any:
        """What the codes stand for so far, as a `pyarrow.Array`. Of a column without codes: nothing."""
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        return arrow.array(list(self._codes), self._kind if _is_integer(self._kind) else arrow.large_string())


def users_of(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(int64 [n], bool [n]): who has each event, equal for equal values, and whether that is nobody: null.

    Of text it is the hash, as of all text that is an id (docs/decisions/0072-the-id-of-a-text.md).
    """
    is_nobody = _is_null(column)
    column = _decoded(column)
    if column.null_count:
        column = column.fill_null(0 if _is_integer(column.type) else "")
    return _ids(column).astype(np.int64, copy=False), is_nobody


def groups_of(column: Any) -> npt.NDArray[np.int64]:
    """Int64 [n]: `users_of`, with `NOBODY` for null."""
    found, is_nobody = users_of(column)
    return np.where(is_nobody, NOBODY, found)


def kept(column: Any, *, is_coded: bool) -> Any:
    """A column's values as they are kept, as a `pyarrow.Array`."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    column = _decoded(column)
    return column if is_coded or _is_integer(column.type) else arrow.array(text_ids(column))


def _ids(column: Any) -> Ints:
    """[n]: integers as they are, the hash of text. Without nulls."""
    return np.asarray(column.to_numpy(zero_copy_only=False)) if _is_integer(column.type) else text_ids(column)


def _decoded(column: Any) -> Any:
    """The column with integers as they are, and all else as large_string."""
    kind = _plain(column.type)
    if not _is_integer(kind):
        kind = require("pyarrow", package="pyarrow", purpose=_PURPOSE).large_string()
    return column if kind == column.type else cast(column, kind)


def _plain(kind: Any) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    return kind.value_type if arrow.types.is_dictionary(kind) else kind


def _is_integer(kind: Any) -> bool:
    return bool(require("pyarrow", package="pyarrow", purpose=_PURPOSE).types.is_integer(kind))


def _is_null(column: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))
