# SPDX-License-Identifier: Apache-2.0
"""Parquet files of a stream: blocks are row groups."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile
from sennit.runtime.data.packages import require
from sennit.runtime.stream.files import PIECE_ROWS, arrow_threads
from sennit.runtime.stream.footer import changed, digest_of, end_digest, read_tail

_MAGIC: Final = b"PAR1"
_BUFFER_BYTES: Final = 1 << 16
"""Each column of a row group is read in pieces of this size. pyarrow's default reads columns whole."""

_PIECE_BYTES: Final = 5 << 20
"""Of a piece, about. Arrow begins anew for each column of a piece: a click with 40 columns takes 20 % longer in pieces
of 2 MiB, and memory of 8 open row groups is 8 % less."""

_PIECE_MIN_ROWS: Final = 1 << 10
_VALUE_BYTES: Final = 8
"""Of a value of a column, about."""


@dataclass(frozen=True, kw_only=True)
class ParquetFile:
    """A `StreamFile`. Each `read` opens the file anew and compares its end with that of the index."""

    file: DataFile
    block_rows: tuple[int, ...]
    digest: str
    end_digest: str
    """Of the end of the file, which is compared at each read."""

    schema: Any
    spans: dict[str, tuple[tuple[Any, Any] | None, ...]]
    """By column, what `span` returns for each block: of the columns that `of` was asked for."""

    is_sequential: bool = False
    skipped_rows: int = 0

    @staticmethod
    def of(file: DataFile, span_column: str | None = None) -> ParquetFile:
        """Reads the footer. `span_column`: the column whose least and greatest values will be asked for.

        Raises DataError for a file that is no Parquet file, and Incomplete for one that is not whole.
        """
        with file.open_native() as stream:
            tail = read_tail(file, stream, _MAGIC, "Parquet")
            digest = digest_of(stream, tail)
            metadata = _footers.parsed(file, digest, tail)
            schema = _source(stream, metadata).schema_arrow
            spans = {}
            if span_column is not None and span_column in schema.names:
                groups = range(metadata.num_row_groups)
                spans[span_column] = tuple(_span(metadata.row_group(one), schema, span_column) for one in groups)
            return ParquetFile(
                file=file,
                block_rows=tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)),
                digest=digest,
                end_digest=end_digest(stream),
                schema=schema,
                spans=spans,
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
            metadata = self._metadata(stream)
            try:
                passed, wanted = 0, list(columns)
                rows = _piece_rows(metadata.row_group(block), columns)
                for batch in _source(stream, metadata).iter_batches(
                    rows, row_groups=[block], columns=wanted, use_threads=arrow_threads()
                ):
                    first = max(0, begin - passed)
                    passed += len(batch)
                    if first < len(batch):
                        # A column name is also the prefix of others: `a` yields `a.b`, too.
                        own = batch if batch.schema.names == wanted else batch.select(wanted)
                        yield own.slice(first) if first else own
            except (OSError, arrow.ArrowException) as error:
                raise DataError(f"{self.name}: row group {block} cannot be read: {error}") from error

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        """From the row group's statistics. None where there are none, or where they leave nulls open."""
        if column in self.spans:
            return self.spans[column][block]
        with self.file.open_native() as stream:
            metadata = self._metadata(stream)
        return _span(metadata.row_group(block), self.schema, column)

    def _metadata(self, stream: Any) -> Any:
        """The parsed footer of the open file, if that is the file of the index."""
        if end_digest(stream) == self.end_digest:
            if (known := _footers.known(self.digest)) is not None:
                return known
            tail = read_tail(self.file, stream, _MAGIC, "Parquet")
            if digest_of(stream, tail) == self.digest:
                return _footers.parsed(self.file, self.digest, tail)
        else:
            read_tail(self.file, stream, _MAGIC, "Parquet")  # says if the file was cut
        raise changed(self.file)


class _Footers:
    """Footers that were parsed, by their digest. A long one takes longer to parse than a row group to read."""

    MAX_BYTES: Final = 4 << 20
    """Of footers as they are in files. Parsed, they take nine times as much. The last one is always kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def known(self, digest: str) -> Any | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def parsed(self, file: DataFile, digest: str, tail: bytes) -> Any:
        parquet, arrow = _modules()
        try:
            metadata = parquet.read_metadata(arrow.BufferReader(tail))
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
        with self._lock:
            self._kept[digest] = metadata
            while len(self._kept) > 1 and sum(one.serialized_size for one in self._kept.values()) > self.MAX_BYTES:
                self._kept.popitem(last=False)
        return metadata


_footers = _Footers()


def _piece_rows(group: Any, columns: Sequence[str]) -> int:
    """Rows to decode at once. A block that stays open keeps a piece, and a rank may have many open."""
    # Lists and long texts have many bytes a row. Dictionaries have fewer in the file than in memory.
    names = {name.partition(".")[0] for name in columns}
    leaves = (group.column(number) for number in range(group.num_columns))
    stored = sum(one.total_uncompressed_size for one in leaves if one.path_in_schema.partition(".")[0] in names)
    row_bytes = max(_VALUE_BYTES * len(columns), stored // max(1, group.num_rows), 1)
    return int(max(_PIECE_MIN_ROWS, min(PIECE_ROWS, _PIECE_BYTES // row_bytes)))


def _span(group: Any, schema: Any, column: str) -> tuple[Any, Any] | None:
    _, arrow = _modules()
    kind = schema.field(column).type
    # Columns of the schema are fields, columns of a row group are leaves.
    leaves = (group.column(number) for number in range(group.num_columns))
    leaf = next((one for one in leaves if one.path_in_schema == column), None)
    found = None if leaf is None else leaf.statistics
    if found is None or not (found.has_min_max and found.has_null_count) or found.null_count:
        return None
    if arrow.types.is_integer(kind) or arrow.types.is_floating(kind):
        return found.min, found.max
    if (arrow.types.is_timestamp(kind) and found.physical_type == "INT64") or arrow.types.is_date32(kind):
        return found.min_raw, found.max_raw
    return None


def _modules() -> tuple[Any, Any]:
    purpose = "a Parquet data set"
    return (
        require("pyarrow.parquet", package="pyarrow", purpose=purpose),
        require("pyarrow", package="pyarrow", purpose=purpose),
    )


def _source(stream: Any, metadata: Any) -> Any:
    parquet, _ = _modules()
    return parquet.ParquetFile(stream, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
