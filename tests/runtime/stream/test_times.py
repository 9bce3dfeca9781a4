# SPDX-License-Identifier: Apache-2.0
"""The column of time: rows of moments, windows with and without rows, units, and windows that are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.errors import DataError
from sennit.runtime.stream.index import open_index
from sennit.runtime.stream.times import (
    Times,
    duration_text,
    moment_text,
    parse_duration,
    parse_moment,
    rolling,
)
from tests.extent import examples

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def times_of(folder: Path, values: Any, *, group: int = 3, statistics: bool = True, **options: Any) -> Times:
    rows = pa.table({"at": values})
    pq.write_table(rows, folder / "a.parquet", row_group_size=group, write_statistics=statistics)
    return Times(open_index([str(folder / "a.parquet")], ["at"], time_column="at"), **options)


@given(
    gaps=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    length=st.integers(1, 12),
    statistics=st.booleans(),
    group=st.integers(1, 7),
)
@examples(30)
def test_windows_are_where_counting_finds_them(
    gaps: list[int], length: int, statistics: bool, group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = 1000 + np.cumsum(gaps)
    times = times_of(tmp_path_factory.mktemp("times"), pa.array(at), group=group, statistics=statistics)
    assert (times.first_s, times.last_s) == (at[0], at[-1])
    for moment in (0, at[0], at[-1], at[-1] + 1, *(at + 1)):
        assert times.row_at(float(moment)) == int((at < moment).sum())
    windows = at // length
    begins = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist()]
    assert list(times.windows(float(length))) == [(int(windows[row]) * length, row) for row in begins]


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (pa.array([1, 2], pa.timestamp("s")), "s"),
        (pa.array([1000, 2000], pa.timestamp("ms", tz="UTC")), "s"),
        (pa.array([10**9, 2 * 10**9], pa.timestamp("ns")), "s"),
        (pa.array([1_000_000, 2_000_000], pa.int64()), "us"),
        (pa.array([1.0, 2.0], pa.float64()), "s"),
    ],
)
def test_every_unit_gives_seconds(values: Any, unit: str, tmp_path: Path) -> None:
    times = times_of(tmp_path, values, unit=unit)
    assert (times.first_s, times.last_s) == (1.0, 2.0)


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        [pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ms")],
        [pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns", "UTC")],
    ],
)
def test_moments_of_several_files_have_several_units_and_zones(
    kinds: list[Any], statistics: bool, tmp_path: Path
) -> None:
    """pandas 2 writes nanoseconds, and pandas 3 microseconds."""
    seconds = np.arange(18) + 1_700_000_000
    for number, kind in enumerate(kinds):
        rows = pa.table({"at": pa.array(seconds[6 * number : 6 * number + 6], pa.timestamp("s")).cast(kind)})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=3, write_statistics=statistics)
    index = open_index([str(tmp_path)], ["at"], time_column="at")
    assert index.schema.field("at").type == pa.timestamp("ns", kinds[0].tz)
    times = Times(index)
    assert (times.first_s, times.last_s) == (seconds[0], seconds[-1])
    assert [times.row_at(float(moment)) for moment in seconds] == list(range(18))
    assert [row for _, row in times.windows(4.0)] == list(range(0, 18, 4))


def test_moments_with_and_without_a_zone_are_not_mixed(tmp_path: Path) -> None:
    for name, zone in (("a", None), ("b", "UTC")):
        pq.write_table(pa.table({"at": pa.array([1], pa.timestamp("us", zone))}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"/b.parquet: column at is timestamp\[us, tz=UTC\], but in .*/a.parquet it is"):
        open_index([str(tmp_path)], ["at"], time_column="at")
    pq.write_table(pa.table({"at": pa.array([2**62], pa.timestamp("us"))}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"at": pa.array([1], pa.timestamp("ns"))}), tmp_path / "b.parquet")
    index = open_index([str(tmp_path)], ["at"], time_column="at")
    with pytest.raises(DataError, match=r"/a.parquet: column at, row group 0, row 0: value .*; allowed: timestamp"):
        list(index.read(0, 1, ["at"]))


def test_a_date_is_a_day_of_seconds(tmp_path: Path) -> None:
    assert times_of(tmp_path, pa.array([0, 2], pa.date32())).last_s == 2 * 86_400


@pytest.mark.parametrize("statistics", [True, False])
def test_backwards_and_null_are_named(statistics: bool, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/a\.parquet: column at is string; allowed for time: timestamp"):
        times_of(tmp_path, pa.array(["a"]))
    times = times_of(tmp_path, pa.array([1, 2, None]), statistics=statistics)
    with pytest.raises(DataError, match=r"column at, row group 0, row 2: null; allowed: a time in every row"):
        times.row_at(2.0)
    wrong = pa.array([1, 2, 9, 5, 6, 7])
    if statistics:
        with pytest.raises(DataError, match=r"row group 1, row 0: 1970-01-01T00:00:05 after 1970-01-01T00:00:09, 4 s"):
            times_of(tmp_path, wrong)
    times_of(tmp_path, wrong, statistics=statistics, tolerance_s=4.0)


def test_durations_and_moments_are_read_and_written() -> None:
    assert [parse_duration(text) for text in ("0s", "90", "90s", "1.5h", "1d", "2w")] == [
        0, 90, 90, 5400, 86_400, 1_209_600,
    ]  # fmt: skip
    assert [duration_text(value) for value in (0.0, 90.0, 5400.0, 86_400.0, 1_209_600.0, 0.5)] == [
        "0s", "90s", "90m", "1d", "2w", "0.5s",
    ]  # fmt: skip
    for text in ("", "1y", "d", "-1d", "nan"):
        with pytest.raises(ValueError, match="allowed: a duration"):
            parse_duration(text)
    assert parse_moment("1970-01-02") == parse_moment("86400") == parse_moment("1970-01-02T01:00+01:00") == 86_400
    assert moment_text(86_400.0) == "1970-01-02"
    assert moment_text(86_401.0) == "1970-01-02T00:00:01"
    with pytest.raises(ValueError, match="allowed: 2026-11-28"):
        parse_moment("tomorrow")


def test_a_window_within_a_batch_is_not_evaluated_by_itself(tmp_path: Path) -> None:
    """Windows of 10 s have 4, 2, 6 and 4 rows, and a batch has 5."""
    at = [0, 1, 2, 3, 10, 11, 20, 21, 22, 23, 24, 25, 30, 31, 32, 33]
    times = times_of(tmp_path, pa.array(at))
    found = rolling(times, 10.0, len(at), 5)
    # The first batch has 4 rows of the first window, and one of the second, whose other row is evaluated.
    assert [(one.steps, one.numbers, one.name[-2:]) for one in found] == [
        (1, (5, 6), "10"), (2, (10, 12), "20"), (3, (15, 16), "30"),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"windows of 1d: 1 with rows, from 1970-01-01 to 1970-01-01T00:00:33"):
        rolling(times, 86_400.0, len(at), 5)


@given(
    steps=st.lists(st.integers(-4, 9), min_size=1, max_size=40),
    group=st.integers(1, 5),
    length=st.integers(3, 12),
    share=st.floats(0.1, 1),
)
@examples(30)
def test_late_rows_move_no_window_and_more_rows_move_none(
    steps: list[int], group: int, length: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A window begins at the first row whose time is not before it, whatever blocks are."""
    folder = tmp_path_factory.mktemp("times")
    at = np.cumsum([100, *steps])
    late = float((np.maximum.accumulate(at) - at).max())
    whole = times_of(folder, pa.array(at), group=group, tolerance_s=late)
    for moment in range(int(at.min()) - 1, int(at.max()) + 2):
        assert whole.row_at(float(moment)) == next((row for row, one in enumerate(at) if one >= moment), len(at))
    index = open_index([str(folder / "a.parquet")], ["at"], time_column="at")
    first = int(index.ends[int(len(index.ends) * share) - 1 if len(index.ends) > 1 else 0])
    shorter = Times(index, tolerance_s=late, row_count=first)
    known = list(shorter.windows(float(length)))
    longer = Times(index, tolerance_s=late, before=shorter)
    assert list(longer.windows(float(length))) == list(whole.windows(float(length)))
    assert list(whole.windows(float(length)))[: len(known) - 1] == known[:-1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_is_named(wrong: float, tmp_path: Path) -> None:
    times = times_of(tmp_path, pa.array([1.0, 2.0, 3.0, 4.0, wrong]), statistics=False)
    with pytest.raises(DataError, match=f"column at, row group 1, row 1: {wrong}; allowed: a time in every row"):
        times.row_at(9.0)


def test_windows_of_times_in_another_unit_end_in_an_error(tmp_path: Path) -> None:
    times = times_of(tmp_path, pa.array([1_700_000_000_000_000_000, 1_700_000_060_000_000_000]))
    with pytest.raises(DataError, match=r'windows of 1m, but times are 1\.7e\+18 s from 1970; .* unit = "ns"'):
        times.windows(60.0)


def test_text_files_that_go_back_in_time_are_named(tmp_path: Path) -> None:
    for name, first in (("a.csv", 1000), ("b.csv", 0)):
        (tmp_path / name).write_text("at\n" + "".join(f"{first + row}\n" for row in range(50)))
    index = open_index([str(tmp_path / "*.csv")], ["at"], time_column="at")
    times = Times(index)

    def read() -> None:
        for place, rows in index.read(0, index.sample_count, ["at"]):
            times.check(place, rows, None)

    with pytest.raises(DataError, match=r"b\.csv: column at, line 2: 1970-01-01 after 1970-01-01T00:17:29"):
        read()
