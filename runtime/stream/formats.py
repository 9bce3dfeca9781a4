# SPDX-License-Identifier: Apache-2.0
"""Which format a file of a stream has."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import FORMATS, DataFile
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.parquet_file import ParquetFile
from sennit.runtime.stream.text_file import TextFile, with_types
from sennit.runtime.stream.text_format import TextFormat


def open_files(files: Sequence[DataFile], columns: Sequence[str], text: TextFormat | None) -> tuple[StreamFile, ...]:
    """Reads what the files' formats say about their rows.

    Where a name does not say the format, it is text if `text` is given. Otherwise the first bytes say it.
    """
    form, opened = text, list[StreamFile]()
    for file in files:
        kind = file.format or ("text" if text is not None else _sniff(file))
        if kind == "Parquet":
            opened.append(ParquetFile.of(file))
        elif kind == "Arrow":
            opened.append(ArrowFile.of(file))
        else:
            form = with_types(file, form or TextFormat(), columns)
            opened.append(TextFile.of(file, form, columns))
    if text is not None and (skipped := sum(file.skipped_rows for file in opened)) > text.skip_broken:
        raise DataError(
            f"{opened[0].name} and other files: {skipped} broken lines; allowed: {text.skip_broken} (skip_broken)"
        )
    return tuple(opened)


def _sniff(file: DataFile) -> str:
    with file.open() as stream:
        head = stream.read(8)
    for magic, kind in ((b"PAR1", "Parquet"), (b"ARROW1", "Arrow")):
        if head.startswith(magic):
            return kind
    suffixes = ", ".join(FORMATS)
    raise DataError(f"{file}: neither Parquet nor Arrow by its first bytes; allowed: these, and names with {suffixes}")
