# SPDX-License-Identifier: Apache-2.0
"""Arrow files of a stream (the IPC file format, which is also version 2 of Feather): blocks are record batches.

They are not mapped into memory: a process that reads from a map of a file that is cut short is killed by a signal. So
the columns asked for of one record batch are in memory at a time.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.footer import changed, digest_of, read_tail

_MAGIC: Final = b"ARROW1"
_KIND: Final = "Arrow"


@dataclass(frozen=True, kw_only=True)
class ArrowFile:
    """A `StreamFile`.

    The footer says nothing of values, and two files of fixed-width columns may have the same. So one column, the
    narrowest, tells contents apart, and is compared at each read.
    """

    file: DataFile
    block_rows: tuple[int, ...]
    digest: str
    schema: Any
    footer_digest: str
    check_column: int
    """The field that is compared."""

    checks: tuple[int, ...]
    """For each block, CRC-32 of that column."""

    is_sequential: bool = False
    skipped_rows: int = 0

    @staticmethod
    def of(file: DataFile) -> ArrowFile:
        """Reads the footer, and one column. Raises DataError for another format, and for a file that is not whole."""
        with _opened(file) as (stream, tail, ipc):
            schema = ipc.open_file(stream).schema
            narrowest = min(range(len(schema)), key=lambda number: _width(schema.field(number).type), default=0)
            batches = _Batches(file, ipc.open_file(stream, options=ipc.IpcReadOptions(included_fields=[narrowest])))
            rows, checks = [], []
            for number in range(batches.count):
                batch = batches.get(number)
                rows.append(len(batch))
                checks.append(_crc(batch.column(0)))
            footer_digest = digest_of(stream, tail)
        digest = hashlib.sha256(f"{footer_digest} {checks}".encode()).hexdigest()
        return ArrowFile(
            file=file,
            block_rows=tuple(rows),
            digest=digest,
            schema=schema,
            footer_digest=footer_digest,
            check_column=narrowest,
            checks=tuple(checks),
        )

    @property
    def name(self) -> str:
        return self.file.name

    def where(self, block: int, row: int | None = None) -> str:
        return f"record batch {block}" if row is None else f"record batch {block}, row {row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """Yields the rows of a record batch from `begin` on."""
        with _opened(self.file) as (stream, tail, ipc):
            if digest_of(stream, tail) != self.footer_digest:
                raise changed(self.file)
            wanted = [self.schema.get_field_index(name) for name in columns]
            fields = sorted({*wanted, self.check_column})
            batches = _Batches(self.file, ipc.open_file(stream, options=ipc.IpcReadOptions(included_fields=fields)))
            batch = batches.get(block)
        if _crc(batch.column(fields.index(self.check_column))) != self.checks[block]:
            raise changed(self.file)
        batch = batch.select([fields.index(number) for number in wanted])
        for first in range(begin, len(batch), PIECE_ROWS):
            yield batch.slice(first, PIECE_ROWS)

    def span(self, block: int, column: str) -> None:
        """The format has no statistics."""


class _Batches:
    """The record batches of an open file. Raises DataError with the number of one that cannot be read."""

    def __init__(self, file: DataFile, reader: Any) -> None:
        self._file = file
        self._reader = reader
        self.count = int(reader.num_record_batches)

    def get(self, number: int) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose="an Arrow data set")
        try:
            return self._reader.get_batch(number)
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{self._file}: record batch {number} cannot be read: {error}") from error


@contextmanager
def _opened(file: DataFile) -> Iterator[tuple[Any, bytes, Any]]:
    """The open file, its tail, and pyarrow.ipc."""
    ipc = require("pyarrow.ipc", package="pyarrow", purpose="an Arrow data set")
    arrow = require("pyarrow", package="pyarrow", purpose="an Arrow data set")
    with file.open_native() as stream:
        head = bytes(stream.read(8))
        for magic, found, remedy in (
            (b"FEA1", "Feather version 1", "write version 2"),
            (b"\xff\xff\xff\xff", "an Arrow stream", "write it with pyarrow.ipc.new_file"),
        ):
            if head.startswith(magic):
                raise DataError(f"{file}: is {found}; allowed: the Arrow file format ({remedy})")
        tail = read_tail(file, stream, _MAGIC, _KIND)
        try:
            stream.seek(0)
            yield stream, tail, ipc
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{file}: not a readable Arrow file: {error}") from error


def _width(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # not of one width
        return 1 << 30


def _crc(column: Any) -> int:
    crc = 0
    for buffer in column.buffers():
        if buffer is not None:
            crc = zlib.crc32(buffer, crc)
    return crc
