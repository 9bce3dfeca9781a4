# SPDX-License-Identifier: Apache-2.0
"""The one type that a column has in all files of a stream, where writers chose several for the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sennit.runtime.data.arrow_columns import is_binary, is_list, is_number, is_text
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require


def check_names(file: str, names: Sequence[str], columns: Sequence[str], first: str | None = None) -> None:
    """Raises DataError unless a file has each of these columns once. `first` is the file that has them."""
    for name in columns:
        if (count := names.count(name)) != 1:
            what = f"{count} columns {name}; allowed: one" if count else f"no column {name}"
            there = f", which {first} has" if not count and first is not None else ""
            raise DataError(f"{file}: {what}{there}; there are: {', '.join(sorted(names))}")


def common_type(kinds: list[Any]) -> Any | None:
    """The type of pyarrow that has the values of all these types, or None where there is none.

    One type stays what it is, but that views of texts and bytes are large_string and large_binary: Arrow cannot pick
    rows of them (pyarrow 26.0). Integers of several widths and signs become int64, other numbers float64, texts
    large_string, bytes large_binary, lists large_list. Arrow's dictionaries are their values. The type null, of a
    column of None, is any type.
    """
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    types = arrow.types
    found = {_plain(kind) for kind in kinds if not types.is_null(kind)}
    if len(found) <= 1:
        return found.pop() if found else arrow.null()
    if all(types.is_integer(kind) for kind in found):
        return arrow.uint64() if all(types.is_unsigned_integer(kind) for kind in found) else arrow.int64()
    if all(map(is_number, found)):
        return arrow.float64()
    if all(map(is_text, found)):
        return arrow.large_string()
    if all(map(is_binary, found)):
        return arrow.large_binary()
    if all(map(is_list, found)):
        inner = common_type([kind.value_type for kind in found])
        return None if inner is None else arrow.large_list(inner)
    return None


def _plain(kind: Any) -> Any:
    """The type without dictionaries and views."""
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    types = arrow.types
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return arrow.large_string()
    if types.is_binary_view(kind):
        return arrow.large_binary()
    if is_list(kind) and (types.is_string_view(kind.value_type) or types.is_binary_view(kind.value_type)):
        return arrow.large_list(_plain(kind.value_type))
    return kind


def cast(column: Any, kind: Any) -> Any:
    """A column of a batch with the common type. Raises pyarrow.ArrowInvalid for an integer that does not fit."""
    if column.type == kind:
        return column
    compute = require("pyarrow.compute", package="pyarrow", purpose="reading data files")
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    # Integers above 2^53 are rounded where files disagree about integer or float.
    return compute.cast(column, kind, safe=not arrow.types.is_floating(kind))
