# SPDX-License-Identifier: Apache-2.0
"""The index of a stream: any rows read back, what identifies it, and files that do not fit together."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.arrow_columns import check_types
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.stream.index import StreamIndex, open_index
from tests.extent import examples

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("fsspec")

COLUMNS = ("user", "clicked")


def table(first: int, count: int, **changed: Any) -> Any:
    content = {"clicked": arrow.array([row % 2 for row in range(count)], arrow.int8()), **changed}
    content.setdefault("user", arrow.array(range(first, first + count), arrow.int64()))
    return arrow.table(content)


def write(path: Path, content: Any, row_group_size: int = 7) -> str:
    parquet.write_table(content, path, row_group_size=row_group_size)
    return str(path)


def read(index: StreamIndex, begin: int, end: int, columns: tuple[str, ...] = COLUMNS) -> dict[str, list[Any]]:
    batches = [batch for _, batch in index.read(begin, end, columns)]
    return {name: [value for batch in batches for value in batch.column(name).to_pylist()] for name in columns}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> StreamIndex:
    folder = tmp_path_factory.mktemp("parts")
    write(folder / "a.parquet", table(0, 20))
    write(folder / "b.parquet", table(20, 0))
    write(folder / "c.parquet", table(20, 15))
    return open_index([str(folder)], COLUMNS)


@examples(25)
@given(st.integers(0, 35), st.integers(0, 35))
def test_any_rows_are_those_of_all_files(index: StreamIndex, one: int, other: int) -> None:
    begin, end = sorted((one, other))
    assert read(index, begin, end)["user"] == list(range(begin, end))
    assert read(index, begin, end, ("user",)) == {"user": list(range(begin, end))}


def test_every_row_has_a_place(index: StreamIndex) -> None:
    assert index.sample_count == 35
    assert [int(end) for end in index.ends] == [7, 14, 20, 20, 27, 34, 35]
    for row in range(35):
        place = index.place(row)
        assert read(index, row, row + 1)["user"] == [row]
        assert [str(one) for one, _ in index.read(row, row + 1, COLUMNS)] == [str(place)]
    assert str(index.place(22)).endswith("c.parquet: row group 0, row 2")
    assert index.place(22).of("user").endswith("c.parquet: column user, row group 0, row 2")
    with pytest.raises(IndexError, match=r"row 35; allowed: \[0, 35\)"):
        index.place(35)


def test_the_index_goes_to_other_processes(index: StreamIndex) -> None:
    copy = pickle.loads(pickle.dumps(index))
    assert copy.fingerprint == index.fingerprint
    assert read(copy, 3, 30) == read(index, 3, 30)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint(name: str, content: Any, row_group_size: int = 7, columns: tuple[str, ...] = COLUMNS) -> str:
        return open_index([write(tmp_path / name, content, row_group_size)], columns).fingerprint

    first = fingerprint("a.parquet", table(0, 20))
    assert fingerprint("b.parquet", table(0, 20)) == first
    others = [
        fingerprint("c.parquet", table(1, 20)),
        fingerprint("d.parquet", table(0, 20), 8),
        fingerprint("a.parquet", table(0, 20), columns=("user",)),
        open_index([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], COLUMNS).fingerprint,
    ]
    assert len({first, *others}) == 5


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", table(0, 3))

    def refuse(content: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_index([first, write(tmp_path / "b.parquet", content)], COLUMNS)

    refuse(table(0, 3).drop(["user"]), r"b\.parquet: no column user, which .*a\.parquet has; there are: clicked$")
    refuse(
        table(0, 3, user=["x", "y", "z"]), r"b\.parquet: column user is string, but in .*a\.parquet it is int64; all"
    )
    refuse(table(0, 3, user=[[1], [2], [3]]), r"b\.parquet: column user is list<.*>, but in .*a\.parquet it is int64")
    refuse(table(0, 3).append_column("user", [[1, 2, 3]]), r"b\.parquet: 2 columns user; allowed: one; there are: cl")
    with pytest.raises(DataError, match=r"a\.parquet: no column age; there are: clicked, user$"):
        open_index([first], ["age"])
    with pytest.raises(DataError, match=r"empty\.parquet: no rows; allowed: at least one"):
        open_index([write(tmp_path / "empty.parquet", table(0, 0))], COLUMNS)


def test_writers_may_disagree_about_widths(tmp_path: Path) -> None:
    """As files of pandas do, where one has a null or a column of None."""
    contents = [
        table(0, 2, user=arrow.array([1, 2], arrow.uint16()), clicked=[1, 0]),
        table(0, 2, user=arrow.array([-1, 2**60]), clicked=[1.0, None]),
        table(0, 2, user=arrow.nulls(2), clicked=arrow.nulls(2)),
    ]
    found = open_index([write(tmp_path / f"{n}.parquet", one) for n, one in enumerate(contents)], COLUMNS)
    assert [str(field.type) for field in found.schema] == ["int64", "double"]
    assert read(found, 0, 6) == {"user": [1, 2, -1, 2**60, None, None], "clicked": [1.0, 0.0, 1.0, None, None, None]}
    texts = [arrow.array(["x"]), arrow.array(["y"]).dictionary_encode(), arrow.array(["z"], arrow.large_string())]
    paths = [write(tmp_path / f"t{n}.parquet", table(0, 1, user=text)) for n, text in enumerate(texts)]
    assert read(open_index(paths, COLUMNS), 0, 3)["user"] == ["x", "y", "z"]
    large = write(tmp_path / "large.parquet", table(0, 2, user=arrow.array([1, 2**64 - 1], arrow.uint64())))
    with pytest.raises(
        DataError, match=r"large\.parquet: column user, row group 0, row 1: value 18446744073709551615; allowed: int64"
    ):
        read(open_index([large, str(tmp_path / "1.parquet")], COLUMNS), 0, 4)


@pytest.mark.parametrize("kind", [arrow.list_(arrow.uint64()), arrow.list_(arrow.uint64(), 2)])
def test_a_list_that_does_not_fit_is_the_one_that_is_named(tmp_path: Path, kind: Any) -> None:
    """Arrow casts the values of all lists of a block, whichever rows are asked for."""
    large = arrow.array([[1, 2], None, [3, 4], [5, 2**63]], kind)
    for name, user in (("0", arrow.array([[-1], [2], None, []])), ("1", large)):
        with arrow.ipc.new_file(tmp_path / f"{name}.arrow", (rows := table(0, 4, user=user)).schema) as file:
            file.write(rows)
    index = open_index([str(tmp_path)], COLUMNS)
    assert read(index, 4, 7)["user"] == [[1, 2], None, [3, 4]]
    assert read(index, 6, 7)["user"] == [[3, 4]]
    for begin in (4, 5, 7):
        with pytest.raises(DataError, match=r"1\.arrow: column user, record batch 0, row 3: value \[5, 92233720368547"):
            read(index, begin, 8)
    hashed = open_index([str(tmp_path)], COLUMNS, encodings={"user": "hash"})
    assert read(hashed, 5, 8)["user"] == [None, [3, 4], [5, -(2**63)]]


def test_a_dictionary_is_its_values(tmp_path: Path) -> None:
    """Of lists, of numbers, and of nothing but nulls, which have any type."""
    columns = [
        arrow.DictionaryArray.from_arrays([0, 1, 0], arrow.array([[1], [2, 3]])),
        arrow.array([[4], None, []]),
        arrow.DictionaryArray.from_arrays(arrow.array([0, None, 0], arrow.int8()), arrow.nulls(1)),
    ]
    for number, user in enumerate(columns):
        rows = table(0, 3, user=user, clicked=arrow.array([1.0, 0.0, 1.0]).dictionary_encode())
        with arrow.ipc.new_file(tmp_path / f"{number}.arrow", rows.schema) as file:
            file.write(rows)
    index = open_index([str(tmp_path)], COLUMNS)
    assert read(index, 0, 9)["user"] == [[1], [2, 3], [1], [4], None, [], None, None, None]
    schema = parse_schema({"label": "clicked", "dense": [], "sparse": {"user": {"encode": "dictionary"}}})
    for file in index.files:
        check_types(file.name, schema, file.schema)


BYTES = [b"abcd", b"\xff\x00\xfe\x80"]
BYTES_TYPES = [arrow.binary(), arrow.large_binary(), arrow.binary(4), arrow.binary_view()]


@pytest.mark.parametrize("in_lists", [False, True])
def test_bytes_have_one_type_whoever_wrote_them(tmp_path: Path, in_lists: bool) -> None:
    """Four files, each with another type of bytes: they are `is_binary`'s."""
    for number, kind in enumerate(BYTES_TYPES):
        user = arrow.array([[BYTES[0]], BYTES], arrow.list_(kind)) if in_lists else arrow.array(BYTES, kind)
        with arrow.ipc.new_file(tmp_path / f"{number}.arrow", (content := table(0, 2, user=user)).schema) as file:
            file.write(content)
    index = open_index([str(tmp_path)], COLUMNS)
    expected = arrow.large_binary()
    assert index.schema.field("user").type == (arrow.large_list(expected) if in_lists else expected)
    assert read(index, 0, 8)["user"] == ([[BYTES[0]], BYTES] if in_lists else BYTES) * len(BYTES_TYPES)


def test_the_name_says_the_format_or_the_first_bytes_do(tmp_path: Path) -> None:
    for name in ("a.feather", "b"):
        with arrow.ipc.new_file(str(tmp_path / name), table(0, 3).schema) as writer:
            writer.write_table(table(0, 3))
    paths = [str(tmp_path / "a.feather"), str(tmp_path / "b"), write(tmp_path / "c", table(3, 3))]
    index = open_index(paths, COLUMNS)
    assert read(index, 0, 9)["user"] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert str(index.place(4)) == f"{tmp_path}/b: record batch 0, row 1"
    (tmp_path / "d").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"d: neither Parquet nor Arrow by its first bytes; allowed: these, names with"):
        open_index([str(tmp_path / "d")], COLUMNS)
