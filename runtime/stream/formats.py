# SPDX-License-Identifier: Apache-2.0
"""Which format a file of a stream has."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import FORMATS, DataFile
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.parquet_file import ParquetFile
from sennit.runtime.stream.text_file import TextFile, with_types

_OPENED_AT_ONCE: Final = 4


def open_files(files: Sequence[DataFile], columns: Sequence[str], form: TextFormat) -> tuple[StreamFile, ...]:
    """Reads what the files' formats say about their rows.

    Where a name does not say the format, the first bytes do. `form`: how text files are read.
    """
    kinds = [file.format or _sniff(file, form) for file in files]
    for file, kind in zip(files, kinds, strict=True):
        if kind not in ("Parquet", "Arrow"):
            # The types of the first file are those of all.
            form = with_types(file, form, columns)

    def open_one(file: DataFile, kind: str) -> StreamFile:
        if kind == "Parquet":
            return ParquetFile.of(file)
        return ArrowFile.of(file) if kind == "Arrow" else TextFile.of(file, form, columns)

    # Hashing takes a processor, and an object store takes its time.
    with ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="sennit-files") as pool:
        opened = tuple(pool.map(open_one, files, kinds))
    if (skipped := sum(file.skipped_rows for file in opened)) > form.skip_broken:
        raise DataError(
            f"{opened[0].name} and other files: {skipped} broken lines; allowed: {form.skip_broken} (skip_broken)"
        )
    return opened


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
