# SPDX-License-Identifier: Apache-2.0
"""Operators of feature plans that a schema file applies to columns when a data set is loaded."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sennit.offload.columns import INT64_MAX, INT64_MIN, IdsType, Ragged
from sennit.offload.operators import ClampList, FirstX, SigridHash
from sennit.offload.plan import Graph
from sennit.offload.reference import evaluate
from sennit.runtime.data import sources
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import Feature, RawSamples
from sennit.runtime.data.source import Source

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCHEMA = """
label = "clicked"
[dense.price]
clamp = [-1, 100]
[dense.count]
log1p = true
[dense.both]
clamp = [0, 10]
log1p = true
[sparse.user]
encode = "hash"
rows = 1000
salt = -5
[sparse.seen]
encode = "hash"
rows = 70
first = 2
[sparse.tag]
encode = "dictionary"
first = 1
[sparse.row]
rows = 4
first = 3
"""
COLUMNS: dict[str, Any] = {
    "clicked": [0, 1, 1],
    "price": [-7.5, 3.0, 1e9],
    "count": [0, 3, 255],
    "both": [-3.0, 1.0, 1e30],
    "user": arrow.array([0, 2**64 - 1, 2**63], arrow.uint64()),
    "seen": [[-1, -2, -3], [], [5]],
    "tag": [["b", "a"], ["a"], []],
    "row": [[0, 1, 2, 3], [3], [2, 2, 2]],
}


def source(folder: Path, **changed: Any) -> Source:
    parquet.write_table(arrow.table({**COLUMNS, **changed}), folder / "data.parquet", row_group_size=2)
    (folder / "schema.toml").write_text(SCHEMA)
    return Source(data=str(folder / "data.parquet"), schema=folder / "schema.toml")


def hashed(ids: list[int], salt: int, rows: int) -> list[int]:
    """Hashes ids by the reference of feature plans."""
    kind = IdsType(length=1, is_list=False, low=INT64_MIN, high=INT64_MAX)
    graph = Graph(sources={"ids": kind}, columns={"rows": SigridHash(column="ids", salt=salt, max_value=rows)})
    column = Ragged(np.ones(len(ids), np.int32), np.array(ids, np.int64))
    found = evaluate(graph, {"ids": column}, outputs=("rows",))["rows"]
    assert isinstance(found, Ragged)
    return [int(row) for row in found.values]


def fitted(raw: RawSamples) -> RawSamples:
    """Fits vocabularies to all samples, and leaves dense features as they are."""
    known = Preprocessing.fit(raw, torch.ones(len(raw), dtype=torch.bool))
    return replace(known.apply(raw), dense=raw.dense)


def test_the_operators_make_what_they_say(tmp_path: Path) -> None:
    samples = fitted(sources.load(source(tmp_path), seed=1)).samples()
    user, seen, tag, row = samples.columns
    assert user.values.tolist() == hashed([0, -1, -(2**63)], -5, 1000)
    assert user.offsets is None
    assert seen.values.tolist() == hashed([-1, -2, 5], 0, 70)
    assert [column.offsets.tolist() for column in (seen, tag, row) if column.offsets is not None] == [
        [0, 2, 2, 3],
        [0, 1, 2, 2],
        [0, 3, 4, 7],
    ]
    assert (tag.row_count, tag.values.tolist()) == (3, [2, 1])
    assert row.values.tolist() == [0, 1, 2, 3, 2, 2, 2]
    price, count, both = samples.dense.T
    assert price.tolist() == [-1.0, 3.0, 100.0]
    assert np.array_equal(count, np.log1p(np.array([0, 3, 255])).astype(np.float32))
    assert np.array_equal(both, np.log1p(np.array([0, 1, 10])).astype(np.float32))


def test_what_is_fed_is_raw_and_its_tables_are_the_same(tmp_path: Path) -> None:
    origin = source(tmp_path)
    raw = fitted(sources.load(origin, seed=1))
    samples = raw.samples()
    assert raw.features[0].values.tolist() == [0, -1, -(2**63)]
    assert raw.features[1].values.tolist() == [-1, -2, -3, 5]
    assert [(feature.name, feature.row_count, feature.mean_length) for feature in raw.features] == [
        (column.name, column.row_count, column.mean_length) for column in samples.columns
    ]
    assert np.array_equal(raw.dense, samples.dense)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"count": [0, -2, 5]},
            r"column count, row group 0, row 1: value -2\.0; allowed: what clamp and log1p make a finite",
        ),
        ({"price": [0, 0, float("nan")]}, "column price, row group 1, row 0: value nan; allowed: finite numbers"),
        ({"seen": [1, 2, 3]}, "column seen is int64; allowed with first = 2: lists"),
        (
            {"user": [0.5, 1.0, 2.0]},
            "column user is double; allowed with encode = 'hash': integer, string, binary, or list of these; where",
        ),
        (
            {"user": [datetime.date(2026, 1, 1)] * 3},
            r'column user is date32.*; in a text file: types = { "user" = "string" } under \[text\] in the schema',
        ),
        ({"user": [True, False, True]}, r'column user is bool; .*: types = { "user" = "string" } under \[text\]'),
        ({"row": [["a"], [], ["b"]]}, "allowed with encode = 'id': integer or list of integers"),
    ],
)
def test_what_operators_cannot_take_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        sources.load(source(tmp_path, **changed), seed=1)


def test_text_is_hashed_by_its_bytes(tmp_path: Path) -> None:
    """Hexadecimal digits are text, too: they are no numbers."""
    user: list[Any] = ["0a1b2c3d", None, "Ülm"]
    seen = [["", None, "b"], None, ["0a1b2c3d", "b", "c"]]
    raw = sources.load(source(tmp_path, user=user, seen=seen), seed=1)
    # Computed by xxhash 4.1.0 for Python: xxh64_intdigest(text.encode()), less 2^64 from 2^63 on.
    ids = {
        "": -1205034819632174695,
        "b": 8666379929374662555,
        "Ülm": -86194495953127535,
        "0a1b2c3d": -5878113723071883366,
    }
    assert raw.features[0].values.tolist() == [ids["0a1b2c3d"], ids["Ülm"]]
    found = fitted(raw).samples().columns
    assert found[0].values.tolist() == hashed([ids["0a1b2c3d"], ids["Ülm"]], -5, 1000)
    assert found[1].values.tolist() == hashed([ids[""], ids["b"], ids["0a1b2c3d"], ids["b"]], 0, 70)
    assert found[1].offsets is not None
    assert found[1].offsets.tolist() == [0, 2, 2, 4]


def test_text_and_numbers_are_not_hashed_as_one(tmp_path: Path) -> None:
    """The text "5" and the number 5 would have different rows."""
    (tmp_path / "schema.toml").write_text('label = "clicked"\n[sparse.x]\nencode = "hash"\nrows = 9\n')
    columns = [arrow.nulls(1), arrow.array(["5"]), arrow.array([5])]
    for number, column in enumerate(columns):
        parquet.write_table(arrow.table({"clicked": [1], "x": column}), tmp_path / f"{number}.parquet")
    with pytest.raises(DataError, match=r"2.parquet: column x is int64, but in .*1.parquet it is string"):
        sources.load(Source(data=str(tmp_path), schema=tmp_path / "schema.toml"), seed=1)


def test_a_plan_clamps_only_where_an_id_could_be_no_row() -> None:
    def operators(high: int, **changed: Any) -> dict[str, Any]:
        feature = Feature(name="a", row_count=10, values=np.zeros(1, np.int32), **changed)
        return feature.operators("t0", IdsType(length=3, is_list=True, low=0, high=high))

    assert operators(9) == {}
    assert operators(10) == {"t0_rows": ClampList(column="t0", low=0, high=9)}
    assert operators(9, first=2) == {"t0_first": FirstX(column="t0", count=2)}
    assert operators(255, first=2, salt=3) == {
        "t0_first": FirstX(column="t0", count=2),
        "t0_rows": SigridHash(column="t0_first", salt=3, max_value=10),
    }
