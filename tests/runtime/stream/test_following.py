# SPDX-License-Identifier: Apache-2.0
"""Runs that follow a folder: the same bits as over all files at once, whenever files come and the run is stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import read_schema
from sennit.runtime.data.seeds import numpy_stream
from sennit.runtime.data.source import Source
from sennit.runtime.stream.follow_settings import FollowSettings
from sennit.runtime.stream.following import Follower, FollowingSource, read_seen, seen_text
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.report import RunReport
from sennit.runtime.training.streamed import follower_of, preprocessing_of
from sennit.runtime.training.stretch import History, begin_run, train
from tests.extent import briefly
from tests.runtime.stream.stream_files import table, write
from tests.runtime.stream.test_stream_training import outcome
from tests.runtime.whole_run import failure
from tests.runtime.whole_run import train as train_whole
from tests.runtime.world import WorldFactory
from tests.terminal import run_on_terminal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(240)

TINY: dict[str, Any] = {"batch_size": 40, "embedding_dim": 4, "bottom": (8,), "top": (8,), "decay": "none"}
TINY_OPTIONS = ["--batch-size", "40", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none", "--timeout", "60",
    "--sharding", "table_wise",
]  # fmt: skip
DONE = "_SUCCESS"
FILES = 6
FIT = 250
ORDERS: dict[str, dict[str, Any]] = {
    "rolling": {"order": "time", "window_s": 7200.0},
    "time": {"order": "time", "fit_rows": FIT},
    "files": {"order": "files", "fit_rows": FIT},
}


def options(order: str, folder: Path) -> list[str]:
    """`ORDERS` on the command line, with the data for evaluation if the order needs them."""
    if order == "rolling":
        return ["--order", "time", "--window", "2h"]
    return ["--order", order, "--fit-rows", str(FIT), "--eval-data", str(folder), "--eval-every", "7"]


class Arrivals:
    """Brings files into a folder, a few at a time, some of them first as a part."""

    def __init__(self, whole: Path, folder: Path, seed: int, names: list[str]) -> None:
        self._whole, self._folder = whole, folder
        self._steps = self._plan(numpy_stream(seed, "arrivals"), names)

    def __call__(self, seconds: float = 0.0) -> None:
        assert seconds >= 0
        next(self._steps, None)

    def _plan(self, stream: Any, names: list[str]) -> Iterator[None]:
        for name in names:
            if stream.random() < 0.5:
                (self._folder / f".{name}").write_bytes(b"temporary")
                if not name.endswith(".csv") and name != DONE:
                    (self._folder / name).write_bytes((self._whole / name).read_bytes()[:-9])
                yield
            shutil.copyfile(self._whole / name, self._folder / name)
            if stream.random() < 0.5:
                yield


def is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def follow(
    rank: int,
    world: int,
    /,
    *,
    folder: Path,
    order: str,
    seed: int,
    timing: int,
    stopped_after: int | None = None,
    resume: bool = False,
) -> Any:
    """A run over `folder / "data"`, into which the files of `folder / "whole"` come that are not there yet."""
    names = sorted(path.name for path in (folder / "whole").iterdir() if path.suffix != ".toml")
    # The marker comes last.
    names = [name for name in names if name != DONE] + [DONE]
    missing = [name for name in names if not is_same(folder / "whole" / name, folder / "data" / name)]
    config = TrainingConfig(
        seed=seed,
        source=Source(
            data=str(folder / "data"),
            schema=folder / "whole" / "schema.toml",
            evaluation=() if order == "rolling" else (str(folder / "held"),),
        ),
        stream=StreamSettings(**ORDERS[order], follow=FollowSettings(follow=True, done_file=DONE)),
        eval_every=None if order == "rolling" else 7,
        max_steps=stopped_after,
        checkpoint=folder / "kept",
        resume=resume,
        **TINY,
    )
    looks = follower_of(config, pause=Arrivals(folder / "whole", folder / "data", timing, missing))
    look = looks.first()
    assert look.opened is not None
    source = FollowingSource(look, preprocessing_of(config, look.opened), looks, rank=rank, world_size=world)
    try:
        report = train(config, source, History(), begin=begin_run, timeline=None)
    finally:
        source.close()
    assert isinstance(report, RunReport)
    told = report.as_json()
    return told["weights_sha256"], told["quality"], told["validation"], told["windows"]


def prepare(tmp_path: Path, seed: int) -> None:
    rows = table(seed)
    write(tmp_path / "held", rows.slice(1000))
    write(tmp_path / "whole", rows.slice(0, 1000), files=FILES)
    (tmp_path / "whole" / DONE).touch()
    (tmp_path / "data").mkdir()


@pytest.mark.parametrize(
    ("order", "world"), briefly([(o, w) for o in ORDERS for w in (1, 2)], [("rolling", 2), ("files", 1)])
)
def test_files_may_come_at_any_time(
    order: str, world: int, kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    prepare(tmp_path, seed)
    data = ["--data", str(tmp_path / "whole"), "--schema", str(tmp_path / "whole" / "schema.toml")]
    alone = train_whole(
        tmp_path / "1.json", *data, *TINY_OPTIONS, *options(order, tmp_path / "held"), "--seed", str(seed)
    )
    last = alone["steps"]["last"]
    given: dict[str, Any] = {"folder": tmp_path, "order": order, "seed": seed}
    for found in kept_world(world).run(follow, **given, timing=seed):
        assert found == outcome(alone)
    # Stopped in the middle, with as many files as it needs for that, and resumed with another number of ranks.
    for folder in ("data", "kept"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "data").mkdir()
    kept_world(world).run(follow, **given, timing=seed + 1, stopped_after=last // 2)
    assert not (tmp_path / "data" / DONE).exists()
    for found in kept_world(3 - world).run(follow, **given, timing=seed + 2, resume=True):
        assert found == outcome(alone)


def follower(folder: Path, *, order: str = "rolling", source: dict[str, Any] | None = None, **changed: Any) -> Follower:
    """Of a run that is not begun. Without `done_file` and `done_after_s`, `DONE` ends it."""
    kept = {name: changed.pop(name) for name in ("seen", "pause") if name in changed}
    config = TrainingConfig(
        source=Source(**{"data": str(folder / "data"), "schema": folder / "whole" / "schema.toml", **(source or {})}),
        stream=StreamSettings(**ORDERS[order], follow=FollowSettings(follow=True, **(changed or {"done_file": DONE}))),
        **TINY,
    )
    return Follower(config.source, read_schema(folder / "whole" / "schema.toml"), config.stream,
        config.order_settings, **kept)  # fmt: skip


def bring(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(folder / "whole" / name, folder / "data" / name)


def test_a_window_is_known_when_it_is_complete(seed: int, tmp_path: Path) -> None:
    """1,000 rows in 10 hours: a file has 100 minutes, a window 120."""
    prepare(tmp_path, seed)
    looks = follower(tmp_path)
    assert looks.look().reason.startswith("data: no rows; allowed: at least one; no file in ")
    bring(tmp_path, "part-0.parquet", "part-1.parquet")
    assert looks.look().opened is None
    bring(tmp_path, "part-2.parquet")
    found = looks.look()
    # Rows of the window from 02:00 are there up to that from 04:00.
    assert found.opened is not None
    order = found.opened.order
    assert (order.step_count, [one.steps for one in order.rolling]) == (10, [5])
    assert order.waits(10)
    assert not order.evaluates(10)
    assert looks.look().opened is None
    bring(tmp_path, DONE)
    found = looks.look()
    assert found.opened is not None
    order = found.opened.order
    assert (order.step_count, [one.steps for one in order.rolling]) == (10, [5, 10])
    assert not order.waits(10)
    assert order.evaluates(10)


def test_a_file_that_comes_late_or_goes_is_named(seed: int, tmp_path: Path) -> None:
    prepare(tmp_path, seed)
    bring(tmp_path, "part-0.parquet", "part-1.parquet", "part-3.parquet")
    looks = follower(tmp_path, order="files", source={"evaluation": (str(tmp_path / "held"),)})
    looks.look()
    bring(tmp_path, "part-2.parquet")
    with pytest.raises(
        DataError, match=r"part-2.parquet: came when .*part-3.parquet was there already; allowed: files"
    ):
        looks.look()
    (tmp_path / "data" / "part-2.parquet").unlink()
    (tmp_path / "data" / "part-0.parquet").unlink()
    with pytest.raises(DataError, match=r"part-0.parquet: is no longer there; allowed: files that stay"):
        looks.look()


def test_a_resumed_run_needs_the_files_that_it_had(seed: int, tmp_path: Path) -> None:
    prepare(tmp_path, seed)
    bring(tmp_path, *(f"part-{number}.parquet" for number in range(4)))
    seen = read_seen(seen_text(follower(tmp_path).look().seen))
    assert len(seen) == 4
    assert follower(tmp_path, seen=seen).look().opened is not None
    (tmp_path / "data" / "part-3.parquet").unlink()
    with pytest.raises(
        DataError, match=r"data: 3 files; the run had 4 when it was stopped, the next one .*part-3.parq"
    ):
        follower(tmp_path, seen=seen).look()
    bring(tmp_path, "part-3.parquet")
    shutil.copyfile(tmp_path / "whole" / "part-4.parquet", tmp_path / "data" / "part-2.parquet")
    with pytest.raises(DataError, match=r"part-2.parquet: is not the file 3 that the run had when it was stopped"):
        follower(tmp_path, seen=seen).look()
    for text in ("[[1]]", "7", "[", "[null]"):
        with pytest.raises(ValueError):  # noqa: PT011 - json has words of its own
            read_seen(text)


def test_a_text_is_whole_when_there_is_one_behind_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "whole").mkdir()
    schema = 'label = "clicked"\ntime = "at"\n[sparse.price]\nrows = 140'
    (tmp_path / "whole" / "schema.toml").write_text(schema)
    looks = follower(tmp_path, done_after_s=60.0, pause=lambda seconds: None)
    for hour in range(3):
        lines = [f"{row % 2},{row},{7200 * hour + 50 * row}" for row in range(140)]
        (tmp_path / "data" / f"{hour}.csv").write_text("\n".join(["clicked,price,at", *lines, ""]))
        found = looks.look()
        assert len(found.seen) == hour
        assert found.reason.endswith(f"{hour}.csv is whole when there is a file behind it")
    now_s = patched_clock(monkeypatch)
    looks.look()
    now_s[0] += 59
    assert len(looks.look(pauses=True).seen) == 2
    now_s[0] += 1
    found = looks.look(pauses=True)
    assert len(found.seen) == 3
    assert found.opened is not None
    assert not found.opened.order.grows


def patched_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds that a follower is told."""
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_file_that_has_just_come_or_grows_is_waited_for(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is still written, and a file whose footer is not there yet, are not taken for the last ones."""
    prepare(tmp_path, seed)
    bring(tmp_path, "part-0.parquet", "part-1.parquet", "part-2.parquet")
    now_s = patched_clock(monkeypatch)
    looks = follower(tmp_path, done_after_s=60.0, pause=lambda seconds: None)
    assert looks.look().opened is not None
    whole = (tmp_path / "whole" / "part-3.parquet").read_bytes()
    for size in (100, 200, len(whole)):
        now_s[0] += 60
        (tmp_path / "data" / "part-3.parquet").write_bytes(whole[:size])
        found = looks.look(pauses=True)
        assert found.opened is None or found.opened.order.grows
    assert len(found.seen) == 4
    now_s[0] += 59
    assert looks.look(pauses=True).opened is None
    now_s[0] += 1
    found = looks.look(pauses=True)
    assert found.opened is not None
    assert not found.opened.order.grows
    # One that stays a part is an error.
    looks = follower(tmp_path, done_after_s=60.0, pause=lambda seconds: None)
    (tmp_path / "data" / "part-4.parquet").write_bytes(whole[:100])
    looks.look()
    now_s[0] += 60
    with pytest.raises(DataError, match=r"part-4\.parquet: not a whole Parquet file: 100 bytes"):
        looks.look(pauses=True)


def test_rows_that_are_left_out_count_in_all_files_together(seed: int, tmp_path: Path) -> None:
    prepare(tmp_path, seed)
    schema = tmp_path / "whole" / "schema.toml"
    schema.write_text("skip_broken = 3\n" + schema.read_text())
    for folder, rows in (("data", table(seed).slice(0, 500)), ("held", table(seed).slice(1000))):
        users = rows["user"].to_pylist()
        users[3:5] = [1000, 1000]
        wrong = rows.set_column(rows.column_names.index("user"), "user", pa.array(users, pa.int32()))
        shutil.rmtree(tmp_path / folder)
        (tmp_path / folder).mkdir()
        pq.write_table(wrong, tmp_path / folder / "part-0.parquet")
    looks = follower(tmp_path, order="files", source={"evaluation": (str(tmp_path / "held"),)})
    with pytest.raises(DataError, match=r"other files: 4 broken rows; allowed: 3 \(skip_broken\)"):
        looks.look()
    schema.write_text(schema.read_text().replace("skip_broken = 3", "skip_broken = 4"))
    looks = follower(tmp_path, order="files", source={"evaluation": (str(tmp_path / "held"),)})
    assert looks.look().reason.endswith("part-0.parquet; 4 broken rows are left out so far")


def test_a_file_to_evaluate_is_not_trained_on(seed: int, tmp_path: Path) -> None:
    prepare(tmp_path, seed)
    bring(tmp_path, "part-0.parquet", "part-1.parquet")
    looks = follower(tmp_path, order="files", source={"evaluation": (str(tmp_path / "data" / "part-1.parquet"),)})
    with pytest.raises(DataError, match=r"part-1\.parquet: given twice; allowed: each file once, to train on or to ev"):
        looks.look()


@pytest.mark.slow
def test_an_interrupt_says_what_is_kept(seed: int, tmp_path: Path) -> None:
    """On a terminal, in a line of its own below the progress bar."""
    prepare(tmp_path, seed)
    bring(tmp_path, "part-0.parquet", "part-1.parquet", "part-2.parquet")
    data = ["--data", str(tmp_path / "data"), "--schema", str(tmp_path / "whole" / "schema.toml")]
    kept = ["--follow", "--checkpoint", str(tmp_path / "kept")]
    command = ["train", *data, *TINY_OPTIONS, *options("rolling", tmp_path), *kept]
    status, shown = run_on_terminal([*command, "--ranks", "2"], timeout_s=100, until="waiting for", forked=True)
    assert status == 130, shown
    path = tmp_path / "kept" / "step-000000010"
    assert "\nstopped after step 10\r\n" in shown.replace("\x1b[?25h", "")
    told = f"interrupted; the newest checkpoint is {path}; the same command with --resume goes on from it"
    assert shown.replace("\r\n", "").endswith(told), shown


def test_what_cannot_be_followed_is_refused(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path, seed)
    where = ["--schema", str(tmp_path / "whole" / "schema.toml"), *TINY_OPTIONS]
    data = ["--data", str(tmp_path / "data"), *where]
    rolling = [*data, "--order", "time", "--window", "1h", "--follow"]
    for given, words in (
        ([*data, "--follow"], "--follow with --order shuffled, which needs all rows; allowed: time, files"),
        ([*data, "--order", "time", "--done-file", "x"], "--done-file without --follow; allowed: both, or neither"),
        ([*data, "--order", "time", "--follow"], "allowed: with --window, or with --eval-data"),
        ([*data, "--order", "time", "--follow", "--train-until", "5"], "--follow with --train-until; allowed"),
        ([*data, "--order", "files", "--follow", "--eval-data", str(tmp_path)], "allowed: with --fit-rows ROWS"),
        ([*rolling, "--decay", "linear"], "--decay linear with --follow, whose last step is not known; allowed"),
        ([*rolling, "--elastic"], "--elastic with --follow; allowed: one of the two"),
        ([*rolling, "--done-after", "0s"], "--done-after 0.0; allowed: above 0"),
        ([*rolling, "--done-file", "a/b"], "--done-file 'a/b'; allowed: the name of a file in the folder"),
        ([*rolling, "--data", str(tmp_path)], "--follow with several --data; allowed: one folder, or one pattern"),
        ([*rolling, "--validation-fraction", "0.1"], "--validation-fraction with --follow"),
        (["--data", "flights", *TINY_OPTIONS, "--order", "files", "--follow"], "--follow with --data flights; allowed"),
        (["--data", str(tmp_path / "no"), *where, "--order", "time", "--window", "1h", "--follow"], "no such folder"),
        (["--data", str(tmp_path / "whole" / "part-0.parquet"), *rolling[2:]], "is one file; allowed"),
    ):
        assert words in failure(capfd, *given)


def test_a_followed_folder_that_is_complete_is_like_any_other(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, seed)
    data = ["--data", str(tmp_path / "whole" / "*.parquet"), "--schema", str(tmp_path / "whole" / "schema.toml")]
    given = [*data, *TINY_OPTIONS, *options("rolling", tmp_path), "--seed", str(seed), "--ranks", "1"]
    followed = train_whole(tmp_path / "followed.json", *given, "--follow", "--done-file", DONE)
    assert outcome(followed) == outcome(train_whole(tmp_path / "whole.json", *given))
    # Of too few files, and no more to come, the error of the whole run.
    for number in range(1, FILES):
        (tmp_path / "whole" / f"part-{number}.parquet").unlink()
    told = failure(capfd, *given, "--follow", "--done-file", DONE)
    assert "windows of 2h: 1 with rows, from 1970-01-01 to 1970-01-01T01:" in told
