# SPDX-License-Identifier: Apache-2.0
"""Parquet files of a stream: blocks are row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import PIECE_ROWS, arrow_threads
from sennit.runtime.stream.footer import changed, digest_of, read_tail

_MAGIC: Final = b"PAR1"
_BUFFER_BYTES: Final = 1 << 16
"""Each column of a row group is read in pieces of this size. pyarrow's default reads columns whole."""


@dataclass(frozen=True, kw_only=True)
class ParquetFile:
    """A `StreamFile`. Each `read` opens the file anew and compares its footer with that of the index."""

    file: DataFile
    block_rows: tuple[int, ...]
    digest: str
    schema: Any
    is_sequential: bool = False
    skipped_rows: int = 0

    @staticmethod
    def of(file: DataFile) -> ParquetFile:
        """Reads the footer. Raises DataError for a file that is no Parquet file, or not a whole one."""
        with file.open_native() as stream:
            tail = read_tail(file, stream, _MAGIC, "Parquet")
            metadata = _metadata(file, tail)
            return ParquetFile(
                file=file,
                block_rows=tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)),
                digest=digest_of(stream, tail),
                schema=_source(stream, metadata).schema_arrow,
            )

    @property
    def name(self) -> str:
        return self.file.name

    def where(self, block: int, row: int | None = None) -> str:
        return f"row group {block}" if row is None else f"row group {block}, row {row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """Yields the rows of a row group from `begin` on. Rows before are decoded and dropped."""
        _, arrow = _modules()
        with self.file.open_native() as stream:
            metadata = _metadata(self.file, self._checked_tail(stream))
            try:
                passed = 0
                for batch in _source(stream, metadata).iter_batches(
                    PIECE_ROWS, row_groups=[block], columns=list(columns), use_threads=arrow_threads()
                ):
                    first = max(0, begin - passed)
                    passed += len(batch)
                    if first < len(batch):
                        # A column name is also the prefix of others: `a` yields `a.b`, too.
                        yield batch.select(columns).slice(first)
            except (OSError, arrow.ArrowException) as error:
                raise DataError(f"{self.name}: row group {block} cannot be read: {error}") from error

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        """From the row group's statistics. None where there are none, or where they leave nulls open."""
        _, arrow = _modules()
        kind = self.schema.field(column).type
        with self.file.open_native() as stream:
            metadata = _metadata(self.file, self._checked_tail(stream))
        # Columns of the schema are fields, columns of a row group are leaves.
        group = metadata.row_group(block)
        leaf = next(number for number in range(group.num_columns) if group.column(number).path_in_schema == column)
        found = group.column(leaf).statistics
        if found is None or not (found.has_min_max and found.has_null_count) or found.null_count:
            return None
        if arrow.types.is_integer(kind) or arrow.types.is_floating(kind):
            return found.min, found.max
        if (arrow.types.is_timestamp(kind) and found.physical_type == "INT64") or arrow.types.is_date32(kind):
            return found.min_raw, found.max_raw
        return None

    def _checked_tail(self, stream: Any) -> bytes:
        tail = read_tail(self.file, stream, _MAGIC, "Parquet")
        if digest_of(stream, tail) != self.digest:
            raise changed(self.file)
        return tail


def _modules() -> tuple[Any, Any]:
    purpose = "a Parquet data set"
    return (
        require("pyarrow.parquet", package="pyarrow", purpose=purpose),
        require("pyarrow", package="pyarrow", purpose=purpose),
    )


def _source(stream: Any, metadata: Any) -> Any:
    parquet, _ = _modules()
    return parquet.ParquetFile(stream, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _metadata(file: DataFile, tail: bytes) -> Any:
    _, arrow = _modules()
    try:
        return _parsed(tail)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error


@lru_cache(maxsize=2)
def _parsed(tail: bytes) -> Any:
    """Blocks of one file are read one after another, and a footer of many row groups is long to parse."""
    parquet, arrow = _modules()
    return parquet.read_metadata(arrow.BufferReader(tail))
