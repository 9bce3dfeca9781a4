# SPDX-License-Identifier: Apache-2.0
"""Rows that the schema refuses: found in every format, left out of the stream, and never more than allowed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.stream.index import StreamIndex, index_of, open_index
from sennit.runtime.stream.refused_rows import without_refused
from tests.runtime.stream.stream_files import table, write
from tests.runtime.stream.test_formats import WRITERS
from tests.runtime.stream.test_stream_training import TINY, outcome
from tests.runtime.whole_run import train

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = ["clicked", "worth", "price", "user", "at"]
SCHEMA: dict[str, Any] = {
    "label": "clicked",
    "sample_weight": "worth",
    "dense": ["price"],
    "sparse": {"user": {"rows": 40}},
    "time": "at",
}
WRONG: dict[str, list[Any]] = {
    "clicked": [7.0, None],
    "worth": [-1.0, None],
    "price": [math.inf],
    "user": [40, -1],
    "at": [None],
}


def content(seed: int) -> tuple[Any, list[int]]:
    """Rows, and which of them are refused: some at random, and some together at the begin."""
    stream = numpy_stream(seed, "refused")
    count = 500
    columns: dict[str, list[Any]] = {
        "clicked": stream.integers(0, 2, count).astype(float).tolist(),
        "worth": stream.random(count).tolist(),
        "price": stream.standard_normal(count).tolist(),
        "user": stream.integers(0, 40, count).tolist(),
        "at": np.arange(count).tolist(),
    }
    wrong = [(name, value) for name, values in WRONG.items() for value in values]
    rows = sorted({*range(3), *(3 + stream.choice(count - 3, len(wrong), replace=False)).tolist()})
    for number, row in enumerate(rows):
        name, value = wrong[number % len(wrong)]
        columns[name][row] = value
    types = {"user": pa.int64(), "at": pa.int64()}
    return pa.table({name: pa.array(values, types.get(name, pa.float64())) for name, values in columns.items()}), rows


def opened(path: Path, skip_broken: int) -> StreamIndex:
    schema = parse_schema({**SCHEMA, "skip_broken": skip_broken})
    found = open_index([str(path)], COLUMNS, time_column="at", text=schema.text_format)
    return index_of(without_refused(found.files, schema), found.columns, time_column="at")


@pytest.mark.parametrize("form", sorted(set(WRITERS) - {"spooled"}))
def test_they_are_left_out_of_every_format(form: str, seed: int, tmp_path: Path) -> None:
    rows, refused = content(seed)
    WRITERS[form](rows, tmp_path / "part")
    (path,) = tmp_path.iterdir()
    index = opened(path, len(refused))
    assert (index.sample_count, index.skipped_rows) == (len(rows) - len(refused), len(refused))
    kept = [row for row in range(len(rows)) if row not in refused]
    places = [str(index.place(row)) for row in range(index.sample_count)]
    whole = open_index([str(path)], COLUMNS, time_column="at", text=parse_schema(SCHEMA).text_format)
    assert places == [str(whole.place(row)) for row in kept]
    stream = numpy_stream(seed, "reads")
    for begin in (0, *stream.integers(0, index.sample_count, 5).tolist()):
        pieces = [piece for _, piece in index.read(begin, index.sample_count, COLUMNS)]
        assert pa.Table.from_batches(pieces).to_pylist() == rows.take(kept[begin:]).to_pylist()


@pytest.mark.parametrize(("column", "number", "message"), [
    ("clicked", 0, "label 7.0; allowed: 0 and 1"),
    ("worth", 1, "null; allowed: no nulls in sample_weight"),
    ("price", 0, "value inf; allowed: finite numbers and null"),
    ("user", 1, "row id -1; allowed in table user: [0, 40)"),
    ("at", 0, "null; allowed: a time in every row"),
])  # fmt: skip
def test_one_more_than_allowed_is_named(column: str, number: int, message: str, seed: int, tmp_path: Path) -> None:
    rows, refused = content(seed)
    clean = rows.take([row for row in range(len(rows)) if row not in refused])
    values = clean[column].to_pylist()
    for row in (100, 200, 300):
        values[row] = WRONG[column][number]
    place = clean.column_names.index(column)
    pq.write_table(clean.set_column(place, column, pa.array(values, clean[column].type)), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet", 3).skipped_rows == 3
    told = f"a.parquet: column {column}, row group 0, row 300: {message} (broken rows that may be left out: 2; this is"
    with pytest.raises(DataError, match=re.escape(told)):
        opened(tmp_path / "a.parquet", 2)


def test_a_run_is_that_of_files_without_them(seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    stream = numpy_stream(seed, "refused rows of a run")
    users = rows["user"].to_pylist()
    refused = stream.choice(len(rows), 9, replace=False).tolist()
    for row in refused:
        users[row] = 1000
    kept = rows.take([row for row in range(len(rows)) if row not in refused])
    wrong = rows.set_column(rows.column_names.index("user"), "user", pa.array(users, pa.int32()))
    reports = []
    for name, given in (("clean", kept), ("wrong", wrong)):
        data = write(tmp_path / name, given)
        schema = tmp_path / name / "schema.toml"
        schema.write_text("skip_broken = 9\n" + schema.read_text())
        options = [*data, *TINY, "--order", "time", "--window", "2h", "--seed", str(seed), "--ranks", "1"]
        reports.append(train(tmp_path / f"{name}.json", *options))
    assert outcome(reports[0]) == outcome(reports[1])


def test_the_number_is_said_once() -> None:
    with pytest.raises(DataError, match=r"skip_broken is 2, and text\.skip_broken is 3; allowed: one"):
        parse_schema({**SCHEMA, "skip_broken": 2, "text": {"skip_broken": 3}})
    with pytest.raises(DataError, match=r"skip_broken is -1; allowed"):
        parse_schema({**SCHEMA, "skip_broken": -1})
