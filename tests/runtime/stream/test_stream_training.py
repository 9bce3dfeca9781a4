# SPDX-License-Identifier: Apache-2.0
"""Runs of `sennit train` on a stream: the same bits in any world, stopped and resumed, and with ranks that die."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.source import Source
from sennit.runtime.stream import index, settings
from sennit.runtime.stream.loader import StreamLoader
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training import streamed
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.resumption import what_is_kept
from tests.extent import briefly
from tests.forked_commands import forked
from tests.runtime.elastic_runs import died_and_rejoined
from tests.runtime.stream.stream_files import table, write
from tests.runtime.whole_run import failure, train
from tests.runtime.world import WorldFactory

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.timeout(240)

TINY = ["--batch-size", "40", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60",
    "--row-shards", "4", "--sharding", "table_wise",
]  # fmt: skip
ORDERS: dict[str, list[str]] = {
    "shuffled": ["--order", "shuffled", "--shuffle-rows", "250", "--epochs", "2", "--validation-fraction", "0.1"],
    "time": ["--order", "time"],
    "files": ["--order", "files", "--epochs", "2"],
    "rolling": ["--order", "time", "--window", "2h"],
    "until": ["--order", "shuffled", "--train-until", "1970-01-01T08:00"],
    "next": ["--order", "time", "--train-until", "28800", "--evaluate-on", "next", "--window", "1h"],
}


def outcome(report: dict[str, Any]) -> tuple[Any, ...]:
    return report["weights_sha256"], report["quality"], report["validation"], report["windows"]


@pytest.mark.parametrize("order", briefly(ORDERS, ["rolling"]))
def test_any_world_and_any_stop_give_the_same_bits(order: str, seed: int, tmp_path: Path) -> None:
    data = write(tmp_path / "data", table(seed))
    options = [*data, *TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "1.json", *options, "--ranks", "1")
    last = alone["steps"]["last"]
    assert outcome(train(tmp_path / "3.json", *options, "--ranks", "3", "--sharding", "row_wise")) == outcome(alone)
    kept = [*options, "--checkpoint", str(tmp_path / "kept")]
    train(tmp_path / "stopped.json", *kept, "--ranks", "2", "--steps", str(last // 2 + 1))
    assert outcome(train(tmp_path / "on.json", *kept, "--ranks", "1", "--resume")) == outcome(alone)


WORLDS = [(2, "data_parallel"), (4, "row_wise"), (8, "table_wise")]


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_so_do_four_and_eight_ranks_that_take_over_from_each_other(order: str, seed: int, tmp_path: Path) -> None:
    data = write(tmp_path / "data", table(seed))
    options = [*data, *TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "1.json", *options, "--ranks", "1")
    last = alone["steps"]["last"]
    kept = [*options, "--checkpoint", str(tmp_path / "kept")]
    for turn, (world, placement) in enumerate(WORLDS):
        # A third of the steps each, the first ones with two ranks.
        until = [] if world == 8 else ["--steps", str((turn + 1) * last // 3)]
        placed = ["--ranks", str(world), "--sharding", placement]
        found = train(tmp_path / "part.json", *kept, *placed, *until, "--resume")
        assert found["steps"]["first"] == turn * last // 3
    assert outcome(found) == outcome(alone)


def test_a_rolling_run_evaluates_each_window_before_it_trains_on_it(seed: int, tmp_path: Path) -> None:
    """1,200 rows in 12 hours are 200 in a window of two, which are 5 batches of 40."""
    data = write(tmp_path / "data", table(seed))
    report = train(tmp_path / "run.json", *data, *TINY, "--order", "time", "--window", "2h", "--seed", str(seed))
    found = [(one["window"], one["step"], one["quality"]["sample_count"]) for one in report["windows"]]
    assert found == [(f"1970-01-01T{2 * hour:02}:00:00", 5 * hour, 200) for hour in range(1, 6)]
    assert report["best"] is None


def test_a_named_data_set_is_a_short_stream(seed: int, tmp_path: Path) -> None:
    options = ["--data", "synthetic", "--samples", "300", "--row-limit", "200", *TINY, "--seed", str(seed)]
    options += ["--shuffle-rows", "100"]
    alone = train(tmp_path / "1.json", *options)
    assert alone["steps"]["last"] == 2 * (270 // 40)
    assert outcome(train(tmp_path / "3.json", *options, "--ranks", "3")) == outcome(alone)


# With means that follow the stream, `make test` does the same: test_running.py.
@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_a_death_and_a_newcomer_change_no_bit(order: str, seed: int, tmp_path: Path) -> None:
    data = [*write(tmp_path / "data", table(seed)), *TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "alone.json", *data)
    report = died_and_rejoined(tmp_path, data, death_step=7, halt_step=10)
    assert outcome(report) == outcome(alone)
    assert [(change["lost"], change["joined"]) for change in report["changes"]] == [([1], []), ([], [1])]


def test_what_is_no_order_is_refused(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = [*write(tmp_path / "data", table(seed)), *TINY]
    (tmp_path / "ids.toml").write_text('label = "clicked"\n[sparse.user]\nrows = 40\n')
    without = [*data[:3], str(tmp_path / "ids.toml"), *TINY]
    for options, words in (
        (
            ["--data", "synthetic", "--samples", "300", "--order", "time"],
            "synthetic: no column of time; allowed: time =",
        ),
        ([*data, "--order", "time", "--epochs", "2"], "--epochs 2 with --order time; allowed: 1"),
        ([*without, "--min-frequency", "2"], "--min-frequency 2, but no column of"),
        ([*data, "--order", "shuffled", "--window", "1h"], "--window with --order shuffled; allowed: time"),
        ([*data, "--order", "time", "--window", "1y"], "--window: '1y'; allowed: a duration, like 6h"),
        ([*data, "--order", "time", "--window", "1d"], "windows of 1d: 1 with rows, from 1970-01-01 to"),
        ([*data, "--order", "time", "--train-until", "2031-01-01"], "1200 rows before 2031-01-01 and 0 to evaluate"),
        ([*data, "--order", "time", "--evaluate-on", "next"], "--evaluate-on next alone; allowed: with --train-until"),
        ([*data, "--order", "time", "--window", "1h", "--stop-early", "1", "--checkpoint", "x"], "--stop-early with"),
    ):
        assert words in failure(capfd, *options)


def test_time_that_runs_backwards_is_named(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = table(seed)
    at = rows["at"].to_pylist()
    at[500], at[505] = at[505], at[500]
    wrong = rows.set_column(1, "at", pa.array(at, pa.timestamp("s")))
    data = [*write(tmp_path / "data", wrong, files=1), *TINY, "--order", "time"]
    told = failure(capfd, *data, "--ranks", "1")
    # Row 500 of the file is row 50 of row group 5.
    assert "part-0.parquet: column at, row group 5, row 51: 1970-01-01T05:00:36 after 1970-01-01T05:03:00" in told
    assert "allowed: 0 s (--time-tolerance)" in told
    train(tmp_path / "run.json", *data, "--time-tolerance", "5m", "--ranks", "1")


def test_blocks_in_another_order_than_time_are_named(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = [*write(tmp_path / "data", table(seed)), *TINY, "--order", "time"]
    (tmp_path / "data" / "part-0.parquet").rename(tmp_path / "data" / "part-9.parquet")
    told = failure(capfd, *data)
    assert "part-9.parquet: column at" in told
    assert "s back; allowed: 0 s (--time-tolerance)" in told


def test_a_type_that_the_schema_does_not_allow_is_named(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = table(seed)
    for name, wrong in (("clicked", ["yes"] * len(rows)), ("user", [1.5] * len(rows)), ("price", ["1"] * len(rows))):
        changed = rows.set_column(rows.column_names.index(name), name, pa.array(wrong))
        data = write(tmp_path / name, changed)
        told = failure(capfd, *data, *TINY, "--order", "files")
        assert f"part-0.parquet: column {name} is " in told
        assert "; allowed" in told


def test_files_for_evaluation_need_no_order(seed: int, tmp_path: Path) -> None:
    """They are older than what is trained on here."""
    rows = table(seed)
    data = write(tmp_path / "data", rows.slice(600))
    write(tmp_path / "old", rows.slice(0, 600).take(list(range(599, -1, -1))))
    options = [*data, "--eval-data", str(tmp_path / "old"), *TINY, "--order", "time"]
    report = train(tmp_path / "run.json", *options, "--ranks", "1")
    assert report["quality"]["sample_count"] == 600


def test_another_stream_does_not_resume_a_run(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = [*write(tmp_path / "data", table(seed)), *TINY]
    kept = [*data, "--checkpoint", str(tmp_path / "kept")]
    train(tmp_path / "run.json", *kept, "--order", "time", "--steps", "4")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")}
    told = failure(capfd, *kept, "--order", "shuffled", "--resume")
    assert "is of another run" in told
    assert "order.stream.order" in told
    told = failure(capfd, "--data", "synthetic", "--samples", "300", *TINY, *kept[-2:], "--resume")
    assert "is of another run" in told
    assert "data.samples: 1200 in the checkpoint, 300 here" in told
    write(tmp_path / "data", table(seed + 1))
    assert "data.fingerprint" in failure(capfd, *kept, "--order", "time", "--resume")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")} == before
    assert json.loads((tmp_path / "run.json").read_text())["steps"]["last"] == 4


def test_a_folder_that_becomes_empty_is_named(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, folder = write(tmp_path / "data", table(seed)), tmp_path / "data"
    loader = StreamLoader(str(folder), schema=folder / "schema.toml", order="time", batch_size=40)
    kept = [*data, *TINY, "--order", "time", "--checkpoint", str(tmp_path / "kept")]
    train(tmp_path / "run.json", *kept, "--steps", "4")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")}
    for path in folder.glob("*.parquet"):
        path.unlink()
    with loader, pytest.raises(DataError, match=r"part-\d\.parquet: .*No such file"):
        list(loader)
    assert f"data set '{folder}': no such file, and no folder or pattern with files" in failure(
        capfd, *kept, "--resume"
    )
    follows = ["--follow", "--fit-rows", "100", "--eval-data", str(folder), "--eval-every", "2", "--done-after", "1"]
    told = failure(capfd, *data, *TINY, "--order", "files", *follows)
    assert f"'{folder}'" in told
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*")} == before


def test_a_run_says_that_there_is_nothing_to_resume_or_nothing_to_do(seed: int, tmp_path: Path) -> None:
    data = [*write(tmp_path / "data", table(seed)), *TINY, "--order", "time", "--steps", "4"]
    config = TrainingConfig(checkpoint=tmp_path / "kept")
    assert what_is_kept(TrainingConfig()) == "no checkpoint is kept without --checkpoint FOLDER"
    assert what_is_kept(config).endswith("kept has no checkpoint yet; --checkpoint-every STEPS saves them on the way")
    kept = ["train", *data, "--seed", "1", "--checkpoint", str(tmp_path / "kept"), "--resume", "--json"]
    told = forked("sennit", *kept, str(tmp_path / "run.json")).stdout
    assert f"--resume: {tmp_path / 'kept'} has no checkpoint, so a new run begins\n" in told
    assert f"{data[1]}: 3 files, 1,200 rows\n" in told
    assert re.search(r"steps +1 to 4, 40 samples each", told)
    told = forked("sennit", *kept, str(tmp_path / "again.json")).stdout
    first, again = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "again.json"))
    assert outcome(again) == outcome(first)
    assert "resumes run" in told
    assert "so a new run begins" not in told
    assert re.search(r"steps +none: all 4 were taken before", told)
    path = tmp_path / "kept" / "step-000000004"
    assert what_is_kept(config) == f"the newest checkpoint is {path}; the same command with --resume goes on from it"


def opens(rank: int, world: int, /, *, arguments: list[str]) -> tuple[int, str]:
    """How often this rank has made the index of the stream, and the stream's fingerprint or the error."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        original = index.open_index

        def counted(*given: Any, **options: Any) -> Any:
            made.append(given)
            return original(*given, **options)

        patch.setattr(settings, "open_index", counted)
        config = TrainingConfig(
            source=Source(data=arguments[1], schema=Path(arguments[3])), stream=StreamSettings(order="shuffled")
        )
        try:
            told = streamed.opened(config).stream.index.fingerprint
        except DataError as error:
            told = str(error)
    return len(made), told


def test_one_rank_passes_over_the_files_and_tells_the_others(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    data = write(tmp_path / "data", table(seed))
    found = kept_world(2).run(opens, arguments=data)
    assert [passes for passes, _ in found] == [1, 0]
    assert len({fingerprint for _, fingerprint in found}) == 1
    (tmp_path / "data" / "part-1.parquet").write_bytes(b"cut")
    told = kept_world(2).run(opens, arguments=data)
    assert ["part-1.parquet" in error for _, error in told] == [True, True]
