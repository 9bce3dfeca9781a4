# SPDX-License-Identifier: Apache-2.0
"""How text files are to be read: CSV, TSV, and the click logs of Criteo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sennit.runtime.data.errors import DataError

CRITEO_INTEGERS: Final = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORIES: Final = tuple(f"C{number}" for number in range(1, 27))
CRITEO_COLUMNS: Final = ("label", *CRITEO_INTEGERS, *CRITEO_CATEGORIES)
"""The files of Criteo's challenge and of its terabyte logs have no header, but a label, 13 integers, and 26 categories
in hexadecimal (readme.txt of both data sets)."""

TYPES: Final = (
    *("int64", "uint64", "float64", "bool", "string"),
    *("date32", "timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ns]"),
)
"""What a schema file may say of a column of text, as pyarrow names types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """What a text file does not say itself. Text is UTF-8. A line ends in \\n or \\r\\n, and is a row."""

    delimiter: str | None = None
    """One character between columns. None: a comma for `.csv`, a tab for others."""

    names: tuple[str, ...] | None = None
    """The names of all columns, in order. None: the first line of each file has them."""

    quote: str | None = '"'
    """The character around values that have a delimiter in them. None: there are no such values."""

    nulls: tuple[str, ...] = ("",)
    """What stands for null, in columns of every type."""

    skip_broken: int = 0
    """So many broken lines, and rows with values that the schema refuses, may be left out of all files together. To
    find them, all rows are read when the index is made."""

    types: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The types of columns, as `pyarrow.DataType` or by the name that pyarrow knows. A column without one gets the type
    that pyarrow infers from the first block of the first file."""

    def __post_init__(self) -> None:
        for what, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise DataError(f"{what} {value!r}; allowed: one ASCII character that ends no line")
        for name in self.names or ():
            if self.names is not None and self.names.count(name) > 1:
                raise DataError(f"names has {name!r} twice; allowed: once")
        if self.skip_broken < 0:
            raise DataError(f"skip_broken {self.skip_broken}; allowed: 0 or more")

    @property
    def is_described(self) -> bool:
        """Whether the user said what the text is like. Then files are text whose names do not say their format."""
        return self.names is not None or self.delimiter is not None


PLAIN: Final = TextFormat()
"""Text of which nothing is known but its name."""

# A column of few categories may be all digits in the first block.
CRITEO: Final = TextFormat(
    delimiter="\t", names=CRITEO_COLUMNS, quote=None, types=dict.fromkeys(CRITEO_CATEGORIES, "string")
)
