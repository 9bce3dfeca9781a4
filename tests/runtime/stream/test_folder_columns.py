# SPDX-License-Identifier: Apache-2.0
"""Columns in the names of folders are as columns of the files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.stream.index import StreamIndex, open_index
from tests.runtime.stream.stream_files import SCHEMA, pa, pq, table
from tests.runtime.stream.test_stream_training import TINY, outcome
from tests.runtime.whole_run import train

dataset = pytest.importorskip("pyarrow.dataset")
csv = pytest.importorskip("pyarrow.csv")
COLUMNS = ("id", "day", "city", "shard")


def rows_of(index: StreamIndex, columns: tuple[str, ...] = COLUMNS) -> dict[str, list[Any]]:
    batches = [batch for _, batch in index.read(0, index.sample_count, columns)]
    return {name: [value for batch in batches for value in batch.column(name).to_pylist()] for name in columns}


def write(folder: Path) -> Any:
    """A folder of pyarrow's own writing. Returns what pyarrow reads from it."""
    content = {
        "id": list(range(60)),
        "day": [f"2026-01-{1 + row // 20:02}" for row in range(60)],
        "city": ["Ulm", "a/b c", None][:3] * 20,
        "shard": [row % 2 for row in range(60)],
    }
    parts = dataset.partitioning(
        pa.schema([("day", pa.string()), ("city", pa.string()), ("shard", pa.int64())]), flavor="hive"
    )
    dataset.write_dataset(pa.table(content), folder, format="parquet", partitioning=parts)
    return dataset.dataset(folder, format="parquet", partitioning=parts).to_table().sort_by("id")


def test_reads_what_pyarrow_reads(tmp_path: Path) -> None:
    expected = write(tmp_path)
    index = open_index([str(tmp_path)], COLUMNS)
    found = rows_of(pickle.loads(pickle.dumps(index)))
    assert sorted(zip(*found.values(), strict=True), key=str) == sorted(
        zip(*(expected[name].to_pylist() for name in COLUMNS), strict=True), key=str
    )
    # Of columns of folders alone, no file is read.
    assert rows_of(index, ("day", "shard")) == {name: found[name] for name in ("day", "shard")}
    assert [str(index.schema.field(name).type) for name in COLUMNS] == ["int64", "string", "string", "int64"]


def test_folders_tell_streams_apart(tmp_path: Path) -> None:
    for name in ("day=2026-01-01", "day=2026-01-02"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / name / "a.parquet")
    one, other = (open_index([str(folder)], ("id", "day")) for folder in sorted(tmp_path.iterdir()))
    assert one.fingerprint != other.fingerprint
    assert open_index([str(tmp_path)], ("id",)).fingerprint == open_index([str(tmp_path)], ("id",)).fingerprint


def test_a_day_is_a_time_and_a_null_is_none(tmp_path: Path) -> None:
    for name in ("at=20260101", "at=20260102T0600"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.csv").write_text("id\n1\n2\n")
    index = open_index([str(tmp_path)], ("id",), time_column="at")
    assert [index.time_span(block) for block in range(2)] == [(1767225600,) * 2, (1767333600,) * 2]
    (tmp_path / "at=__HIVE_DEFAULT_PARTITION__").mkdir()
    (tmp_path / "at=__HIVE_DEFAULT_PARTITION__" / "a.csv").write_text("id\n1\n")
    index = open_index([str(tmp_path)], ("id",), time_column="at")
    assert index.time_span(2) is None
    assert rows_of(index, ("at",))["at"][4] is None


def test_a_folder_without_the_column_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "z.parquet")
    with pytest.raises(DataError, match=r"z.parquet: no column day, which .* has; there are: id"):
        open_index([str(tmp_path)], COLUMNS)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_run_has_the_bits_of_one_whose_files_have_the_columns(form: str, seed: int, tmp_path: Path) -> None:
    # By day, and with a place that is hashed.
    rows = table(seed, 300).drop_columns(["seen", "at"])
    rows = rows.set_column(0, "clicked", rows["clicked"].cast(pa.int8()))
    schema = SCHEMA.replace('[sparse.seen]\nencode = "hash"\nrows = 30\nsalt = 3\nfirst = 2\n', "")
    schema = schema.replace('time = "at"', 'time = "day"') + '[sparse.region]\nencode = "hash"\nrows = 30\n'
    (tmp_path / "schema.toml").write_text(schema)
    for number in range(6):
        part = rows.slice(50 * number, 50)
        day, region = f"2026-01-{1 + number // 2:02}", f"r{number % 2}"
        folder = tmp_path / "folders" / f"day={day}" / f"region={region}"
        folder.mkdir(parents=True)
        times = pa.array([day] * 50).cast(pa.timestamp("s"))
        whole = part.append_column("day", times).append_column("region", pa.array([region] * 50))
        (tmp_path / "whole").mkdir(exist_ok=True)
        for content, path in ((part, folder / f"a.{form}"), (whole, tmp_path / "whole" / f"{number}.{form}")):
            pq.write_table(content, path) if form == "parquet" else csv.write_csv(content, path)
    found, expected = (
        train(
            tmp_path / f"{name}.json", "--data", str(tmp_path / name), "--schema", str(tmp_path / "schema.toml"), *TINY,
            "--order", "time", "--window", "1d", "--seed", str(seed),
        )
        for name in ("folders", "whole")
    )  # fmt: skip
    assert outcome(found) == outcome(expected)
