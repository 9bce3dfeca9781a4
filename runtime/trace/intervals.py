# SPDX-License-Identifier: Apache-2.0
"""What came between two looks at a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Protocol, TypeVar


class Row(Protocol):
    """A dataclass. All of its fields but these are counts, or mappings of counts."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    KEY: ClassVar[tuple[str, ...]]
    """The fields that say of what the row is."""
    LEVELS: ClassVar[tuple[str, ...]]
    """The fields that say how it is now."""


RowType = TypeVar("RowType", bound=Row)


def since(before: Sequence[RowType], now: Sequence[RowType]) -> list[RowType]:
    """The rows of `now` with what they have counted since `before`."""
    known = {_key(row): row for row in before}
    return [_less(row, known[_key(row)]) if _key(row) in known else row for row in now]


def _key(row: Row) -> tuple[Any, ...]:
    return type(row), *(getattr(row, name) for name in row.KEY)


def _less(row: RowType, before: RowType) -> RowType:
    counts = [one.name for one in fields(row) if one.name not in (*row.KEY, *row.LEVELS)]
    return replace(row, **{name: _difference(getattr(row, name), getattr(before, name)) for name in counts})


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, Counter):
        return now - before
    if isinstance(now, dict):
        return {name: _difference(value, before[name]) if name in before else value for name, value in now.items()}
    return now - before
