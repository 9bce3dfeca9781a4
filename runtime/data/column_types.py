# SPDX-License-Identifier: Apache-2.0
"""The one type that a column has in all files of a data set, where writers chose several for the same values.

Streams and data sets in memory are read by this rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from sennit.offload.columns import INT64_MAX
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require

_PURPOSE: Final = "reading data files"

_UNITS: Final = ("s", "ms", "us", "ns")

WHOLE_WITH_POINT: Final = re.compile(r"-?\d+\.0+")
"""An integer as pandas writes it in a column with gaps, which is of floats to it."""

_INTEGER: Final = re.compile(r"-?\d+(\.0+)?")

KEEP_INTEGERS: Final = 'where pandas writes the file: astype("Int64") keeps integers beside nulls'
"""What to do about integers that are floats."""

Found = tuple["Place", int]
"""Where an integer is, and the integer."""


class Place(Protocol):
    """Where some rows are, for messages."""

    @property
    def file_name(self) -> str:
        """The name of the file, as the user would write it."""

    def of(self, column: str) -> str:
        """The place of a column of these rows."""

    def behind(self, rows: int) -> Place:
        """The place of the row that comes so many rows behind the first."""


def check_names(file: str, names: Sequence[str], columns: Sequence[str], first: str | None = None) -> None:
    """Raises DataError unless a file has each of these columns once. `first` is the file that has them."""
    for name in columns:
        if (count := names.count(name)) != 1:
            what = f"{count} columns {name}; allowed: one" if count else f"no column {name}"
            there = f", which {first} has" if not count and first is not None else ""
            raise DataError(f"{file}: {what}{there}; there are: {', '.join(sorted(names))}")


def type_of_all(
    name: str, parts: Sequence[tuple[str, Any]], encodings: Mapping[str, str], find: Callable[[int], Found | None]
) -> Any:
    """The type of pyarrow that the column `name` has in all parts: of each, the name of its file, and its type there.

    `encodings`: as `Schema.encodings`. `find`: the first integer of a part as `outside` has it. It is called only where
    uint64 meets integers with a sign in a dictionary or a dynamic table. Then int64 is the type if it has all values,
    or else uint64. Raises DataError where there is no type, with two files that disagree.
    """
    kinds = [kind for _, kind in parts]
    if (kind := common_type(kinds)) is None:
        number = next(one for one in range(len(parts)) if common_type(kinds[: one + 1]) is None)
        first = next(one for one in range(number) if common_type([kinds[one], kinds[number]]) is None)
        raise DataError(
            f"{parts[number][0]}: column {name} is {kinds[number]}, but in {parts[first][0]} it is {kinds[first]}; "
            "allowed: one type, or numbers, texts or lists of several"
        )
    leaves = [_leaf(one) for one in kinds]
    encode = encodings.get(name)
    if encode not in ("dictionary", "dynamic") or str(_leaf(kind)) != "int64" or "uint64" not in map(str, leaves):
        return kind
    types = require("pyarrow", package="pyarrow", purpose=_PURPOSE).types
    large = _first(find, [number for number, leaf in enumerate(leaves) if types.is_uint64(leaf)])
    if large is None:
        return kind
    negative = _first(find, [number for number, leaf in enumerate(leaves) if types.is_signed_integer(leaf)])
    if negative is None:
        return _unsigned(kind)
    if encode == "dictionary":
        (place, value), (other, least) = large, negative
        raise DataError(
            f"{place.of(name)}: value {value}, but {other.of(name)}: value {least}; allowed: values that int64 has, "
            'or values that uint64 has; with encode = "hash" or "dynamic" the bits count'
        )
    return kind


def _first(find: Callable[[int], Found | None], numbers: Sequence[int]) -> Found | None:
    return next((found for found in map(find, numbers) if found is not None), None)


def outside(column: Any) -> tuple[int, int] | None:
    """(row, value): the first integer of a column that the other type of 64 bits lacks: above 2⁶³ - 1 in uint64, below
    0 in others. The column may have lists, or Arrow's dictionaries.
    """
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    column = cast(column, plain(column.type))
    counts = None
    if is_list(column.type):
        # A null list may cover values that nobody sees.
        counts = np.asarray(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        column = column.flatten()
    is_out = (
        compute.greater(column, arrow.scalar(INT64_MAX, arrow.uint64()))
        if arrow.types.is_uint64(column.type)
        else compute.less(column, 0)
    )
    there = np.flatnonzero(np.asarray(is_out.fill_null(False).to_numpy(zero_copy_only=False)))
    if not len(there):
        return None
    at = int(there[0])
    row = at if counts is None else int(np.searchsorted(np.cumsum(counts), at, side="right"))
    return row, column[at].as_py()


def common_type(kinds: Sequence[Any]) -> Any | None:
    """The type of pyarrow for the values of all these types, or None where there is none.

    One type stays what it is, but that views of texts and bytes are large_string and large_binary: Arrow cannot pick
    rows of them (pyarrow 26.0). Integers of several widths and signs become int64, other numbers and booleans float64,
    texts large_string, bytes large_binary, and so do texts and bytes, which have one hash. Lists become large_list.
    Moments take the finest unit, and UTC where zones differ; moments without a zone have no type with those that have
    one. Arrow's dictionaries are their values. The type null, of a column of None, is any type.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    types = arrow.types
    found = {kind for kind in map(plain, kinds) if not types.is_null(kind)}
    if len(found) <= 1:
        return found.pop() if found else arrow.null()
    if all(types.is_integer(kind) for kind in found):
        return arrow.uint64() if all(types.is_unsigned_integer(kind) for kind in found) else arrow.int64()
    if all(is_number(kind) or types.is_boolean(kind) for kind in found):
        return arrow.float64()
    if all(map(is_text, found)):
        return arrow.large_string()
    if all(is_text(kind) or is_binary(kind) for kind in found):
        return arrow.large_binary()
    if all(map(types.is_timestamp, found)):
        unit = max((kind.unit for kind in found), key=_UNITS.index)
        zones = {kind.tz for kind in found}
        if len(zones) == 1:
            return arrow.timestamp(unit, zones.pop())
        return None if None in zones else arrow.timestamp(unit, "UTC")
    if all(map(is_list, found)):
        inner = common_type([kind.value_type for kind in found])
        return None if inner is None else arrow.large_list(inner)
    return None


def moments_in(kind: Any, other: Any) -> int:
    """How many units of `other` make one unit of `kind`: 1,000 microseconds make a millisecond. 1 for other types."""
    types = arrow_types()
    if not (types.is_timestamp(kind) and types.is_timestamp(other)):
        return 1
    return int(1000 ** (_UNITS.index(other.unit) - _UNITS.index(kind.unit)))


def plain(kind: Any) -> Any:
    """The type without dictionaries, views and extension types. What these store is what counts: 16 bytes of a UUID."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        # Bytes, of which all but 0 are true (https://arrow.apache.org/docs/format/CanonicalExtensions).
        return arrow.bool_() if kind.extension_name == "arrow.bool8" else plain(kind.storage_type)
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind):
        return arrow.large_string()
    if types.is_binary_view(kind):
        return arrow.large_binary()
    # Lists of dictionaries stay: a cast makes lists of their values where they are needed.
    if (
        is_list(kind)
        and not types.is_dictionary(kind.value_type)
        and (inner := plain(kind.value_type)) != kind.value_type
    ):
        return arrow.large_list(inner)
    return kind


def _leaf(kind: Any) -> Any:
    """The type of one value, of lists that of their elements."""
    kind = plain(kind)
    return plain(kind.value_type) if is_list(kind) else kind


def _unsigned(kind: Any) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    return arrow.large_list(arrow.uint64()) if is_list(kind) else arrow.uint64()


def typed(name: str, column: Any, kind: Any, encodings: Mapping[str, str], place: Place) -> Any:
    """A `pyarrow.Array` of the column `name` with the type that it has in all files. `place`: of its first row.

    Of ids that are hashed or dynamic, the 64 bits count. Otherwise the first row with an integer that does not fit
    raises DataError.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    # Integers above 2^53 are rounded where files disagree about integer or float.
    safe = encodings.get(name) not in ("hash", "dynamic") and not arrow.types.is_floating(kind)
    try:
        return cast(column, kind, safe=safe)
    except arrow.ArrowInvalid as error:
        wrong = next(row for row in range(len(column)) if not _fits(column.slice(row, 1), kind))
        raise DataError(
            f"{place.behind(wrong).of(name)}: value {_shown(column[wrong])}; allowed: {kind}, which is the type of all "
            "files together"
        ) from error


def _shown(value: Any) -> str:
    """A scalar of pyarrow. Python has no moments behind the year 9999: of these it is the number of units."""
    try:
        return str(value)
    except (OverflowError, ValueError):
        return str(value.value)


def _fits(column: Any, kind: Any) -> bool:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    try:
        cast(column, kind)
    except arrow.ArrowInvalid:
        return False
    return True


def cast(column: Any, kind: Any, *, safe: bool = True) -> Any:
    """A `pyarrow.Array` with another type. What becomes text may be any bytes: they are hashed, and nobody else reads
    them. Raises pyarrow.ArrowInvalid for an integer that does not fit; not `safe`: its bits are taken.
    """
    if column.type == kind:
        return column
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    if arrow.types.is_dictionary(column.type):
        # A cast cannot make lists of a dictionary of them, and rows of views cannot be picked.
        values = cast(column.dictionary, plain(column.type.value_type))
        return cast(arrow.DictionaryArray.from_arrays(column.indices, values).dictionary_decode(), kind, safe=safe)
    options = compute.CastOptions(
        kind, allow_invalid_utf8=True, allow_int_overflow=not safe, allow_float_truncate=not safe
    )
    return compute.cast(_cut(column), options=options)


def _cut(column: Any) -> Any:
    """The same values. Of lists, no others are in memory behind them: Arrow casts all of these, whatever the slice."""
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    if not is_list(column.type) or not len(column):
        return column
    nulls = column.is_null() if column.null_count else None
    if arrow.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        if len(column.values) == size * len(column):
            return column
        values = column.values.slice(size * column.offset, size * len(column))
        return arrow.FixedSizeListArray.from_arrays(values, size, mask=nulls)
    ends = column.offsets.to_numpy()
    if len(column.values) == ends[-1] - ends[0]:
        return column
    kind = arrow.ListArray if arrow.types.is_list(column.type) else arrow.LargeListArray
    return kind.from_arrays(ends - ends[0], column.values.slice(ends[0], ends[-1] - ends[0]), mask=nulls)


def check_spelling(name: str, *values: npt.NDArray[Any]) -> None:
    """Raises DataError if all these values of a dictionary are integers as text, some of them with a decimal point.

    One part of a data set had a gap, and another none: 3 and 3.0 would be two values.
    """

    def first(is_wanted: Callable[[str], bool]) -> str | None:
        texts = (text for part in values if part.dtype == object for text in part if isinstance(text, str))
        return next((text for text in texts if is_wanted(text)), None)

    pointed = first(lambda text: text.endswith(".0"))
    bare = None if pointed is None else first(lambda text: not text.endswith(".0"))
    if bare is not None and first(lambda text: _INTEGER.fullmatch(text) is None) is None:
        raise DataError(
            f"column {name}: integers with and without a decimal point, as {bare} and {pointed}, which would be "
            f"different values; allowed: one way to write them; {KEEP_INTEGERS}"
        )


# Types that have the same kind of values. Nobody else lists them.


def is_number(kind: Any) -> bool:
    """Whether values of this type of pyarrow are numbers. Booleans are none."""
    types = arrow_types()
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    types = arrow_types()
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: Any) -> bool:
    """Whether values of this type of pyarrow are bytes. As ids they are hashed as text is."""
    types = arrow_types()
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_list(kind: Any) -> bool:
    """Whether values of this type of pyarrow are lists. List views are refused: where a cast to lists gets a slice of
    them, it loses values (pyarrow 26.0).
    """
    types = arrow_types()
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def arrow_types() -> Any:
    """`pyarrow.types`. Raises `MissingPackage` without pyarrow."""
    return require("pyarrow", package="pyarrow", purpose=_PURPOSE).types
