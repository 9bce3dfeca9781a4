# SPDX-License-Identifier: Apache-2.0
"""Lines of text as rows, and what is wrong with a line that is no row.

pyarrow's parser says what text means. Plain lines are parsed natively, several times as fast, to the same rows.

pyarrow takes the end of a line within quotes for a part of the value, and leaves empty lines out. Both would move the
rows that come after. So a parse is right only if it has as many rows as there are lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sennit.offload.columns import INT64_MAX
from sennit.offload.text_lines import line_parser
from sennit.runtime.data.column_types import KEEP_INTEGERS, WHOLE_WITH_POINT
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import arrow_threads

_CHUNK_BYTES: Final = 1 << 18
"""Where pyarrow has threads, each of them parses pieces of this size. One thread parses a block at once, because what
it parsed is then one piece of memory already: files are read at 1.06 times the speed."""

_SHOWN_BYTES: Final = 100
_BOOLEANS: Final = frozenset(("true", "false"))
_NULLS: Final = frozenset(("\\n", "null", "na", "n/a", "#n/a", "<na>", "nan", "none", "nil", "(null)", "-", "?"))
"""What tools write for null, in small letters: MySQL and Hive `\\N`, pandas `<NA>`, R `NA`, Weka `?`."""


@dataclass(frozen=True, kw_only=True)
class TextParser:
    """Parses whole lines."""

    names: tuple[str, ...]
    types: Mapping[str, Any]
    """As in `TextFormat`."""

    delimiter: str
    quote: str | None
    nulls: tuple[str, ...]

    def parse(self, text: bytes, line_count: int, columns: Sequence[str]) -> Any | None:
        """The lines as a `pyarrow.RecordBatch` of these columns, or None if a line is broken."""
        if (plain := self._plain(text, line_count, columns)) is not None:
            return plain
        pieces = (_CHUNK_BYTES,) if arrow_threads() else ()
        for chunk_bytes in (*pieces, len(text) + 1):  # a line may be longer than a chunk
            table = self._parse(text, line_count, columns, chunk_bytes)
            if table is not None:
                # The parser made many small chunks. One batch of many rows costs less in all that reads it.
                return table.combine_chunks().to_batches()[0]
        return None

    def _plain(self, text: bytes, line_count: int, columns: Sequence[str]) -> Any | None:
        """The rows by the native parser, or None if not all lines are plain."""
        arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
        if self.quote is not None and self.quote.encode() in text:
            return None
        types = tuple((name, str(arrow_type(self.types[name]))) for name in columns)
        parser = line_parser(self.delimiter, self.nulls, self.names, types)
        found = None if parser is None or not _is_utf8(text) else parser.parse(text, line_count)
        return None if found is None else arrow.record_batch(found)

    def broken(self, lines: Sequence[bytes], columns: Sequence[str]) -> Iterator[int]:
        """Yields the numbers of the lines that are no rows, in order, by halves. The parse of all lines comes first."""
        ranges = [(0, len(lines))]
        while ranges:
            begin, end = ranges.pop()
            if self.parse(b"\n".join(lines[begin:end]) + b"\n", end - begin, columns) is not None:
                continue
            if end - begin == 1:
                yield begin
            else:
                middle = (begin + end) // 2
                ranges += [(middle, end), (begin, middle)]

    def reason(self, line: bytes, columns: Sequence[str]) -> tuple[str | None, str]:
        """What is wrong with a broken line: the column, if it is one value, and the value and what is allowed."""
        if not line.strip(b"\r\n"):
            return None, "empty; allowed: empty lines at the end of a file"
        csv = require("pyarrow.csv", package="pyarrow", purpose="reading text files")
        counts: list[int] = []

        def count(row: Any) -> str:
            counts.append(row.actual_columns)
            return "skip"

        binary = require("pyarrow", package="pyarrow", purpose="reading text files").binary()
        convert = csv.ConvertOptions(column_types=dict.fromkeys(self.names, binary))
        values = self._read(line + b"\n", convert, len(line) + 2, count, quote=self.quote)
        if counts:
            return None, f"{counts[0]} columns; allowed: {len(self.names)}"
        cells = {name: values.column(number)[0].as_py() for number, name in enumerate(self.names)}
        for name, cell in cells.items():
            if cell is not None and cell.endswith(b"\n"):
                return name, f"quoted value {_shown(cell)} goes over the end of the line; allowed: values within a line"
        for name in columns:
            if self.parse(line + b"\n", 1, [name]) is None:
                advice = self._advice(name, cells[name].decode(errors="replace"))
                return name, f"value {_shown(cells[name])}; allowed: {self.types[name]}{advice}"
        return None, "no row"  # not reached

    def _advice(self, column: str, cell: str) -> str:
        """What to do about a value that other tools write for null, or in a column of another type."""
        plain, kind = cell.strip().lower(), str(arrow_type(self.types[column]))
        if plain in _NULLS:
            nulls = ", ".join(f"'{null}'" for null in (*self.nulls, cell))
            return f"; if it stands for null: nulls = [{nulls}] under [text] in the schema"
        if kind in ("int64", "uint64") and WHOLE_WITH_POINT.fullmatch(plain):
            return f"; {KEEP_INTEGERS}"
        other = None
        if plain in _BOOLEANS and kind != "bool":
            other = "bool"
        elif kind == "int64" and _is_unsigned(plain):
            other = "uint64"
        elif kind == "int64" and not plain.removeprefix("-").isdecimal():
            # Of a hashed column whose first block has digits alone.
            other = "string"
        if other is None:
            return ""
        return f'; if the column is of {other}: types = {{ "{column}" = "{other}" }} under [text] in the schema'

    def _parse(self, text: bytes, line_count: int, columns: Sequence[str], chunk_bytes: int) -> Any | None:
        arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
        csv = require("pyarrow.csv", package="pyarrow", purpose="reading text files")
        convert = csv.ConvertOptions(
            include_columns=list(columns),
            column_types={name: arrow_type(self.types[name]) for name in columns},
            null_values=list(self.nulls),
            strings_can_be_null=True,
            # Of each value alone, that takes a tenth of the time.
            check_utf8=not text.isascii(),
        )
        # To pyarrow, a quote that is open at the end of the text is no error. It would swallow a row after it. So the
        # last line is given twice.
        last = text[text.rfind(b"\n", 0, -1) + 1 :]
        quote = self.quote if self.quote is not None and self.quote.encode() in text else None
        is_guarded = quote is not None and quote.encode() in last
        if is_guarded:
            text += last if text.endswith(b"\n") else b"\n" + last
            line_count += 1
        try:
            table = self._read(text, convert, chunk_bytes, None, quote=quote)
        except arrow.ArrowInvalid:
            return None
        if len(table) != line_count:
            return None
        return table.slice(0, line_count - 1) if is_guarded else table

    def _read(self, text: bytes, convert: Any, chunk_bytes: int, invalid: Any, *, quote: str | None) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
        csv = require("pyarrow.csv", package="pyarrow", purpose="reading text files")
        use_threads = invalid is None and arrow_threads()
        return csv.read_csv(
            arrow.BufferReader(text),
            csv.ReadOptions(column_names=list(self.names), block_size=chunk_bytes, use_threads=use_threads),
            csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=False if quote is None else quote,
                invalid_row_handler=invalid,
            ),
            convert,
        )


def arrow_type(kind: Any) -> Any:
    """The `pyarrow.DataType` of a type of `TextFormat`."""
    arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
    return arrow.type_for_alias(kind) if isinstance(kind, str) else kind


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
    ends = arrow.py_buffer(np.array([0, len(text)], np.int32))
    try:
        arrow.StringArray.from_buffers(1, ends, arrow.py_buffer(text)).validate(full=True)
    except arrow.ArrowInvalid:
        return False
    return True


def _shown(cell: bytes) -> str:
    return repr(cell[:_SHOWN_BYTES].decode(errors="backslashreplace"))


def _is_unsigned(text: str) -> bool:
    """Whether it is an integer that uint64 has, and int64 lacks. `int` refuses thousands of digits by a ValueError."""
    digits = text.lstrip("0")
    return digits.isascii() and digits.isdecimal() and len(digits) <= 20 and INT64_MAX < int(digits) < 1 << 64
