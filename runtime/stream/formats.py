# SPDX-License-Identifier: Apache-2.0
"""Which format a file of a stream has."""

from __future__ import annotations

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import FORMATS, DataFile
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.parquet_file import ParquetFile


def open_file(file: DataFile) -> StreamFile:
    """Reads what a file's format says about its rows. Where the name does not say the format, the first bytes do."""
    if (kind := file.format) is None:
        with file.open() as stream:
            head = stream.read(8)
        kind = "Parquet" if head.startswith(b"PAR1") else "Arrow" if head.startswith(b"ARROW1") else None
    if kind == "Parquet":
        return ParquetFile.of(file)
    if kind == "Arrow":
        return ArrowFile.of(file)
    suffixes = ", ".join(FORMATS)
    raise DataError(f"{file}: neither Parquet nor Arrow by its first bytes; allowed: these, and names with {suffixes}")
