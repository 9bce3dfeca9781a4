# SPDX-License-Identifier: Apache-2.0
"""How text files are to be read: CSV, TSV, and the click logs of Criteo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require

CRITEO_INTEGERS: Final = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORIES: Final = tuple(f"C{number}" for number in range(1, 27))
CRITEO: Final = ("label", *CRITEO_INTEGERS, *CRITEO_CATEGORIES)
"""The columns of the files of Criteo's challenge and of its terabyte logs, which have no header: a label, 13 integers,
26 categories as hexadecimal text (readme.txt of both data sets)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """What a text file does not say itself. Text is UTF-8. A line ends in \\n or \\r\\n, and is a row."""

    delimiter: str | None = None
    """One character between columns. None: a comma for `.csv`, a tab otherwise."""

    names: tuple[str, ...] | None = None
    """The names of all columns, in order. None: the first line of each file has them."""

    types: Mapping[str, Any] = field(default_factory=dict)
    """The `pyarrow.DataType` of columns. A column without one gets the type that pyarrow infers from the first block of
    the first file."""

    quote: str | None = '"'
    """The character around values that have a delimiter in them. None: there are no such values."""

    nulls: tuple[str, ...] = ("",)
    """What stands for null, in columns of every type."""

    skip_broken: int = 0
    """So many broken lines of all files together may be left out. To find them, all text is parsed when the index is
    made."""

    def __post_init__(self) -> None:
        for what, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise DataError(f"{what} {value!r}; allowed: one ASCII character that ends no line")
        if self.names is not None and len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"names of columns have {twice!r} twice; allowed: once")
        if self.skip_broken < 0:
            raise DataError(f"skip_broken {self.skip_broken}; allowed: 0 or more")


def criteo(*, skip_broken: int = 0) -> TextFormat:
    """The format of Criteo's files: tabs, no header, no quotes, nothing for null."""
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    types = {name: arrow.int64() for name in ("label", *CRITEO_INTEGERS)}
    types |= {name: arrow.string() for name in CRITEO_CATEGORIES}
    return TextFormat(delimiter="\t", names=CRITEO, types=types, quote=None, skip_broken=skip_broken)
