# SPDX-License-Identifier: Apache-2.0
"""`synthetic-stream`: any block alone, the plan of its drift, and what the best model reaches."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from sennit.commands.cli import app
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import read_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream.attainable import Attainable, by_day
from sennit.runtime.stream.files import PIECE_ROWS, StreamFile
from sennit.runtime.stream.planted import DAY_S, Planted, indices, probabilities
from sennit.runtime.stream.synthetic import BLOCK_ROWS, SyntheticDay, days_of
from sennit.runtime.stream.synthetic_data import settings_of
from sennit.runtime.stream.synthetic_settings import FORMATS, SyntheticStream
from sennit.runtime.stream.writing import write
from sennit.transport.errors import ConfigError
from tests.runtime.whole_run import train

arrow = pytest.importorskip("pyarrow")

SMALL = SyntheticStream(days=3, rows_per_day=20_000, living=(500, 50), life_days=4, drift_days=5, dense=2)
TWO_BLOCKS = replace(SMALL, rows_per_day=BLOCK_ROWS + 1_000)


def whole(file: StreamFile, block: int, columns: list[str] | None = None, *, begin: int = 0) -> Any:
    return arrow.Table.from_batches(file.read(block, columns or file.schema.names, begin=begin))


@pytest.mark.parametrize("begin", [0, 999])
def test_a_block_alone_has_the_rows_of_the_whole(begin: int) -> None:
    """The whole is made by index here, without files and blocks."""
    day = days_of(TWO_BLOCKS)[1]
    assert day.block_rows == (BLOCK_ROWS, 1_000)
    planted, first = Planted(TWO_BLOCKS), TWO_BLOCKS.rows_per_day + BLOCK_ROWS
    index = indices(first + begin, first + 1_000)
    found = whole(pickle.loads(pickle.dumps(day)), 1, begin=begin)
    assert found.schema == day.schema
    assert found.column_names == ["time", "label", "dense_00", "dense_01", "table_00", "table_01"]
    for name, expected in (
        ("time", planted.times(index)),
        ("label", planted.labels(index)),
        ("dense_01", planted.dense(1, index)),
        ("table_00", planted.ids(0, index)),
        ("table_01", planted.ids(1, index)),
    ):
        np.testing.assert_array_equal(found[name].to_numpy(), expected)
    assert whole(day, 1, ["table_01", "time"], begin=begin) == found.select(["table_01", "time"])


def test_pieces_are_small_and_rows_are_in_the_order_of_time() -> None:
    day = days_of(TWO_BLOCKS)[2]
    pieces = list(day.read(0, ["time"]))
    assert [len(piece) for piece in pieces] == [PIECE_ROWS] * (BLOCK_ROWS // PIECE_ROWS)
    times = np.concatenate([piece["time"].to_numpy() for piece in [*pieces, *day.read(1, ["time"])]])
    assert times[0] == 2 * DAY_S
    assert times[-1] < 3 * DAY_S
    assert (np.diff(times) >= 0).all()
    assert day.span(0, "time") == (times[0], times[BLOCK_ROWS - 1])
    assert day.span(1, "time") == (times[BLOCK_ROWS], times[-1])
    assert day.span(0, "label") is None
    assert day.where(1, 5) == "block 1, row 5"


def test_settings_tell_streams_apart() -> None:
    days = [SyntheticDay(settings, 0) for settings in (SMALL, replace(SMALL, seed=2), replace(SMALL, zipf=1.0))]
    assert len({day.digest for day in days} | {SyntheticDay(SMALL, 1).digest}) == 4
    assert whole(days[0], 0) != whole(days[1], 0)


def test_bits_are_those_of_every_machine() -> None:
    """A machine with another C library, or vector units, must make the same."""
    digest = hashlib.sha256()
    for file in days_of(SMALL):
        for piece in file.read(0, file.schema.names):
            for column in piece.columns:
                digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    assert digest.hexdigest() == "7b16ab5685ecc61aad93e9f3b5c617facaeebf1a2d8dc74b3fe2333fa8093c50"


def test_memory_does_not_grow_with_rows() -> None:
    """Neither with those of the stream nor with those of a block: a piece at a time is there."""

    def peak(settings: SyntheticStream, rows: int) -> int:
        file = SyntheticDay(settings, settings.days - 1)
        block = len(file.block_rows) - 1
        tracemalloc.start()
        for piece in file.read(block, ["label", "table_00"], begin=file.block_rows[block] - rows):
            assert len(piece)
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    short = replace(SMALL, rows_per_day=BLOCK_ROWS)
    peak(short, 1)  # makes the tables that stay
    once = peak(short, PIECE_ROWS)
    assert peak(short, BLOCK_ROWS) < 1.1 * once
    assert peak(replace(short, days=1_000, rows_per_day=1_000 * BLOCK_ROWS), BLOCK_ROWS) < 1.1 * once
    assert once > PIECE_ROWS * 8  # it is what is measured


def test_clicks_are_as_many_as_planned() -> None:
    """The mean over streams: in one of them the weights of popular ids move the rate."""
    rates, errors = [], []
    for seed in range(1, 41):
        planted = Planted(replace(SMALL, seed=seed, base_rate=0.1))
        index = indices(0, 60_000)[::40]
        logits = planted.logits(index)
        rates.append(float(probabilities(logits).mean()))
        errors.append(float((planted.labels(index, logits) - probabilities(logits)).mean()))
    assert np.mean(rates) == pytest.approx(0.1, rel=0.1)
    # Labels have the true probabilities: 60,000 of them, with a deviation of less than sqrt(0.1 / 60,000).
    assert abs(np.mean(errors)) < 4 * math.sqrt(0.1 / 60_000)


def test_dense_features_are_normal() -> None:
    values = Planted(SMALL).dense(1, indices(0, 40_000)).astype(np.float64)
    assert abs(values.mean()) < 4 / 200
    assert values.var() == pytest.approx(1, abs=4 * math.sqrt(2) / 200)
    assert (values**4).mean() == pytest.approx(3, abs=4 * math.sqrt(96) / 200)


def test_so_many_ids_are_born_each_day() -> None:
    settings = replace(SMALL, days=12, living=(20_000,), life_days=8)
    planted = Planted(settings)
    seen: set[int] = set()
    born = []
    for day in range(12):
        ids, births = planted.slots_of(0, day * DAY_S)
        assert ((births <= day * DAY_S) & (births > (day - 8) * DAY_S)).all()
        assert len(set(ids.tolist())) == 20_000
        born.append(len(set(ids.tolist()) - seen))
        assert born[-1] == (births > (day - 1 if day else -8) * DAY_S).sum()
        seen |= set(ids.tolist())
    assert born[0] == 20_000
    # 20,000 / 8, each slot with the chance 1/8 on its own.
    deviation = math.sqrt(20_000 / 8 * 7 / 8)
    assert all(abs(count - 2_500) < 4 * deviation for count in born[1:])
    # After a life all are others.
    assert sum(born[1:9]) == 20_000


def test_samples_have_ids_that_live_and_new_ones_all_day() -> None:
    settings = replace(SMALL, living=(2_000,), life_days=2)
    planted, new = Planted(settings), []
    first = set(planted.ids(0, indices(0, 2_000)).tolist())
    for hour in (0, 6, 12, 18):
        begin = settings.rows_per_day + hour * settings.rows_per_day // 24
        index = indices(begin, begin + 2_000)
        new.append(len(set(planted.ids(0, index).tolist()) - first))
        time_s = int(planted.times(index)[0])
        alive = set(planted.slots_of(0, time_s)[0].tolist())
        assert planted.ids(0, index[:1])[0] in alive
    # At first half of them have been replaced, at last 0.9.
    assert new == sorted(new)
    assert new[-1] > new[0] > 200


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.4])
def test_popularity_is_zipf_at_any_time(exponent: float) -> None:
    settings = replace(SMALL, days=400, rows_per_day=200_000, living=(1_000,), life_days=36_500, zipf=exponent)
    planted = Planted(settings)
    for day in (0, 399):
        by_rank = planted.slots_of(0, day * DAY_S)[0]
        drawn = planted.ids(0, indices(day * 200_000, (day + 1) * 200_000))
        counts = np.asarray([(drawn == one).sum() for one in by_rank[:60]])
        slope = np.polyfit(np.log(np.arange(1, 61)), np.log(counts), 1, w=np.sqrt(counts))[0]
        assert slope == pytest.approx(-exponent, abs=0.04)


@pytest.mark.parametrize(("lag_days", "correlation"), [(0, 1.0), (1, 0.819), (5, 0.368), (15, 0.050)])
def test_weights_drift_at_the_planned_rate(lag_days: float, correlation: float) -> None:
    planted = Planted(replace(SMALL, living=(20_000,), drift_days=5))
    ids, _ = planted.slots_of(0, 0)
    start = np.full(len(ids), 3 * DAY_S)
    before, after = planted.weights(ids, start), planted.weights(ids, start + round(lag_days * DAY_S))
    assert before.var() == pytest.approx(1, abs=0.04)
    assert abs(before.mean()) < 4 / math.sqrt(20_000)
    assert (before * after).mean() == pytest.approx(correlation, abs=0.04)


def test_without_drift_and_births_nothing_changes() -> None:
    planted = Planted(replace(SMALL, drift_days=36_500, life_days=36_500))
    ids, _ = planted.slots_of(0, 0)
    later, _ = planted.slots_of(0, 2 * DAY_S)
    assert (ids != later).sum() <= 1
    moved = planted.weights(ids, np.full(len(ids), 2 * DAY_S)) - planted.weights(ids, np.zeros(len(ids), np.int64))
    assert np.abs(moved).max() < 0.2
    assert np.sqrt((moved**2).mean()) < 0.03


def test_true_probabilities_reach_what_is_expected_of_them() -> None:
    """The interval of 95 % has as many of the windows as it says, and is no wider than it must be."""
    apart = []
    for seed in range(1, 11):
        planted = Planted(replace(SMALL, seed=seed))
        for begin in range(0, 60_000, 6_000):
            found = Attainable.of(planted, begin, begin + 2_000)
            assert 0.4 < found.expected < 0.9
            apart.append((found.normalised_entropy - found.expected) / (found.half / 1.96))
    assert len(apart) == 100
    assert 88 <= sum(abs(one) < 1.96 for one in apart) <= 99
    assert abs(np.mean(apart)) < 4 / math.sqrt(100)
    assert 0.75 < np.std(apart) < 1.25


def test_attainable_is_that_of_all_samples_at_once() -> None:
    planted = Planted(SMALL)
    index = indices(0, 20_000)
    chances, labels = probabilities(planted.logits(index)), planted.labels(index)
    losses = -np.where(labels, np.log(chances), np.log1p(-chances))
    floor = -(labels.mean() * np.log(labels.mean()) + (1 - labels.mean()) * np.log(1 - labels.mean()))
    first, *_ = found = list(by_day(planted))
    assert len(found) == 3
    assert first.rows == 20_000
    assert first.base_rate == pytest.approx(labels.mean())
    assert first.normalised_entropy == pytest.approx(losses.mean() / floor)


def test_who_knows_the_weights_of_an_earlier_day_predicts_worse() -> None:
    planted = Planted(replace(SMALL, days=8))
    index = indices(7 * 20_000, 8 * 20_000)
    labels = planted.labels(index)

    def loss(logits: np.ndarray) -> float:
        return float((np.logaddexp(0, logits) - logits * labels).mean())

    np.testing.assert_array_equal(planted.forecast(index, 8 * DAY_S), planted.logits(index))
    losses = [loss(planted.logits(index)), *(loss(planted.forecast(index, day * DAY_S)) for day in (7, 6, 4, 0))]
    assert losses == sorted(losses)
    assert losses[1] > losses[0] * 1.01
    # It knows how little it knows: its probabilities stay right in the mean, and the true logits do not so later.
    forecast = planted.forecast(index, 2 * DAY_S)
    assert probabilities(forecast).mean() == pytest.approx(labels.mean(), rel=0.15)
    stale = planted.logits(indices(0, 20_000))
    assert loss(stale) > losses[-1]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"days": 0}, "days 0; allowed: 1 to 36500"),
        ({"rows_per_day": 0}, "rows_per_day 0; allowed: 1 to"),
        ({"living": ()}, r"living \(\); allowed: a number for each table"),
        ({"living": (5, 0)}, r"living \(5, 0\); allowed: a number for each table"),
        ({"life_days": 0}, "life_days 0; allowed: above 0, at most 36500"),
        ({"drift_days": math.nan}, "drift_days nan; allowed: above 0"),
        ({"base_rate": 1.0}, "base_rate 1.0; allowed: above 0, below 1"),
        ({"zipf": -1}, "zipf -1; allowed: 0 to 4"),
    ],
)
def test_settings_that_make_no_stream_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises((ConfigError, DataError), match=complaint):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_days_blocks_and_columns_that_there_are_not_are_named() -> None:
    with pytest.raises(DataError, match="day 3; allowed: 0 to 2"):
        SyntheticDay(SMALL, 3)
    day = SyntheticDay(SMALL, 0)
    with pytest.raises(DataError, match="day-00000: block 1; allowed: 0 to 0"):
        list(day.read(1, ["time"]))
    with pytest.raises(DataError, match="no column 'clicked'; allowed: time, label, dense_00"):
        list(day.read(0, ["clicked"]))
    with pytest.raises(DataError, match="samples 5 to 5; allowed: at least one of 0 to 60000"):
        Attainable.of(Planted(SMALL), 5, 5)


def test_files_have_the_rows_of_the_stream(tmp_path: Path) -> None:
    small = replace(SMALL, days=2, rows_per_day=3_000)
    rows = [whole(day, 0) for day in days_of(small)]
    told: list[SyntheticDay] = []
    for format in FORMATS:
        folder = tmp_path / format
        write(small, folder, format, told.append)
        for number, expected in enumerate(rows):
            path = folder / f"day-{number:05d}.{format}"
            match format:
                case "parquet":
                    found = pytest.importorskip("pyarrow.parquet").read_table(path)
                case "arrow":
                    found = arrow.ipc.open_file(path).read_all()
                case _:
                    csv = pytest.importorskip("pyarrow.csv")
                    parse = csv.ParseOptions(delimiter="," if format == "csv" else "\t")
                    found = csv.read_csv(path, parse_options=parse).cast(expected.schema)
            assert found.equals(expected), path
        assert sorted(path.name for path in folder.iterdir()) == [
            "attainable.json", f"day-00000.{format}", f"day-00001.{format}", "schema.toml"
        ]  # fmt: skip
    assert told == 4 * list(days_of(small))
    days = json.loads((tmp_path / "csv" / "attainable.json").read_text())["days"]
    assert days == [asdict(one) for one in by_day(Planted(small))]
    # 500 and 50 ids and half as many that are born.
    schema = read_schema(tmp_path / "csv" / "schema.toml")
    assert schema.time is not None
    assert schema.time.column == "time"
    assert set(schema.columns) - {"time"} == {"label", "dense_00", "dense_01", "table_00", "table_01"}
    assert [field.rows for field in schema.sparse] == [4_096, 512]


def test_row_groups_are_the_blocks(tmp_path: Path) -> None:
    write(replace(TWO_BLOCKS, days=1), tmp_path, "parquet")
    metadata = pytest.importorskip("pyarrow.parquet").read_metadata(tmp_path / "day-00000.parquet")
    assert [metadata.row_group(number).num_rows for number in range(2)] == [BLOCK_ROWS, 1_000]


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "day-00001.csv").write_text("mine")
    with pytest.raises(DataError, match=r"day-00001.csv exists already; allowed: a folder without"):
        write(SMALL, tmp_path, "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["day-00001.csv"]
    with pytest.raises(DataError, match="format 'xml'; allowed: parquet, arrow, csv, tsv"):
        write(SMALL, tmp_path, "xml")
    with pytest.raises(DataError, match=r"day-00001.csv: .*; allowed: a folder that can be written"):
        write(SMALL, tmp_path / "day-00001.csv", "csv")


def test_the_command_writes_files_and_tells_mistakes(tmp_path: Path) -> None:
    small = ["--days", "1", "--rows-per-day", "100", "--living", "10,5"]
    found = CliRunner().invoke(app, ["make-stream", str(tmp_path / "clicks"), *small, "--format", "csv"])
    assert found.exit_code == 0, found.output
    assert f"{tmp_path}/clicks: 100 samples by day, schema.toml, attainable.json" in found.output.replace("\n", "")
    header = (tmp_path / "clicks" / "day-00000.csv").read_text().splitlines()[0]
    assert header.replace('"', "") == "time,label,dense_00,dense_01,dense_02,dense_03,table_00,table_01"
    for mistake, complaint in (
        (["--living", "ten"], "--living 'ten'; allowed: a number for each table"),
        (["--days", "0"], "days 0; allowed: 1 to 36500"),
        (["--format", "xml"], "format 'xml'; allowed: parquet, arrow, csv, tsv"),
    ):
        found = CliRunner().invoke(app, ["make-stream", str(tmp_path / "no"), *mistake])
        assert found.exit_code != 0
        assert complaint in " ".join(found.output.split())


@pytest.mark.timeout(120)
@pytest.mark.needs("backend", "shm")
def test_windows_of_a_run_are_the_days_whose_best_is_known(tmp_path: Path) -> None:
    """`sennit train` takes files and schema as they are written. What it reports by window stands beside what is
    attainable there."""
    small = replace(SMALL, days=4, rows_per_day=1_200)
    write(small, tmp_path / "clicks", "parquet")
    report = train(
        tmp_path / "run.json",
        *("--data", f"{tmp_path}/clicks/*.parquet", "--schema", str(tmp_path / "clicks" / "schema.toml")),
        *("--order", "time", "--window", "1d", "--epochs", "1", "--batch-size", "100", "--dim", "4"),
        *("--bottom", "8", "--top", "8", "--timeout", "60"),
    )
    best = list(by_day(Planted(small)))[1:]
    found = [one["quality"] for one in report["windows"]]
    assert [one["sample_count"] for one in found] == [one.rows for one in best] == [1_200] * 3
    assert [one["base_rate"] for one in found] == pytest.approx([one.base_rate for one in best], abs=1e-12)
    for one, attainable in zip(found, best, strict=True):
        assert one["normalised_entropy"] > attainable.normalised_entropy


OPTIONS = ["--batch-size", "500", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60"]


def test_a_run_needs_no_files(tmp_path: Path) -> None:
    write(SMALL, tmp_path / "files", "parquet")
    files = ["--data", str(tmp_path / "files" / "*.parquet"), "--schema", str(tmp_path / "files" / "schema.toml")]
    text = "synthetic-stream?days=3&rows-per-day=20000&living=500,50&life-days=4.0&drift_days=5&dense=2"
    order = ["--order", "time", "--window", "1d"]
    reports = [train(tmp_path / "run.json", *data, *OPTIONS, *order) for data in (files, ["--data", text])]
    assert reports[0]["weights_sha256"] == reports[1]["weights_sha256"]
    assert reports[0]["windows"] == reports[1]["windows"]


@pytest.mark.parametrize(("text", "told"), [
    ("synthetic-stream?dayz=3", "'dayz'; allowed: days, rows-per-day, living, life-days, drift-days, zipf, dense, b"),
    ("synthetic-stream?days=three", "days 'three'; allowed: a number"),
    ("synthetic-stream?days=3&days=4", "days twice; allowed: once"),
    ("synthetic-stream?days", "allowed: synthetic-stream?days=30&dense=8"),
    ("synthetic-stream?living=a", "--living 'a'; allowed: a number for each table, with commas between them"),
    ("synthetic-stream?days=0", "days 0; allowed: 1 to 36500"),
])  # fmt: skip
def test_what_the_name_says_is_checked(text: str, told: str) -> None:
    with pytest.raises((DataError, ConfigError)) as found:
        settings_of(Source(data=text))
    assert told in str(found.value)


def test_a_schema_is_of_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--schema with --data synthetic-stream, which says itself what it has"):
        settings_of(Source(data="synthetic-stream", schema=tmp_path))
    assert settings_of(Source(data="synthetic-stream")) == SyntheticStream()
