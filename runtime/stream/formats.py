# SPDX-License-Identifier: Apache-2.0
"""Which format a file of a stream has."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.files import FORMATS, DataFile
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.folder_columns import own_columns, with_folders
from sennit.runtime.stream.parquet_file import ParquetFile
from sennit.runtime.stream.text_file import TextFile, names_of, with_types

_OPENED_AT_ONCE: Final = 4


def open_files(
    files: Sequence[DataFile],
    columns: Sequence[str],
    form: TextFormat,
    time_column: str | None = None,
    before: StreamFile | None = None,
) -> tuple[StreamFile, ...]:
    """Reads what the files' formats say about their rows.

    Where a name does not say the format, the first bytes do. Names of folders are columns, too (`folder_columns`).
    `form`: how text files are read. `time_column`: the one whose least and greatest values will be asked for.
    `before`: the file that comes before them, if they come while a run reads.
    """
    kinds = [file.format or _sniff(file, form) for file in files]
    form = typed(files, columns, form)

    def open_one(file: DataFile, kind: str) -> StreamFile:
        if kind == "Parquet":
            return ParquetFile.of(file, time_column)
        return ArrowFile.of(file) if kind == "Arrow" else TextFile.of(file, form, _own(file, form, columns))

    # Hashing takes a processor, and an object store takes its time.
    with ThreadPoolExecutor(_OPENED_AT_ONCE, thread_name_prefix="sennit-files") as pool:
        opened = tuple(pool.map(open_one, files, kinds))
    check_skipped(opened, form)
    return with_folders(files, opened, columns, time_column, before)


def typed(files: Sequence[DataFile], columns: Sequence[str], form: TextFormat) -> TextFormat:
    """`form` with a type for each column, if any of the files is text. Types of the first one are those of all."""
    for file in files:
        if is_text(file, form):
            form = with_types(file, form, _own(file, form, columns))
    return form


def _own(file: DataFile, form: TextFormat, columns: Sequence[str]) -> list[str]:
    return own_columns(file, columns, lambda: names_of(file, form))


def is_text(file: DataFile, form: TextFormat) -> bool:
    return (file.format or _sniff(file, form)) not in ("Parquet", "Arrow")


def check_skipped(files: Sequence[StreamFile], form: TextFormat) -> None:
    """Raises DataError if more rows of these files are left out than `form` allows."""
    if (skipped := sum(file.skipped_rows for file in files)) > form.skip_broken:
        raise DataError(
            f"{files[0].name} and other files: {skipped} broken rows; allowed: {form.skip_broken} (skip_broken)"
        )


def _sniff(file: DataFile, form: TextFormat) -> str:
    with file.open() as stream:
        head = stream.read(8)
    for magic, kind in ((b"PAR1", "Parquet"), (b"ARROW1", "Arrow")):
        if head.startswith(magic):
            return kind
    if form.is_described:
        return "text"
    raise (DataError if len(head) == 8 else Incomplete)(
        f"{file}: neither Parquet nor Arrow by its first bytes; allowed: these, names with {', '.join(FORMATS)}, and "
        "text with names or a delimiter in the schema"
    )
