# SPDX-License-Identifier: Apache-2.0
"""Text files of a stream: blocks are whole lines, of about 2 MiB together. One pass over the text finds them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from sennit.offload.arrow_columns import content_hash
from sennit.runtime.data.column_types import check_names
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import CODECS, DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.footer import changed
from sennit.runtime.stream.text_parser import TextParser, arrow_type

BLOCK_BYTES: Final = 2 << 20
"""A reader has a block for each slice open, and holds its parsed rows: about 3 MB. The number is part of what
identifies a stream."""

_LINE_BYTES: Final = 64 << 20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A `StreamFile`. Each `read` compares the hash of the block's text with that of the index."""

    file: DataFile
    parser: TextParser
    block_rows: tuple[int, ...]
    digest: str
    """SHA-256 of all lines, without the header."""

    schema: Any
    """Columns that no one asked for are text."""

    offsets: tuple[int, ...]
    """Where each block begins in the text, in bytes, and where the last one ends."""

    first_lines: tuple[int, ...]
    """The number of each block's first line in the file, from 1."""

    checks: tuple[int, ...]
    """`content_hash` of each block."""

    broken: tuple[tuple[int, ...], ...]
    """For each block, the lines of it that are left out, from 0."""

    decoders: _Decoders = field(compare=False, repr=False)

    @staticmethod
    def of(file: DataFile, form: TextFormat, columns: Sequence[str]) -> TextFile:
        """Passes over the text once. `form` has the types of all `columns`.

        Raises DataError for a header without these columns, for a first line that is no row, and for more broken lines
        than `form.skip_broken`.
        """
        arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
        digest, scanned, offsets, next_line = hashlib.sha256(), [], [0], 1
        with _opened(file) as stream:
            names, header = _header(file, stream, form)
            check_names(file.name, names, columns)
            types = {name: form.types.get(name, "string") for name in names}
            parser = TextParser(
                names=names, types=types, delimiter=_delimiter(file, form), quote=form.quote, nulls=form.nulls
            )
            scan = _Scan(file, parser, tuple(columns), form.skip_broken)
            offsets[0], next_line = len(header.skipped), 1 + header.line_count
            for text in _blocks(file, stream, header.rest):
                digest.update(text)
                scanned.append(scan.block(text, next_line))
                offsets.append(offsets[-1] + len(text))
                next_line += scanned[-1].line_count
        return TextFile(
            file=file,
            parser=parser,
            block_rows=tuple(one.line_count - len(one.broken) for one in scanned),
            digest=digest.hexdigest(),
            schema=arrow.schema([(name, arrow_type(kind)) for name, kind in types.items()]),
            offsets=tuple(offsets),
            first_lines=tuple(one.first_line for one in scanned),
            checks=tuple(one.check for one in scanned),
            broken=tuple(one.broken for one in scanned),
            decoders=_Decoders(),
        )

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_sequential(self) -> bool:
        return _is_compressed(self.file) and len(self.block_rows) > 1

    @property
    def skipped_rows(self) -> int:
        return sum(map(len, self.broken))

    def where(self, block: int, row: int | None = None) -> str:
        if row is None:
            return f"the block at line {self.first_lines[block]}"
        for line in self.broken[block]:
            row += line <= row
        return f"line {self.first_lines[block] + row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """Yields the rows of a block from `begin` on. All lines of the block are parsed."""
        if not self.block_rows[block]:
            return
        text = self._text(block)
        if content_hash(text) != self.checks[block]:
            raise changed(self.file)
        if self.broken[block]:
            left_out = set(self.broken[block])
            text = b"\n".join(line for number, line in enumerate(_lines(text)) if number not in left_out)
        rows = self.parser.parse(text, self.block_rows[block], columns)
        if rows is None:
            row = next(self.parser.broken(_lines(text), columns))
            column, reason = self.parser.reason(_lines(text)[row], columns)
            raise _broken(self.file, column, self.where(block, row), reason)
        for first in range(begin, len(rows), PIECE_ROWS):
            yield rows.slice(first, PIECE_ROWS)

    def span(self, block: int, column: str) -> None:
        """Text has no statistics."""

    def _text(self, block: int) -> bytes:
        if not _is_compressed(self.file):
            with self.file.open_native() as stream:
                stream.seek(self.offsets[block])
                return self._part(stream, block)
        at, texts = self.decoders.take(block) or (0, self._texts())
        text = next(islice(texts, block - at, None))
        if block + 1 < len(self.block_rows):
            self.decoders.keep(block + 1, texts)
        else:
            next(texts, None)  # the end of a compressed file has its checksum
        return text

    def _texts(self) -> Iterator[bytes]:
        with _opened(self.file) as stream:
            if len(_read(stream, self.offsets[0])) != self.offsets[0]:
                raise changed(self.file)
            for block in range(len(self.block_rows)):
                yield self._part(stream, block)
            while rest := stream.read(BLOCK_BYTES):
                if rest.strip(b"\r\n"):
                    raise changed(self.file)

    def _part(self, stream: Any, block: int) -> bytes:
        size = self.offsets[block + 1] - self.offsets[block]
        text = _read(stream, size)
        if len(text) != size:
            raise changed(self.file)
        return text


def names_of(file: DataFile, form: TextFormat) -> tuple[str, ...]:
    """The columns of a text file."""
    with _opened(file) as stream:
        return _header(file, stream, form)[0]


def with_types(file: DataFile, form: TextFormat, columns: Sequence[str]) -> TextFormat:
    """`form` with a type for each of these columns. Types that it lacks are inferred from the file's first block, by
    pyarrow, but that integers of 64 bits without a sign are uint64.
    """
    unknown = [name for name in columns if name not in form.types]
    if not unknown:
        return form
    arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
    csv = require("pyarrow.csv", package="pyarrow", purpose="reading text files")
    with _opened(file) as stream:
        names, header = _header(file, stream, form)
        check_names(file.name, names, columns)
        text = next(_blocks(file, stream, header.rest), b"")
    found: dict[str, Any] = dict.fromkeys(unknown, "string")
    if text:
        quote = False if form.quote is None else form.quote

        def inferred(columns: Sequence[str], kinds: dict[str, Any]) -> dict[str, Any]:
            try:
                table = csv.read_csv(
                    arrow.BufferReader(text),
                    csv.ReadOptions(column_names=list(names), block_size=len(text) + 1),
                    csv.ParseOptions(
                        delimiter=_delimiter(file, form), quote_char=quote, invalid_row_handler=lambda row: "skip"
                    ),
                    csv.ConvertOptions(
                        include_columns=columns,
                        column_types=kinds,
                        null_values=list(form.nulls),
                        strings_can_be_null=True,
                    ),
                )
            except arrow.ArrowInvalid:
                return {}  # no line is a row: what is wrong is said when the first is read
            made = ((name, table.schema.field(name).type) for name in columns)
            return {name: kind for name, kind in made if not arrow.types.is_null(kind)}

        found |= inferred(unknown, {})
        for name in unknown:
            if str(found[name]) == "double":
                # To pyarrow, integers that int64 lacks are floating-point numbers.
                found |= inferred([name], {name: arrow.uint64()})
    return replace(form, types={**form.types, **found})


class _Decoders:
    """Compressed files that are open at the begin of a block, for a reader that goes on. They stay in their process."""

    MAX: Final = 64  # one for each region of an evaluation, of about 100 KB

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Iterator[bytes]] = {}

    def take(self, block: int) -> tuple[int, Iterator[bytes]] | None:
        """The one that is the least way before this block, and the block where it is."""
        with self._lock:
            at = max((one for one in self._kept if one <= block), default=None)
            return None if at is None else (at, self._kept.pop(at))

    def keep(self, block: int, texts: Iterator[bytes]) -> None:
        with self._lock:
            self._kept.pop(block, None)
            self._kept[block] = texts
            if len(self._kept) > self.MAX:
                del self._kept[next(iter(self._kept))]

    def __reduce__(self) -> tuple[type[_Decoders], tuple[()]]:
        return _Decoders, ()


@dataclass(frozen=True, kw_only=True)
class _Header:
    skipped: bytes
    """The text before the first row."""

    rest: bytes
    """Text that was read already."""

    line_count: int


@dataclass(frozen=True, kw_only=True)
class _Block:
    first_line: int
    line_count: int
    check: int
    broken: tuple[int, ...]


class _Scan:
    """What the pass over a file looks for in each block."""

    def __init__(self, file: DataFile, parser: TextParser, columns: Sequence[str], skip_broken: int) -> None:
        self._file, self._parser, self._columns = file, parser, columns
        self._skip_broken = self._left = skip_broken
        self._is_begin = True

    def block(self, text: bytes, first_line: int) -> _Block:
        line_count = int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))) + (not text.endswith(b"\n"))
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n") + text.endswith(b"\r"):
            number = next(number for number, line in enumerate(_lines(text)) if b"\r" in line.removesuffix(b"\r"))
            reason = "a carriage return within the line; allowed: lines that end in \\n or \\r\\n"
            raise _broken(self._file, None, f"line {first_line + number}", reason)
        broken: list[int] = []
        if self._skip_broken:
            if self._parser.parse(text, line_count, self._columns) is None:
                lines = _lines(text)
                for number in self._parser.broken(lines, self._columns):
                    broken.append(number)
                    self._left -= 1
                    if self._left < 0:
                        raise self._error(lines[number], first_line + number)
        elif self._is_begin:
            # What is wrong with the whole file shows in its first line.
            line = text.partition(b"\n")[0]
            if self._parser.parse(line + b"\n", 1, self._columns) is None:
                raise self._error(line, first_line)
        self._is_begin = False
        return _Block(first_line=first_line, line_count=line_count, check=content_hash(text), broken=tuple(broken))

    def _error(self, line: bytes, number: int) -> DataError:
        column, reason = self._parser.reason(line, self._columns)
        if self._skip_broken:
            reason += f" (broken lines that may be left out: {self._skip_broken}; this is one more)"
        return _broken(self._file, column, f"line {number}", reason)


def _broken(file: DataFile, column: str | None, where: str, reason: str) -> DataError:
    return DataError(f"{file}: {'' if column is None else f'column {column}, '}{where}: {reason}")


def _is_compressed(file: DataFile) -> bool:
    return _codec(file) is not None


def _codec(file: DataFile) -> str | None:
    return CODECS.get(PurePosixPath(file.path).suffix.lower())


@contextmanager
def _opened(file: DataFile) -> Iterator[Any]:
    """The text of a file from its begin, decompressed."""
    arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
    with file.open_native() as stream:
        yield stream if (codec := _codec(file)) is None else arrow.CompressedInputStream(stream, codec)


def _delimiter(file: DataFile, form: TextFormat) -> str:
    if form.delimiter is not None:
        return form.delimiter
    return "," if file.format == "CSV" else "\t"


def _header(file: DataFile, stream: Any, form: TextFormat) -> tuple[tuple[str, ...], _Header]:
    """The names of the columns, and where the first row begins."""
    text = _read(stream, BLOCK_BYTES)
    while b"\n" not in text and len(text) < _LINE_BYTES and (more := _read(stream, BLOCK_BYTES)):
        text += more
    skipped = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else b""
    text = text.removeprefix(_BYTE_ORDER_MARK)
    first, end, rest = text.partition(b"\n")
    found = _names(file, first, _delimiter(file, form), form.quote)
    if form.names is None:
        if not found:
            raise DataError(f"{file}: line 1: empty; allowed: the names of the columns")
        return found, _Header(skipped=skipped + first + end, rest=rest, line_count=1)
    if found == form.names:
        raise DataError(f"{file}: line 1: the names of the columns; allowed: a row, where names are given")
    return form.names, _Header(skipped=skipped, rest=text, line_count=0)


def _names(file: DataFile, line: bytes, delimiter: str, quote: str | None) -> tuple[str, ...]:
    arrow = require("pyarrow", package="pyarrow", purpose="reading text files")
    csv = require("pyarrow.csv", package="pyarrow", purpose="reading text files")
    parse = csv.ParseOptions(delimiter=delimiter, quote_char=False if quote is None else quote)
    if not line.strip(b"\r"):
        return ()
    try:
        return tuple(csv.read_csv(arrow.BufferReader(line + b"\n"), parse_options=parse).column_names)
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"{file}: line 1: {error}; allowed: the names of the columns, or a row") from error


def _blocks(file: DataFile, stream: Any, rest: bytes) -> Iterator[bytes]:
    """Cuts text at ends of lines. Empty lines at the end of the file belong to no block."""
    while piece := _read(stream, BLOCK_BYTES - len(rest) % BLOCK_BYTES):
        rest += piece
        if len(rest) % BLOCK_BYTES:
            break  # the end of the file
        if full := rest[: rest.rfind(b"\n") + 1].rstrip(b"\r\n"):
            end = rest.index(b"\n", len(full)) + 1
            yield rest[:end]
            rest = rest[end:]
        elif len(rest) > _LINE_BYTES:
            raise DataError(f"{file}: has a line of more than {_LINE_BYTES} bytes; allowed: lines of text")
    if full := rest.rstrip(b"\r\n"):
        yield full


def _read(stream: Any, size: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    parts = []
    while size > 0 and (part := bytes(stream.read(size))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _lines(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")
