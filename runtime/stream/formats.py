# SPDX-License-Identifier: Apache-2.0
"""Which format a file of a stream has."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import FORMATS, DataFile
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.parquet_file import ParquetFile
from sennit.runtime.stream.text_file import TextFile, with_types


def open_files(files: Sequence[DataFile], columns: Sequence[str], form: TextFormat) -> tuple[StreamFile, ...]:
    """Reads what the files' formats say about their rows.

    Where a name does not say the format, the first bytes do. `form`: how text files are read.
    """
    opened = list[StreamFile]()
    for file in files:
        kind = file.format or _sniff(file, form)
        if kind == "Parquet":
            opened.append(ParquetFile.of(file))
        elif kind == "Arrow":
            opened.append(ArrowFile.of(file))
        else:
            form = with_types(file, form, columns)
            opened.append(TextFile.of(file, form, columns))
    if (skipped := sum(file.skipped_rows for file in opened)) > form.skip_broken:
        raise DataError(
            f"{opened[0].name} and other files: {skipped} broken lines; allowed: {form.skip_broken} (skip_broken)"
        )
    return tuple(opened)


def _sniff(file: DataFile, form: TextFormat) -> str:
    with file.open() as stream:
        head = stream.read(8)
    for magic, kind in ((b"PAR1", "Parquet"), (b"ARROW1", "Arrow")):
        if head.startswith(magic):
            return kind
    if form.is_described:
        return "text"
    raise DataError(
        f"{file}: neither Parquet nor Arrow by its first bytes; allowed: these, names with {', '.join(FORMATS)}, and "
        "text with names or a delimiter in the schema"
    )
