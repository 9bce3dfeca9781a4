# SPDX-License-Identifier: Apache-2.0
"""A stream of a program's own, such as a torch `IterableDataset`: its rows become Arrow files, once.

An iterator has no row numbers: it cannot be shuffled, cut for ranks, or begun in the middle. Reading it again from its
beginning after each stop takes as long as the run so far, and gives the same rows only if its author took care. Files
have none of this, at the price of a copy of the data on a disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from sennit.runtime.data.column_types import cast, is_list, plain
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require

_PURPOSE: Final = "writing rows as Arrow files"
BLOCK_ROWS: Final = 1 << 14
FILE_ROWS: Final = 1 << 20


def spool(rows: Any, folder: str | Path) -> Path:
    """Writes all rows to a new folder of Arrow files, and returns it. It is data for `open_index` and `sennit train`.

    `rows`: `pyarrow.RecordBatch`es or `pyarrow.Table`s, or mappings, one a row, as of an `IterableDataset`: from names
    of columns to numbers, texts, None, or lists, arrays or tensors of these. Also a whole table, a reader of batches, a
    `pyarrow.dataset`, or what else has Arrow's stream interface, as frames of polars and pandas. What yields rows is
    read once, from its beginning to its end, and about 16,384 rows are in memory. How it groups rows changes nothing in
    the files.

    The folder is there when all rows are. Raises DataError for a folder that is there already, for no rows, and for
    rows whose columns or types are not those of the first ones.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    ipc = require("pyarrow.ipc", package="pyarrow", purpose=_PURPOSE)
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder}: is there already; allowed: a new folder")
    # A name with a dot is no data to anyone.
    partial = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        blocks = _blocks(arrow, _items(arrow, rows))
        number = 0
        while (first := next(blocks, None)) is not None:
            with ipc.new_file(str(partial / f"part-{number:05}.arrow"), first.schema) as writer:
                for block in chain([first], islice(blocks, FILE_ROWS // BLOCK_ROWS - 1)):
                    writer.write_batch(block)
            number += 1
        if not number:
            raise DataError(f"{folder}: no rows; allowed: at least one")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _items(arrow: Any, rows: Any) -> Any:
    """What has rows: batches, tables or mappings. A table itself would yield its columns, and a data set nothing."""
    if hasattr(rows, "__arrow_c_stream__"):  # https://arrow.apache.org/docs/format/CDataInterface
        return arrow.RecordBatchReader.from_stream(rows)
    if hasattr(rows, "to_batches"):
        return rows.to_batches()
    return rows


def _blocks(arrow: Any, rows: Iterable[Any]) -> Iterator[Any]:
    """Record batches of BLOCK_ROWS rows, and the rest."""
    waiting: list[Any] = []
    count = 0
    for table in _tables(arrow, rows):
        waiting.append(table)
        count += len(table)
        if count >= BLOCK_ROWS:
            whole = arrow.concat_tables(waiting)
            end = count - count % BLOCK_ROWS
            yield from (_one_batch(whole.slice(begin, BLOCK_ROWS)) for begin in range(0, end, BLOCK_ROWS))
            waiting, count = [whole.slice(end)], count - end
    if count:
        yield _one_batch(arrow.concat_tables(waiting))


def _one_batch(table: Any) -> Any:
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    try:
        # A slice keeps the buffers of what it was cut of, and a copy has its own. So files have the same bytes.
        (batch,) = table.take(list(range(len(table)))).combine_chunks().to_batches()
    except arrow.ArrowNotImplementedError as error:
        allowed = "numbers, texts, bytes, times, and lists of these"
        raise DataError(f"columns {_text(table.schema)}: {error}; allowed: {allowed}") from error
    return batch


def _tables(arrow: Any, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows as tables with one schema."""
    schema, first, samples = None, 0, list[dict[str, Any]]()
    for one in rows:
        if isinstance(one, arrow.RecordBatch | arrow.Table) and not samples:
            table = _without_views(arrow, one if isinstance(one, arrow.Table) else arrow.Table.from_batches([one]))
            schema = schema or table.schema.remove_metadata()
            table = table.replace_schema_metadata()
            if table.schema != schema:
                raise DataError(f"row {first}: {_difference(table.schema, schema)}")
            yield table
            first += len(table)
        elif isinstance(one, Mapping):
            samples.append({name: _plain(value) for name, value in one.items()})
            names = schema.names if schema is not None else samples[0].keys()
            if samples[-1].keys() != set(names):
                number = first + len(samples) - 1
                raise DataError(f"row {number}: columns {', '.join(map(str, one))}; allowed: {', '.join(names)}")
            if len(samples) == BLOCK_ROWS:
                table = _rows(samples, schema, first)
                yield table
                schema, first, samples = table.schema, first + len(table), []
        else:
            kind = type(one).__name__
            raise DataError(f"row {first + len(samples)}: a {kind}; allowed: record batches alone, or mappings alone")
    if samples:
        yield _rows(samples, schema, first)


def _rows(samples: Sequence[Mapping[str, Any]], schema: Any, first: int) -> Any:
    try:
        table = table_of(samples, schema)
        if schema is not None and table.schema != schema:
            raise DataError(_difference(table.schema, schema))
    except DataError as error:
        raise DataError(f"rows {first} to {first + len(samples) - 1}: {error}") from error
    return table


def table_of(rows: Sequence[Mapping[str, Any]], schema: Any = None) -> Any:
    """A `pyarrow.Table` of mappings, one a row. A row without a name has null there.

    The columns of `schema` are first and have its types, where it has another one than null. The types of others follow
    from their values. Raises DataError for values that have no type in common, and for those that another type would
    change: 1.5 is no integer.
    """
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    known = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    columns = {}
    for name in dict.fromkeys([*known, *(name for row in rows for name in row)]):
        # With a type, pyarrow would cut 1.5 to an integer in silence.
        try:
            column = arrow.array([row.get(name) for row in rows])
            kind = known.get(name, arrow.null())
            if not arrow.types.is_null(kind) and column.type != kind:
                if not _has_kind(arrow.types, column.type, kind):
                    raise TypeError(f"values of type {column.type}")
                column = column.cast(kind)
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            allowed = "values of one type in a column" + (f", here of {name} ({known[name]})" if name in known else "")
            raise DataError(f"column {name}: {error}; allowed: {allowed}") from error
        columns[name] = column
    return arrow.table(columns)


def _has_kind(types: Any, found: Any, kind: Any) -> bool:
    """Whether a safe cast to the other type keeps the values. Others would make text of numbers, or truth of 7."""
    if found == kind or types.is_null(found):
        return True
    if is_list(found) and is_list(kind):
        return _has_kind(types, found.value_type, kind.value_type)
    is_any_number = [types.is_integer(one) or types.is_floating(one) for one in (found, kind)]
    return all(is_any_number) or (types.is_decimal(found) and types.is_decimal(kind))


def _without_views(arrow: Any, table: Any) -> Any:
    """Views of texts and bytes, as polars has them, become what they view: Arrow cannot pick rows of them."""
    for number, field in enumerate(table.schema):
        if _has_view(arrow.types, field.type):
            parts = [cast(part, plain(field.type)) for part in table.column(number).chunks]
            table = table.set_column(number, field.name, arrow.chunked_array(parts, plain(field.type)))
    return table


def _has_view(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind) or is_list(kind):
        return _has_view(types, kind.value_type)
    return bool(types.is_string_view(kind) or types.is_binary_view(kind))


def _plain(value: Any) -> Any:
    """A number or list for a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _difference(found: Any, schema: Any) -> str:
    return f"columns {_text(found)}; allowed, as in the first rows: {_text(schema)}"


def _text(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
