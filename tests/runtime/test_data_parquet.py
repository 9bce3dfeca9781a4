# SPDX-License-Identifier: Apache-2.0
"""A Parquet file and its schema: what is read, and the error of every kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import parse_schema, read_schema
from sennit.runtime.data.sources import Source

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
    parquet.write_table(arrow.table({"clicked": label, "x": arrow.array([1, 2])}), tmp_path / "text" / "9.parquet")
    with pytest.raises(DataError, match="column x, row group 0: int64 and large_string in one data set; allowed: one"):
        sources.load(Source(data=str(tmp_path / "text"), schema=schema), seed=1)


def test_json_schema_and_no_dense_column(tmp_path: Path) -> None:
    origin = source(tmp_path)
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"label": "clicked", "sparse": {"user": {"rows": 10}}}))
    samples = sources.load(Source(data=origin.data, schema=schema), seed=1)
    assert samples.dense.tolist() == [[1.0]] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"user": [0, 9, 10, 4]}, r"column user, row group 1: row id 10; allowed in table user: \[0, 10\)"),
        ({"user": [0, -1, 3, 4]}, r"column user, row group 0: row id -1; allowed in table user: \[0, 10\)"),
        ({"tags": [[0], [], [3, 4], []]}, r"column tags, row group 1: row id 4; allowed in table tags: \[0, 4\)"),
        ({"user": ["a", "b", "c", "d"]}, "column user is string; allowed with encode = 'id': integer or list"),
        ({"city": [1.5, 2.5, 3.5, 4.5]}, "column city is double; allowed .*: integer, string, or list of these"),
        ({"price": ["a", "b", "c", "d"]}, "column price is string; allowed: integer, floating-point or boolean"),
        (
            {"price": [1.0, None, float("nan"), 3.0]},
            "column price, row group 1: value nan; allowed: finite numbers and",
        ),
        ({"clicked": [0, 1, None, 0]}, "column clicked, row group 1: 1 nulls; allowed: none in the label"),
        ({"price": [1.0, 2.0, float("inf"), 3.0]}, "column price, row group 1: value inf; allowed: finite"),
        ({"user": [0, None, 10, 4]}, r"column user, row group 1: row id 10; allowed in table user: \[0, 10\)"),
        ({"clicked": [0, 1, 7, 0]}, "column clicked, row group 1: label 7.0; allowed: 0 and 1"),
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
    with pytest.raises(DataError, match="--schema belongs to Parquet files"):
        sources.check(Source(data="synthetic", schema=origin.schema))
    with pytest.raises(DataError, match="no such file"):
        sources.check(Source(data=str(tmp_path / "absent.parquet"), schema=origin.schema))
