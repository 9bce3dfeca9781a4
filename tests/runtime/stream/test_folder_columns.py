# SPDX-License-Identifier: Apache-2.0
"""Columns in the names of folders are as columns of the files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import find_files
from sennit.runtime.data.text_format import PLAIN
from sennit.runtime.stream.formats import open_files
from sennit.runtime.stream.index import StreamIndex, index_of, open_index
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
def test_a_folder_above_the_named_one_adds_columns_and_replaces_none(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may work in a folder `x=3` of its own."""
    folder = tmp_path / "x=3" / "y=4" / "data"
    inner = folder / "x=5"
    inner.mkdir(parents=True)
    content = pa.table({"id": [0, 1], "x": [6, 7]})
    for path in (folder / f"a.{form}", inner / f"a.{form}"):
        pq.write_table(content, path) if form == "parquet" else csv.write_csv(content, path)
    monkeypatch.chdir(folder)

    def rows(path: str) -> list[tuple[int, ...]]:
        return list(zip(*rows_of(open_index([path], ("x", "y")), ("x", "y")).values(), strict=True))

    own, named = [(6, 4), (7, 4)], [(5, 4), (5, 4)]
    for place in (f"a.{form}", f"../data/a.{form}", f"{folder}/a.{form}", f"*.{form}", "x=5", f"x=5/a.{form}"):
        assert rows(place) == own, place
    # The folder's value counts where the folder is below the one that is named.
    for place in (f"x=*/a.{form}", f"{folder}/x=*"):
        assert rows(place) == named, place
    assert rows(".") == rows(str(folder)) == own + named
    assert rows(f"../../*/data/a.{form}") == own


def test_files_that_come_later_keep_the_type_of_a_folder(tmp_path: Path) -> None:
    null = "__HIVE_DEFAULT_PARTITION__"

    def opened(*values: str) -> list[str]:
        """The column's types in files that are opened one after another."""
        found: list[Any] = []
        for value in values:
            (tmp_path / f"at={value}").mkdir(exist_ok=True)
            pq.write_table(pa.table({"id": [1]}), tmp_path / f"at={value}" / "a.parquet")
            files = find_files([f"{tmp_path}/at={value}/*"])
            found += open_files(files, ("id", "at"), PLAIN, before=found[-1] if found else None)
        index = index_of(tuple(found), ("id", "at"))
        assert rows_of(index, ("at",))["at"] == [
            None if value == null else int(value) if str(index.schema.field("at").type) == "int64" else value
            for value in values
        ]
        return [str(file.schema.field("at").type) for file in found]

    assert opened("1", null, "2") == ["int64"] * 3
    assert opened("Ulm", null, "2") == ["string"] * 3
    assert opened(null, "1") == ["null", "int64"]
    assert opened("-5", "7") == ["int64"] * 2
    assert opened("--5") == ["string"]
    message = (
        r"at=Ulm/a\.parquet: column at is 'Ulm' by its folder, but int64 in files up to .*PARTITION__/a\.parquet; al"
    )
    with pytest.raises(DataError, match=message):
        opened("1", null, "Ulm")


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
