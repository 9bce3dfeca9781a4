# SPDX-License-Identifier: Apache-2.0
"""Runs fed with a stream have the bits of runs that read the same files, whatever happens to their feeders."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.command import main
from sennit.runtime.training.supply import served
from tests.extent import briefly
from tests.forked_commands import ForkedCommand
from tests.runtime.stream.stream_files import SCHEMA, table, write
from tests.runtime.stream.test_stream_training import ORDERS, TINY, outcome
from tests.runtime.whole_run import train

pytestmark = pytest.mark.timeout(240)


def data_of(folder: Path, seed: int) -> list[str]:
    """Files with sample weights and two labels."""
    rows = table(seed)
    rows = rows.append_column("bought", [(rows["age"].to_numpy() > 60).tolist()])
    return write(folder, rows, schema=SCHEMA.replace('label = "clicked"', 'label = ["clicked", "bought"]'))


def feeder(port: int, *arguments: str) -> ForkedCommand:
    return ForkedCommand("sennit", "feed", *arguments, "--to", f"127.0.0.1:{port}", "--timeout", "60")


def fed(port: int) -> list[str]:
    return ["--ingest", f"cpu://127.0.0.1:{port}"]


@pytest.mark.parametrize("order", briefly(ORDERS, ["rolling"]))
def test_feeders_give_the_bits_of_files(order: str, seed: int, tmp_path: Path, port: int) -> None:
    data = data_of(tmp_path / "data", seed)
    options = [*TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "files.json", *data, *options, "--ranks", "1")
    with feeder(port, *data, "--workers", "2") as process:
        found = train(tmp_path / "fed.json", *fed(port), *options, "--ranks", "2")
        done = process.end(30)
    assert done.returncode == 0, done.stderr
    assert outcome(found) == outcome(alone)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_so_do_feeders_of_four_and_eight_ranks_that_take_over(order: str, seed: int, tmp_path: Path, port: int) -> None:
    data = data_of(tmp_path / "data", seed)
    options = [*TINY, *ORDERS[order], "--seed", str(seed)]
    alone = train(tmp_path / "files.json", *data, *options, "--ranks", "1")
    kept = [*options, "--checkpoint", str(tmp_path / "kept"), "--resume"]
    half = ["--steps", str(alone["steps"]["last"] // 2)]
    for ranks, placement, until in (("8", "row_wise", half), ("4", "table_wise", [])):
        with feeder(port, *data) as process:
            placed = ["--ranks", ranks, "--sharding", placement]
            found = train(tmp_path / "fed.json", *fed(port), *kept, *placed, *until)
            done = process.end(60)
        assert done.returncode == 0, done.stderr
    assert outcome(found) == outcome(alone)


@contextmanager
def once_there_is(path: Path, act: Callable[[], object]) -> Iterator[None]:
    """Does something in another thread as soon as a file is there."""

    def wait() -> None:
        deadline_s = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


@pytest.mark.slow
def test_a_feeder_that_is_killed_and_a_resumption_from_files_change_no_bit(
    seed: int, tmp_path: Path, port: int
) -> None:
    data = data_of(tmp_path / "data", seed)
    options = [*TINY, *ORDERS["shuffled"], "--seed", str(seed)]
    alone = train(tmp_path / "files.json", *data, *options, "--ranks", "1")
    kept = [*options, "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "5"]
    with (
        feeder(port, *data) as first,
        feeder(port, *data) as second,
        once_there_is(tmp_path / "kept" / "step-000000005", lambda: os.kill(first.pid, signal.SIGKILL)),
    ):
        # It ends in the second epoch.
        train(tmp_path / "fed.json", *fed(port), *kept, "--ranks", "2", "--steps", "33")
        done = second.end(30)
        assert first.end(30).returncode == -signal.SIGKILL
    assert done.returncode == 0, done.stderr
    # A feeder of its own mind about vocabularies, which are those of the checkpoint.
    with feeder(port, *data, "--min-frequency", "300") as third:
        train(tmp_path / "fed.json", *fed(port), *kept, "--ranks", "2", "--steps", "40", "--resume")
        assert third.end(30).returncode == 0
    found = train(tmp_path / "on.json", *data, *kept, "--ranks", "1", "--resume")
    assert found["steps"]["first"] == 40
    assert outcome(found) == outcome(alone)


# It waits for other feeders as long as a run may.
@pytest.mark.long
def test_a_file_that_is_cut_while_it_is_read_ends_the_run_and_is_named(
    seed: int, tmp_path: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = data_of(tmp_path / "data", seed)
    options = [*TINY, "--shuffle-rows", "250", "--order", "shuffled", "--epochs", "90000", "--timeout", "30"]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "5"]
    cut = tmp_path / "data" / "part-1.parquet"
    with (
        feeder(port, *data) as process,
        once_there_is(tmp_path / "kept" / "step-000000005", lambda: os.truncate(cut, 900)),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*fed(port), *options, *kept, "--ranks", "2"])
        done = process.end(30)
    assert (ended.value.code, done.returncode) == (1, 1)
    assert "part-1.parquet: " in done.stderr.splitlines()[-1]
    told = " ".join(capfd.readouterr().err.split())
    assert "and none more within 30 s; feeders: none; gone: " in told
    assert "(it says: " in told
    assert "part-1.parquet: " in told
    assert (tmp_path / "kept" / "step-000000005").is_dir()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "the trainer was interrupted; a run with --resume wants all feeders again"),
        (MemoryError(), "MemoryError"),
        (ValueError("no room"), "no room"),
    ],
)
def test_feeders_hear_why_a_run_ends_though_the_error_has_no_text(error: BaseException, told: str) -> None:
    heard: list[str | None] = []

    class Closed:
        def close(self, failure: str | None = None, *, goes_on: bool = False) -> None:
            heard.append(failure)

    source: Any = Closed()
    with pytest.raises(type(error)), served(source):
        raise error
    assert heard == [told]
