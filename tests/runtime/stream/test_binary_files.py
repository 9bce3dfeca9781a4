# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files as blocks of rows: they read as pyarrow reads them, and files that change are named."""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import find_files
from sennit.runtime.stream.arrow_file import ArrowFile
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.parquet_file import ParquetFile
from tests.extent import examples

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ipc = pytest.importorskip("pyarrow.ipc")
fsspec = pytest.importorskip("fsspec")

ROWS = 1000
BLOCK = 300


def table(first: int = 0, rows: int = ROWS) -> Any:
    numbers = list(range(first, first + rows))
    return arrow.table({
        "number": arrow.array(numbers, arrow.int64()),
        "small": arrow.array([number % 50 for number in numbers], arrow.uint8()),
        "number.half": arrow.array([number / 2 for number in numbers]),
        "text": arrow.array([None if number % 7 == 0 else f"word {number % 13}" for number in numbers]),
        "city": arrow.array([f"city {number % 5}" for number in numbers]).dictionary_encode(),
        "seen": arrow.array([list(range(number % 4)) for number in numbers], arrow.list_(arrow.int64())),
        "at": arrow.array(numbers, arrow.timestamp("us", "UTC")),
    })  # fmt: skip


def write_parquet(url: str, content: Any) -> None:
    with fsspec.open(url, "wb") as stream:
        parquet.write_table(content, stream, row_group_size=BLOCK)


def write_arrow(url: str, content: Any, **options: Any) -> None:
    with fsspec.open(url, "wb") as stream, ipc.new_file(stream, content.schema, **options) as writer:
        writer.write_table(content, max_chunksize=BLOCK)


def opened(url: str) -> StreamFile:
    (file,) = find_files([url])
    return ParquetFile.of(file) if url.endswith(".parquet") else ArrowFile.of(file)


def rows(file: StreamFile, block: int, columns: list[str], begin: int = 0) -> list[dict[str, Any]]:
    return [row for batch in file.read(block, columns, begin=begin) for row in batch.to_pylist()]


FORMATS: dict[str, Callable[..., None]] = {"parquet": write_parquet, "arrow": write_arrow}


@pytest.fixture(scope="module", params=[*FORMATS, "memory"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    suffix = "parquet" if request.param == "memory" else request.param
    folder = "memory://binary" if request.param == "memory" else str(tmp_path_factory.mktemp("binary"))
    FORMATS[suffix](f"{folder}/whole.{suffix}", table())
    yield f"{folder}/whole.{suffix}"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/binary", recursive=True)


@examples(20)
@given(st.data())
def test_blocks_read_as_pyarrow_reads_them(url: str, data: st.DataObject) -> None:
    file = opened(url)
    assert file.block_rows == (300, 300, 300, 100)
    block = data.draw(st.integers(0, 3))
    begin = data.draw(st.integers(0, file.block_rows[block]))
    columns = data.draw(st.permutations(table().schema.names))[: data.draw(st.integers(1, 7))]
    whole = table().slice(block * BLOCK, BLOCK).slice(begin).select(columns).to_pylist()
    assert rows(file, block, columns, begin) == whole
    assert rows(pickle.loads(pickle.dumps(file)), block, columns, begin) == whole


def test_types_are_those_of_the_file(url: str) -> None:
    file = opened(url)
    assert file.schema.equals(table().schema)
    (batch,) = file.read(3, table().schema.names)
    assert batch.schema.equals(table().schema)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_that_is_not_whole_is_named(suffix: str, tmp_path: Path) -> None:
    url = str(tmp_path / f"part.{suffix}")
    FORMATS[suffix](url, table())
    content = Path(url).read_bytes()
    file = opened(url)
    for kept in (0, 3, len(content) // 2, len(content) - 1):
        os.truncate(url, kept)
        with pytest.raises(DataError, match=rf"part\.{suffix}: not a whole \w+ file: {kept} bytes"):
            opened(url)
        with pytest.raises(DataError, match=rf"part\.{suffix}: not a whole"):
            rows(file, 0, ["number"])
        Path(url).write_bytes(content)
    end = len(content) - (8 if suffix == "parquet" else 10)
    begin = end - int.from_bytes(content[end : end + 4], "little")
    Path(url).write_bytes(content[:begin] + bytes(end - begin) + content[end:])
    with pytest.raises(DataError, match=rf"part\.{suffix}: not a "):
        opened(url)
    Path(url).unlink()
    with pytest.raises(DataError, match=rf"part\.{suffix}: .*No such file"):
        rows(file, 0, ["number"])


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_that_is_replaced_is_named(suffix: str, tmp_path: Path) -> None:
    """Here by one of the same size, and for Arrow with the same footer."""
    url = str(tmp_path / f"part.{suffix}")
    content = table().select(["number", "small"])
    FORMATS[suffix](url, content)
    file = opened(url)
    reading = file.read(0, ["number"])
    assert next(reading).num_rows == BLOCK
    FORMATS[suffix](url, table(1).select(["number", "small"]))
    with pytest.raises(DataError, match=rf"part\.{suffix}: changed since the run began; allowed"):
        rows(file, 0, ["number"])
    assert opened(url).digest != file.digest
    FORMATS[suffix](url, content)
    assert opened(url).digest == file.digest
    assert len(rows(file, 0, ["number"])) == BLOCK


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_block_that_cannot_be_read_is_named(suffix: str, tmp_path: Path) -> None:
    url = str(tmp_path / f"part.{suffix}")
    if suffix == "arrow":
        # Compressed, so that there is something to be wrong.
        write_arrow(url, table(), options=ipc.IpcWriteOptions(compression="zstd"))
    else:
        write_parquet(url, table())
    content = bytearray(Path(url).read_bytes())
    # Most of the file is values. The footer stays as it is.
    content[8 : len(content) // 2] = bytes(len(content) // 2 - 8)
    Path(url).write_bytes(content)
    with pytest.raises(DataError, match=rf"part\.{suffix}: (row group|record batch) 0 cannot be read: "):
        rows(opened(url), 0, table().schema.names)


def test_other_formats_of_arrow_are_told_apart(tmp_path: Path) -> None:
    url = str(tmp_path / "part.arrow")
    with ipc.new_stream(url, table().schema) as writer:
        writer.write_table(table())
    with pytest.raises(DataError, match=r"part\.arrow: is an Arrow stream; allowed: the Arrow file format \(write it"):
        opened(url)
    write_parquet(url, table())
    with pytest.raises(DataError, match=r"part\.arrow: not a whole Arrow file: .* not ARROW1"):
        opened(url)


TIMES = {
    "int64": (arrow.int64(), (300, 599)),
    "uint64": (arrow.uint64(), (300, 599)),
    "double": (arrow.float64(), (300.0, 599.0)),
    "date": (arrow.date32(), (300, 599)),
    # Parquet has no seconds.
    "seconds": (arrow.timestamp("s"), (300_000, 599_000)),
    "nanoseconds": (arrow.timestamp("ns", "Europe/Berlin"), (300, 599)),
    "text": (arrow.string(), None),
}


@pytest.mark.parametrize(("kind", "span"), TIMES.values(), ids=list(TIMES))
def test_the_span_of_a_row_group_is_that_of_its_values(kind: Any, span: object, tmp_path: Path) -> None:
    numbers = arrow.array(range(ROWS), arrow.int32() if arrow.types.is_date32(kind) else arrow.int64())
    content = arrow.table({"at": numbers.cast(kind)})
    url = str(tmp_path / "part.parquet")
    write_parquet(url, content)
    file = opened(url)
    assert file.span(1, "at") == span
    if span and not arrow.types.is_floating(kind):
        (batch,) = file.read(1, ["at"])
        values = (
            batch.column(0).cast(arrow.int32()).cast(arrow.int64()) if arrow.types.is_date32(kind) else batch.column(0)
        )
        assert (values[0].cast(arrow.int64()).as_py(), values[-1].cast(arrow.int64()).as_py()) == span


def test_a_span_is_not_guessed(tmp_path: Path) -> None:
    """With nulls, without statistics, and for INT96, whose statistics have no order."""
    url = str(tmp_path / "part.parquet")
    at = arrow.array([datetime.datetime(2026, 1, 1), None])
    parquet.write_table(arrow.table({"at": at}), url)
    assert opened(url).span(0, "at") is None
    for options in ({"write_statistics": False}, {"use_deprecated_int96_timestamps": True}):
        parquet.write_table(arrow.table({"at": at.slice(0, 1)}), url, **options)
        assert opened(url).span(0, "at") is None
    write_arrow(str(tmp_path / "part.arrow"), table())
    assert opened(str(tmp_path / "part.arrow")).span(0, "at") is None


def test_a_file_with_a_long_footer_is_compared_by_its_end(tmp_path: Path) -> None:
    """Its footer is parsed once, in each process."""
    content = arrow.table({f"column {number}": np.arange(2000) for number in range(8)})
    url = str(tmp_path / "part.parquet")
    parquet.write_table(content, url, row_group_size=10)
    assert parquet.read_metadata(url).serialized_size > 1 << 16
    file = pickle.loads(pickle.dumps(opened(url)))
    assert [row["column 3"] for row in rows(file, 77, ["column 3"])] == list(range(770, 780))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(parquet, "read_metadata")
        assert [row["column 3"] for row in rows(file, 78, ["column 3"])] == list(range(780, 790))
    first = content.slice(0, 10).take(list(range(9, -1, -1)))
    parquet.write_table(arrow.concat_tables([first, content.slice(10)]), url, row_group_size=10, compression="none")
    with pytest.raises(DataError, match=r"part\.parquet: changed since the run began"):
        rows(file, 78, ["column 3"])


def test_memory_does_not_grow_with_row_groups(tmp_path: Path) -> None:
    """A million rows in one row group are 16 MB. pyarrow's own defaults hold 21 MB for them."""
    values = np.random.default_rng(1).integers(0, 2**60, 1_000_000)
    url = str(tmp_path / "part.parquet")
    parquet.write_table(arrow.table({"a": values, "b": values[::-1]}), url, row_group_size=len(values))
    file = opened(url)
    before = arrow.total_allocated_bytes()
    count, most = 0, 0
    for batch in file.read(0, ["a", "b"]):
        count += len(batch)
        most = max(most, arrow.total_allocated_bytes() - before)
    assert count == len(values)
    assert most < 8 << 20


def test_rows_with_long_lists_are_decoded_in_smaller_pieces(tmp_path: Path) -> None:
    """A piece has about 5 MiB, however many ids a row has."""
    seen = np.random.default_rng(1).integers(0, 1 << 40, (4_000, 400))
    content = arrow.table({"short": np.arange(4_000), "seen": arrow.array(list(seen), arrow.list_(arrow.int64()))})
    parquet.write_table(content, tmp_path / "a.parquet")
    file = opened(str(tmp_path / "a.parquet"))
    pieces = list(file.read(0, ["seen", "short"]))
    assert max(piece.nbytes for piece in pieces) < 6 << 20
    assert arrow.Table.from_batches(pieces).equals(content.select(["seen", "short"]))
    assert [len(piece) for piece in file.read(0, ["short"])] == [4_000]
