# SPDX-License-Identifier: Apache-2.0
"""A Parquet file and its schema: what is read, and the error of every kind of bad input."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import Feature
from sennit.runtime.data.schema import parse_schema, read_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream import StreamLoader

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = """
label = "clicked"
dense = ["price"]
[sparse.user]
rows = 10
[sparse.tags]
rows = 4
[sparse.city]
encode = "dictionary"
"""
COLUMNS: dict[str, Any] = {
    "clicked": [0, 1, 1, 0],
    "price": [1.5, 2.5, 3.5, 4.5],
    "user": [0, 9, 3, 4],
    "tags": [[0, 1], [], [3], [2, 2, 2]],
    "city": ["Ulm", "Bonn", "Ulm", "Kiel"],
    "ignored": ["x", "y", "z", None],
}


def source(folder: Path, *, schema: str = SCHEMA, **changed: Any) -> Source:
    """Writes a file of two row groups, two rows each."""
    parquet.write_table(arrow.table({**COLUMNS, **changed}), folder / "data.parquet", row_group_size=2)
    (folder / "schema.toml").write_text(schema)
    return Source(data=str(folder / "data.parquet"), schema=folder / "schema.toml")


def test_reads_ids_bags_and_dictionaries(tmp_path: Path) -> None:
    raw = sources.load(source(tmp_path), seed=1)
    samples = Preprocessing.fit(raw, torch.tensor([True, False, True, True])).apply(raw).samples()
    user, tags, city = samples.columns
    assert raw.dense.tolist() == [[1.5], [2.5], [3.5], [4.5]]
    assert samples.labels.tolist() == [0, 1, 1, 0]
    assert user.values.tolist() == [0, 9, 3, 4]
    assert tags.offsets is not None
    assert tags.offsets.tolist() == [0, 2, 2, 3, 6]
    assert tags.values.tolist() == [0, 1, 3, 2, 2, 2]
    # Row 0 is for values that no training row has.
    assert (city.row_count, city.values.tolist()) == (3, [2, 0, 2, 1])


def test_nulls_are_no_ids_a_category_or_the_mean(tmp_path: Path) -> None:
    """Each kind of column has nulls. A null list counts as an empty list."""
    schema = SCHEMA + '[sparse.seen]\nencode = "hash"\nrows = 5\n[sparse.words]\nencode = "dictionary"\n'
    changed = {
        "price": [1.0, None, 3.0, 100.0],
        "user": [0, None, 3, 4],
        "tags": [[0, None, 1], None, [], [2]],
        "city": ["Ulm", None, "Bonn", "Ulm"],
        "seen": [None, 7, 7, None],
        "words": [["a", None], None, [], ["b", "a"]],
    }
    raw = sources.load(source(tmp_path, schema=schema, **changed), seed=1)
    samples = Preprocessing.fit(raw, torch.tensor([True, True, True, False])).apply(raw).samples()
    found = {
        column.name: [column.gather(torch.tensor([row]))[1].tolist() for row in range(4)] for column in samples.columns
    }
    (seven,) = found["seen"][1]
    assert found == {
        "user": [[0], [], [3], [4]],
        "tags": [[0, 1], [], [], [2]],
        "city": [[2], [0], [1], [2]],
        "seen": [[], [seven], [seven], []],
        # "b" is only in the last row, which is held back.
        "words": [[1, 0], [], [], [0, 1]],
    }
    # Mean 2 and deviation 1 over the training rows that have a price.
    assert samples.dense.squeeze(1).tolist() == [-1.0, 0.0, 1.0, 98.0]


def test_kinds_of_integers_and_of_text_are_one_kind(tmp_path: Path) -> None:
    """Different programs may write the parts of a data set. Arrow's dictionaries are read as their values."""
    origin = source(tmp_path)
    schema = Path(str(origin.schema))
    schema.write_text('label = "clicked"\n[sparse.x]\nencode = "dictionary"\n')
    label = arrow.array([0, 1], arrow.int64())
    parts: dict[str, list[Any]] = {
        "text": [
            arrow.array(["b", "a"]),
            arrow.array(["c", "a"], arrow.large_string()),
            arrow.array(["c", "b"]).dictionary_encode(),
        ],
        "integers": [arrow.array([5, -3], arrow.int8()), arrow.array([9, -3], arrow.int64())],
    }
    for name, columns in parts.items():
        folder = tmp_path / name
        folder.mkdir()
        for number, column in enumerate(columns):
            parquet.write_table(arrow.table({"clicked": label, "x": column}), folder / f"{number}.parquet")
        (feature,) = sources.load(Source(data=str(folder), schema=schema), seed=1).features
        assert feature.dictionary is not None
        assert feature.dictionary.tolist() == {"text": ["a", "b", "c"], "integers": [-3, 5, 9]}[name]
        expected = [value for column in columns for value in column.to_pylist()]
        assert [feature.dictionary[code] for code in feature.values] == expected


def parts_of(folder: Path, columns: list[Any], encode: str) -> Source:
    """Files 0.parquet, 1.parquet, …, each with one of these columns x of two rows."""
    (folder / "schema.toml").write_text(
        f'label = "clicked"\n[sparse.x]\nencode = "{encode}"\n' + ("rows = 9\n" if encode != "dictionary" else "")
    )
    for number, column in enumerate(columns):
        table = arrow.table({"clicked": arrow.array([0, 1], arrow.int64()), "x": column})
        parquet.write_table(table, folder / f"{number}.parquet")
    return Source(data=str(folder), schema=folder / "schema.toml")


def ids(feature: Feature) -> list[list[Any]]:
    """The ids of each sample; None is null."""
    known = feature.dictionary
    values = [None if code < 0 else known[code] for code in feature.values] if known is not None else feature.values
    ends = np.cumsum(feature.lengths)
    return [[*values[end - length : end]] for end, length in zip(ends, feature.lengths, strict=True)]


def trained_on(source: Source) -> list[list[int]]:
    """Which rows of its table each sample has, as `StreamLoader` hands them out. All of them are trained on."""
    assert source.schema is not None
    (folder := Path(source.data) / "_held").mkdir(exist_ok=True)
    held = {part.name: arrow.nulls(1) for part in read_schema(Path(source.schema)).sparse}
    parquet.write_table(arrow.table({"clicked": [0], "n": arrow.nulls(1), **held}), folder / "held.parquet")
    options: Any = {"order": "files", "batch_size": 2, "evaluation": [str(folder / "held.parquet")]}
    with StreamLoader(source.data, schema=source.schema, **options) as batches:
        found = []
        for batch in batches:
            found += [part.tolist() for part in torch.split(batch.values, batch.lengths[0].tolist())]
        return found


def rows_of(source: Source) -> list[list[int]]:
    """The same as the data set in memory has it."""
    raw = sources.load(source, seed=1)
    (column,) = Preprocessing.fit(raw, torch.ones(len(raw), dtype=torch.bool)).apply(raw).samples().columns
    return [column.gather(torch.tensor([row]))[1].tolist() for row in range(len(raw))]


@pytest.mark.parametrize("in_lists", [False, True])
def test_extension_types_are_what_they_store(tmp_path: Path, in_lists: bool) -> None:
    """DuckDB and polars write UUIDs, JSON and booleans of a byte as extension types."""
    numbers = [5, 6, 5, 7]
    stored = {
        arrow.uuid(): arrow.array([uuid.UUID(int=number).bytes for number in numbers], arrow.binary(16)),
        arrow.json_(): arrow.array([f"[{number}]" for number in numbers]),
        arrow.opaque(arrow.string_view(), "word", "tests"): arrow.array(list(map(str, numbers)), arrow.string_view()),
    }
    for number, (kind, plain) in enumerate(stored.items()):
        found = []
        for name, column in (("plain", plain), ("extended", arrow.ExtensionArray.from_storage(kind, plain))):
            if in_lists:
                column = arrow.LargeListArray.from_arrays([0, 1, 1, 3, 4], column)
            folder = tmp_path / f"{number} {name}"
            folder.mkdir()
            origin = parts_of(folder, [column.slice(0, 2), column.slice(2)], "hash")
            found += [rows_of(origin), trained_on(origin)]
        assert found == [found[0]] * 4, kind
        assert sum(map(len, found[0])) == 4


def test_every_byte_but_0_is_true_in_a_boolean_of_a_byte(tmp_path: Path) -> None:
    bools = arrow.ExtensionArray.from_storage(arrow.bool8(), arrow.array([0, 1, 2, -1], arrow.int8()))
    parquet.write_table(arrow.table({"clicked": bools, "n": bools, "x": range(4)}), tmp_path / "0.parquet")
    (tmp_path / "schema.toml").write_text('label = "clicked"\ndense = ["n"]\n[sparse.x]\nencode = "id"\nrows = 4\n')
    source = Source(data=str(tmp_path), schema=tmp_path / "schema.toml")
    raw = sources.load(source, seed=1)
    assert raw.labels.tolist() == raw.dense.squeeze(1).tolist() == [0, 1, 1, 1]
    options: Any = {"order": "files", "batch_size": 3, "eval_fraction": 0.25}
    with StreamLoader(source.data, schema=source.schema, **options) as loader:
        assert [batch.labels.tolist() for batch in (*loader, *loader.evaluation())] == [[0, 1, 1], [1]]


INT64, UINT64, BIG = arrow.int64(), arrow.uint64(), 2**63 + 5


@pytest.mark.parametrize("encode", ["id", "hash", "dictionary"])
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([arrow.array([1, 2], INT64), arrow.array([3, 1], UINT64)], [[1], [2], [3], [1]]),
        ([arrow.nulls(2), arrow.array([3, 1], UINT64)], [[None], [None], [3], [1]]),
        ([arrow.nulls(2), arrow.array([[3, 1], []])], [[], [], [3, 1], []]),
        ([arrow.array([[], None], arrow.list_(arrow.null())), arrow.array([[3], [1]])], [[], [], [3], [1]]),
        ([arrow.nulls(2)], [[None], [None]]),
        ([arrow.array([[3, 1], None], arrow.list_(INT64, 2)), arrow.array([[3], []])], [[3, 1], [], [3], []]),
    ],
    ids=["signs", "null before numbers", "null before lists", "empty lists", "all null", "fixed size"],
)
def test_parts_differ_in_type_where_all_values_have_one(
    tmp_path: Path, columns: list[Any], expected: list[list[Any]], encode: str
) -> None:
    origin = parts_of(tmp_path, columns, encode)
    (feature,) = sources.load(origin, seed=1).features
    if encode != "dictionary":
        expected = [[value for value in row if value is not None] for row in expected]
    assert ids(feature) == expected
    assert trained_on(origin) == rows_of(origin)


def test_text_of_all_types_and_nulls_is_one_kind(tmp_path: Path) -> None:
    columns = [arrow.nulls(2), arrow.array(["b", None], arrow.string_view()), arrow.array(["a", "b"])]
    origin = parts_of(tmp_path, columns, "dictionary")
    (feature,) = sources.load(origin, seed=1).features
    assert ids(feature) == [[None], [None], ["b"], [None], ["a"], ["b"]]
    assert trained_on(origin) == rows_of(origin) == [[0], [0], [2], [0], [1], [2]]


BIG_IDS = [1, 2, BIG, 1, 2**64 - 1, 3]


@pytest.mark.parametrize("in_lists", [False, True])
def test_integers_beyond_int64_keep_their_values_beside_smaller_ones(tmp_path: Path, in_lists: bool) -> None:
    """As pandas writes the parts of one column: with a sign unless a value needs the 64th bit."""
    parts = [([1, 2], INT64), ([BIG, 1], UINT64), ([2**64 - 1, 3], UINT64)]
    columns = [
        arrow.array([[value] for value in part], arrow.list_(kind)) if in_lists else arrow.array(part, kind)
        for part, kind in parts
    ]
    origin = parts_of(tmp_path, columns, "dictionary")
    (feature,) = sources.load(origin, seed=1).features
    assert ids(feature) == [[value] for value in BIG_IDS]
    known = sorted({*BIG_IDS})
    assert trained_on(origin) == rows_of(origin) == [[1 + known.index(value)] for value in BIG_IDS]


@pytest.mark.parametrize("encode", ["hash", "dynamic"])
@pytest.mark.parametrize("low", [1, -1])
def test_the_bits_of_a_hashed_id_count_whatever_type_its_file_has(tmp_path: Path, encode: str, low: int) -> None:
    """A folder with a value that int64 lacks gives the rows of a file that has all of them in one type."""
    parts = {"mixed": [arrow.array([low, 2], INT64), arrow.array([BIG, 1], UINT64)]}
    parts["one type"] = [arrow.array(np.array(part).astype(np.uint64)) for part in parts["mixed"]]
    found = []
    for name, columns in parts.items():
        (tmp_path / name).mkdir()
        origin = parts_of(tmp_path / name, columns, encode)
        found += [rows_of(origin), trained_on(origin)]
    assert found == [found[0]] * 4
    if encode == "dynamic":
        assert found[0] == [[low], [2], [BIG - 2**64], [1]]
        feature = sources.load(parts_of(tmp_path / "mixed", parts["mixed"], encode), seed=1).features[0]
        assert feature.id_type == ("int64" if low < 0 else "uint64")


def test_values_of_a_number_and_hashed_texts_have_several_types(tmp_path: Path) -> None:
    """True and False are 1 and 0, and bytes are hashed as text is."""
    (tmp_path / "schema.toml").write_text('label = "clicked"\ndense = ["n"]\n[sparse.x]\nencode = "hash"\nrows = 99\n')
    parts = [
        {"clicked": [0, 1], "n": [1.5, None], "x": ["a", None]},
        {"clicked": [True, False], "n": [True, False], "x": [b"a", b"b"]},
    ]
    for number, part in enumerate(parts):
        parquet.write_table(arrow.table(part), tmp_path / f"{number}.parquet")
    origin = Source(data=str(tmp_path), schema=tmp_path / "schema.toml")
    raw = sources.load(origin, seed=1)
    assert raw.labels.tolist() == [0, 1, 1, 0]
    assert np.array_equal(raw.dense.squeeze(1).numpy(), [1.5, np.nan, 1, 0], equal_nan=True)
    (a,), nothing, *rest = rows_of(origin)
    assert (nothing, rest[0]) == ([], [a])
    assert trained_on(origin) == rows_of(origin)


ROW_GROUP = "column x, row group 0, row"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([["a", "b"], [1, 2]], "/1.parquet: column x is int64, but in .*/0.parquet it is string; allowed: one"),
        (
            [[1, 2], [4, 5], [[1], [2]]],
            "/2.parquet: column x is list<element: int64>, but in .*/0.parquet it is int64; allowed",
        ),
        (
            [arrow.nulls(2), ["a", "b"], [1, 2]],
            "/2.parquet: column x is int64, but in .*/1.parquet it is string; allowed: one",
        ),
        # Of files that disagree about the sign, those with the values are named, and not those between them.
        (
            [[2, -1], [4, 5], arrow.array([1, BIG], UINT64)],
            f"/2.parquet: {ROW_GROUP} 1: value {BIG}, but .*/0.parquet: {ROW_GROUP} 1: value -1; allowed: values",
        ),
        (
            [[2, -1], arrow.array([1, 2], UINT64), arrow.array([BIG, 1], UINT64)],
            f"/2.parquet: {ROW_GROUP} 0: value {BIG}, but .*/0.parquet: {ROW_GROUP} 1: value -1; allowed: values",
        ),
        (
            [[1, 2], arrow.array([1, BIG], UINT64), [-1, 2]],
            f"/1.parquet: {ROW_GROUP} 1: value {BIG}, but .*/2.parquet: {ROW_GROUP} 0: value -1; allowed: values",
        ),
        (
            [[None, [1, -1]], arrow.array([[1], [2, 3, BIG]], arrow.list_(UINT64))],
            f"/1.parquet: {ROW_GROUP} 1: value {BIG}, but .*/0.parquet: {ROW_GROUP} 1: value -1; allowed: values",
        ),
    ],
)
def test_a_part_of_another_type_is_the_one_that_is_named(tmp_path: Path, columns: list[Any], message: str) -> None:
    columns = [arrow.array(column) if isinstance(column, list) else column for column in columns]
    origin = parts_of(tmp_path, columns, "dictionary")
    for read in (lambda found: sources.load(found, seed=1), trained_on):
        with pytest.raises(DataError, match=message):
            read(origin)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([True, False, None, True], [1.0, 0.0, None, 1.0]),
        (arrow.nulls(4), [None] * 4),
        ([7, 2**53 + 1, None, -1], [7.0, float(2**53), None, -1.0]),
        (arrow.array(np.array([1.5, 2.0, 0.0, -1.0], np.float16)), [1.5, 2.0, 0.0, -1.0]),
    ],
    ids=["bool", "null", "int64", "float16"],
)
def test_every_kind_of_number_is_read(tmp_path: Path, column: Any, expected: list[float | None]) -> None:
    dense = sources.load(source(tmp_path, price=column), seed=1).dense.squeeze(1)
    assert [None if np.isnan(value) else value for value in dense.tolist()] == expected


@pytest.mark.parametrize("name", ["clicked", "price", "user"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    origin = source(tmp_path)
    parquet.write_table(arrow.table([*COLUMNS.values(), COLUMNS[name]], names=[*COLUMNS, name]), origin.data)
    with pytest.raises(DataError, match=rf"data.parquet: 2 columns {name}; allowed: one; there are: city, "):
        sources.load(origin, seed=1)


def test_a_column_twice_that_the_schema_does_not_name_does_not_matter(tmp_path: Path) -> None:
    origin = source(tmp_path)
    parquet.write_table(arrow.table([*COLUMNS.values(), COLUMNS["city"]], names=[*COLUMNS, "ignored"]), origin.data)
    assert len(sources.load(origin, seed=1)) == 4


def test_json_schema_and_no_dense_column(tmp_path: Path) -> None:
    origin = source(tmp_path)
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"label": "clicked", "sparse": {"user": {"rows": 10}}}))
    samples = sources.load(Source(data=origin.data, schema=schema), seed=1)
    assert samples.dense.tolist() == [[1.0]] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"user": [0, 9, 10, 4]}, r"column user, row group 1, row 0: row id 10; allowed in table user: \[0, 10\)"),
        ({"user": [0, -1, 3, 4]}, r"column user, row group 0, row 1: row id -1; allowed in table user: \[0, 10\)"),
        (
            {"tags": [[0], [], [3, 4], []]},
            r"column tags, row group 1, row 0: row id 4; allowed in table tags: \[0, 4\)",
        ),
        ({"user": ["a", "b", "c", "d"]}, "column user is string; allowed with encode = 'id': integer or list"),
        ({"city": [1.5, 2.5, 3.5, 4.5]}, "column city is double; allowed .*: integer, string, or list of these"),
        (
            {"price": ["a", "b", "c", "d"]},
            "column price is string; allowed: integer, floating-point, decimal",
        ),
        (
            {"price": [1.0, None, float("nan"), 3.0]},
            "column price, row group 1, row 0: value nan; allowed: finite numbers and",
        ),
        ({"clicked": arrow.nulls(4)}, "column clicked, row group 0, row 0: null; allowed: no nulls in the label"),
        ({"clicked": [0, 1, None, 0]}, "column clicked, row group 1, row 0: null; allowed: no nulls in the label"),
        ({"price": [1.0, 2.0, float("inf"), 3.0]}, "column price, row group 1, row 0: value inf; allowed: finite"),
        ({"user": [0, None, 10, 4]}, r"column user, row group 1, row 0: row id 10; allowed in table user: \[0, 10\)"),
        ({"user": [0, 1, None, 10]}, r"column user, row group 1, row 1: row id 10; allowed in table user"),
        ({"user": [[], [1, 10], [2], [3]]}, r"column user, row group 0, row 1: row id 10; allowed in table user"),
        (
            {"user": [[1], [2], [3, None], [None, -1]]},
            r"column user, row group 1, row 1: row id -1; allowed in table user",
        ),
        ({"clicked": [0, 1, 7, 0]}, "column clicked, row group 1, row 0: label 7.0; allowed: 0 and 1"),
    ],
)
def test_wrong_values_name_column_row_group_and_what_is_allowed(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        sources.load(source(tmp_path, **changed), seed=1)


def test_missing_column_lists_those_present(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column cost; there are: city, clicked, ignored, price, tags, user"):
        sources.load(source(tmp_path, schema=SCHEMA.replace('"price"', '"cost"')), seed=1)


@pytest.mark.parametrize("damage", ["not parquet", "truncated", "flipped"])
def test_damaged_file_is_an_error_not_a_crash(tmp_path: Path, damage: str) -> None:
    origin = source(tmp_path)
    path = Path(origin.data)
    content = bytearray(path.read_bytes())
    if damage == "not parquet":
        content = bytearray(b"hello")
    elif damage == "truncated":
        del content[len(content) // 2 :]
    else:
        # The pages' headers come right after the magic number.
        content[4:64] = bytes(value ^ 0xFF for value in content[4:64])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.parquet: (not a readable|row group 0 cannot)"):
        sources.load(origin, seed=1)


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    empty = arrow.table(COLUMNS).slice(0, 0)
    origin = source(tmp_path)
    parquet.write_table(empty, origin.data)
    with pytest.raises(DataError, match="no rows"):
        sources.load(origin, seed=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is a list; allowed: a table"),
        ({"label": "y"}, "sparse is None; allowed: a table"),
        ({"label": 3, "sparse": {"a": {"rows": 1}}}, "label is 3; allowed: the name of a column"),
        ({"label": "y", "dense": "x", "sparse": {"a": {"rows": 1}}}, "dense is 'x'; allowed: a list"),
        ({"label": "y", "sparse": {"a": {}}}, r"sparse\.a\.rows is None; allowed: an integer from 1"),
        ({"label": "y", "sparse": {"a": {"rows": 0}}}, r"sparse\.a\.rows is 0; allowed: an integer from 1"),
        ({"label": "y", "sparse": {"a": {"encode": "md5"}}}, r"encode is 'md5'; allowed: id, dictionary"),
        ({"label": "y", "sparse": {"a": {"row": 1}}}, r"sparse\.a has the unknown key 'row'"),
        ({"label": "y", "sparse": {"a": 5}}, r"sparse\.a is 5; allowed: a table"),
        ({"label": "y", "lable": "z", "sparse": {}}, "unknown key 'lable'; allowed: label, dense, sparse"),
        ({"label": "a", "sparse": {"a": {"rows": 1}}}, "column 'a' is named twice"),
        ({"label": "y", "sparse": {"a": {"encode": "dictionary", "rows": 3}}}, "counts its rows itself"),
        ({"label": "y", "sparse": {"a": {"encode": "hash"}}}, r"sparse\.a\.rows is None; allowed: an integer from 1"),
        ({"label": "y", "sparse": {"a": {"rows": 3, "salt": 1}}}, r"salt is given, but belongs to encode = 'hash'"),
        (
            {"label": "y", "sparse": {"a": {"encode": "hash", "rows": 3, "salt": 1 << 63}}},
            r"sparse\.a\.salt is 9223372036854775808; allowed: an integer from -9223372036854775808",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 3, "first": 0}}},
            r"sparse\.a\.first is 0; allowed: an integer from 1",
        ),
        ({"label": "y", "sample_weight": "", "sparse": {}}, "sample_weight is ''; allowed: the name of a column"),
        ({"label": "y", "sample_weight": "y", "sparse": {"a": {"rows": 1}}}, "column 'y' is named twice"),
        (
            {"label": "y", "sparse": {"a": {"encode": "dictionary", "min_frequency": 0}}},
            r"sparse\.a\.min_frequency is 0; allowed: an integer from 1",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 3, "min_frequency": 2}}},
            "min_frequency is given, but belongs to encode = 'dictionary'",
        ),
        ({"label": "y", "sparse": {"a": {"rows": 2}}, "text": "tsv"}, "text is 'tsv'; allowed: 'criteo', or a table"),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"sep": 1}},
            "text has the unknown key 'sep'; allowed: fo",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"delimiter": 1}},
            r"text\.delimiter is 1; allowed: one ch",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"delimiter": "::"}},
            r"text\.delimiter '::'; allowed: one",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"names": "y"}},
            r"text\.names is 'y'; allowed: a list of",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"names": ["y", "y"]}},
            r"text\.names has 'y' twice; all",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"types": ["a"]}},
            r"text\.types is \['a'\]; allowed: a ta",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"types": {"a": "x"}}},
            r"text\.types\.a is 'x'; allowed: i",
        ),
        (
            {"label": "y", "sparse": {"a": {"rows": 2}}, "text": {"skip_broken": -1}},
            r"text\.skip_broken is -1; allowed",
        ),
        ({"label": "y", "dense": {"x": 1}, "sparse": {}}, r"dense\.x is 1; allowed: a table"),
        ({"label": "y", "dense": {"x": {"log": 1}}, "sparse": {}}, r"dense\.x has the unknown key 'log'"),
        ({"label": "y", "dense": {"x": {"log1p": 1}}, "sparse": {}}, r"dense\.x\.log1p is 1; allowed: true, false"),
        ({"label": "y", "dense": {"x": {"clamp": [1]}}, "sparse": {}}, r"dense\.x\.clamp is \[1\]; allowed: \[low"),
        (
            {"label": "y", "dense": {"x": {"clamp": [2, 1]}}, "sparse": {}},
            r"clamp is \[2, 1\]; allowed: low at most high",
        ),
    ],
)
def test_schema_errors_name_the_key(content: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_schema(content)


def test_schema_that_is_not_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("label = ")
    with pytest.raises(DataError, match=r"schema .*broken\.toml: "):
        read_schema(path)
    with pytest.raises(DataError, match=r"schema .*absent\.toml: "):
        read_schema(tmp_path / "absent.toml")


def test_parquet_needs_a_schema_and_nothing_else_takes_one(tmp_path: Path) -> None:
    origin = source(tmp_path)
    with pytest.raises(DataError, match="need --schema FILE"):
        sources.check(Source(data=origin.data))
    with pytest.raises(DataError, match="--schema belongs to files"):
        sources.check(Source(data="synthetic", schema=origin.schema))
    with pytest.raises(DataError, match="no such file"):
        sources.check(Source(data=str(tmp_path / "absent.parquet"), schema=origin.schema))
