# SPDX-License-Identifier: Apache-2.0
"""Rows of a program's own become files: all of them, in order, however they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from sennit.runtime.data.errors import DataError
from sennit.runtime.stream import spooling as module
from sennit.runtime.stream.index import open_index
from sennit.runtime.stream.spooling import spool

arrow = pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 8)
    monkeypatch.setattr(module, "FILE_ROWS", 24)


def row(number: int) -> dict[str, Any]:
    return {"clicked": number % 2, "price": number / 4, "city": f"city {number}", "seen": list(range(number % 3))}


class Clicks(IterableDataset[dict[str, Any]]):
    """Rows as datasets yield them: with tensors and arrays."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.count):
            found = row(number)
            yield found | {
                "clicked": torch.tensor(found["clicked"]),
                "price": np.float64(found["price"]),
                "seen": torch.tensor(found["seen"], dtype=torch.int64),
            }


def read(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    index = open_index([str(folder)], list(row(0)))
    batches = [batch for _, batch in index.read(0, index.sample_count, list(row(0)))]
    return [one for batch in batches for one in batch.to_pylist()], [int(end) for end in index.ends]


def test_a_dataset_is_read_once_and_written_as_blocks(tmp_path: Path) -> None:
    folder = spool(Clicks(53), tmp_path / "clicks")
    assert read(folder) == ([row(number) for number in range(53)], [8, 16, 24, 32, 40, 48, 53])
    assert sorted(path.name for path in folder.iterdir()) == [
        "part-00000.arrow",
        "part-00001.arrow",
        "part-00002.arrow",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["clicks"]


@pytest.mark.parametrize("sizes", [(53,), (1,) * 53, (3, 0, 30, 20)])
def test_how_rows_are_grouped_changes_no_file(sizes: tuple[int, ...], tmp_path: Path) -> None:
    whole = arrow.Table.from_pylist([row(number) for number in range(53)])
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    tables = [whole.slice(begin, size).combine_chunks() for begin, size in zip(begins, sizes, strict=True)]
    spool((batch for table in tables for batch in table.to_batches()), tmp_path / "batches")
    spool(tables, tmp_path / "tables")
    spool(Clicks(53), tmp_path / "rows")
    for path in (tmp_path / "rows").iterdir():
        for other in ("batches", "tables"):
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes()


def batch(**columns: Any) -> Any:
    return arrow.RecordBatch.from_pydict(columns)


STRUCT = arrow.struct([("b", arrow.string_view())])
WRONG: dict[str, tuple[Any, str]] = {
    "no rows": ([], "no rows; allowed: at least one"),
    "a column more": ([{"a": 1}, {"a": 1, "b": 2}], "row 1: columns a, b; allowed: a$"),
    "a column less": ([{"a": 1, "b": 2}] * 8 + [{"b": 1}], "row 8: columns b; allowed: a, b$"),
    "another type": (
        [{"a": 1}] * 8 + [{"a": "x"}],
        r"rows 8 to 8: .*; allowed: values of one type .* a \(int64\)",
    ),
    "text of numbers": (
        [{"a": 1}] * 8 + [{"a": "7"}],
        "rows 8 to 8: column a: values of type string; allowed: .* of a .int64",
    ),
    "numbers for text": (
        [{"a": "x"}] * 8 + [{"a": 7}],
        "rows 8 to 8: column a: values of type int64; allowed: .* of a .string",
    ),
    "truth for numbers": (
        [{"a": 1}] * 8 + [{"a": True}],
        "rows 8 to 8: column a: values of type bool; allowed: .* of a .int64",
    ),
    "numbers for truth": (
        [{"a": True}] * 8 + [{"a": 7}],
        "rows 8 to 8: column a: values of type int64; allowed: .* of a .bool",
    ),
    "halves": (
        [{"a": 1}] * 8 + [{"a": 1.5}],
        r"rows 8 to 8: column a: .*1\.50* .*; .* values of one type .* a \(int64\)",
    ),
    "negative halves": ([{"a": 1}] * 8 + [{"a": np.float32(-1.5)}], r"rows 8 to 8: column a: .*-1\.50* .*; allowed: "),
    "halves in lists": ([{"a": [1]}] * 8 + [{"a": [1, 2.5]}], r"rows 8 to 8: column a: .*2\.50* .*; allowed: values"),
    "no number": ([{"a": 1}] * 8 + [{"a": float("nan")}], r"rows 8 to 8: column a: .*nan.*; allowed: values"),
    "integers that are rounded": ([{"a": 1.5}] * 8 + [{"a": 2**60 + 1}], "rows 8 to 8: column a: .*; allowed: values"),
    "a type behind none": ([{"a": None}] * 8 + [{"a": 7}], r"rows 8 to 8: columns a \(int64\); allowed, .* a \(null\)"),
    "two types": ([{"a": 1}, {"a": "x"}], "rows 0 to 1: column a: .*; allowed: values of one type in a column$"),
    "maps": (
        lambda: [arrow.table({"a": arrow.array([{"b": "x"}], STRUCT)})],
        r"columns a \(struct.*; allowed: numbers",
    ),
    "batches that differ": ([batch(a=[1]), batch(a=["x"])], r"row 1: columns a \(string\); allowed, .*: a \(int64\)"),
    "neither": ([{"a": 1}, (1, 2)], "row 1: a tuple; allowed: record batches alone, or mappings alone"),
    "both": ([{"a": 1}, batch(a=[1])], "row 1: a RecordBatch; allowed: record batches alone, or mappings alone"),
}


@pytest.mark.parametrize(("rows", "message"), WRONG.values(), ids=list(WRONG))
def test_rows_that_do_not_fit_leave_nothing_behind(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        spool(rows() if callable(rows) else rows, tmp_path / "clicks")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    spool(Clicks(3), tmp_path / "clicks")
    with pytest.raises(DataError, match="clicks: is there already; allowed: a new folder"):
        spool(Clicks(4), tmp_path / "clicks")
    assert len(read(tmp_path / "clicks")[0]) == 3


def test_what_has_all_rows_is_read_as_its_batches(tmp_path: Path) -> None:
    """A table alone would yield its columns."""
    dataset = pytest.importorskip("pyarrow.dataset")
    rows = [row(number) for number in range(9)]
    table = arrow.Table.from_pylist(rows)
    wholes = [table, table.to_batches()[0], table.to_reader(max_chunksize=4), dataset.dataset(table), table.to_pandas()]
    for number, whole in enumerate(wholes):
        assert read(spool(whole, tmp_path / str(number)))[0] == rows


def test_later_rows_take_the_types_of_the_first_where_no_value_changes(tmp_path: Path) -> None:
    first = {"a": 1, "b": 1.5, "c": [1.5], "d": "x", "e": [1]}
    later = {"e": [], "a": 2.0, "b": 7, "c": [2, None], "d": None}
    folder = spool([first] * 8 + [later] * 3, tmp_path / "clicks")
    index = open_index([str(folder)], list(first))
    rows = [one for _, batch in index.read(0, 11, list(first)) for one in batch.to_pylist()]
    assert rows == [first] * 8 + [later] * 3
    assert [str(kind) for kind in index.schema.types] == [
        "int64",
        "double",
        "list<item: double>",
        "string",
        "list<item: int64>",
    ]


def test_views_become_what_they_view(tmp_path: Path) -> None:
    """A frame of polars has them."""
    views, words = arrow.string_view(), ["Ulm", None, "a name of more than twelve bytes"] * 7
    names = arrow.array(words, views).dictionary_encode()
    table = arrow.table(
        {
            "text": arrow.array(words, views),
            "bytes": arrow.array([word and word.encode() for word in words], arrow.binary_view()),
            "named": arrow.DictionaryArray.from_arrays(names.indices, names.dictionary.cast(views)),
            "lists": arrow.array([[word] for word in words], arrow.large_list(views)),
        }
    )
    assert str(table.schema.field("named").type).startswith("dictionary<values=string_view")
    folder = spool(table, tmp_path / "views")
    index = open_index([str(folder)], table.column_names)
    rows = [one for _, batch in index.read(0, 21, table.column_names) for one in batch.to_pylist()]
    assert rows == table.to_pylist()
