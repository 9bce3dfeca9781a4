# SPDX-License-Identifier: Apache-2.0
"""The reader of the native core's counter pages also reads the pages that Python writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.transport import counters
from sennit.transport.counter_page import FILE_BYTES, CounterPage

DEADLINE_S = 60.0
WRITER = (
    "import sys; from pathlib import Path; from sennit.transport.counter_page import CounterPage\n"
    "page = CounterPage(3, 4, Path(sys.argv[1])); page.add('g', ['a'])[0] = 7\n"
    "print(page.path, flush=True); sys.stdin.read()\n"
)


def test_others_read_what_is_written(tmp_path: Path) -> None:
    page = CounterPage(2, 5, tmp_path)
    assert page.path is not None
    assert page.path.stat().st_mode & 0o777 == 0o600
    own = page.add("ingest", ["records", "odd"])
    of_peer = page.add("flow", ["bytes"], peer=1, path=0)
    own[:] = 1 << 63, 2
    of_peer[0] = 3
    (found,) = counters.pages(tmp_path)
    assert (found.rank, found.world, found.process, found.is_alive) == (2, 5, os.getpid(), True)
    assert found.blocks == (
        counters.Block(group="ingest", peer=None, path=None, values={"records": 1 << 63, "odd": 2}),
        counters.Block(group="flow", peer=1, path=0, values={"bytes": 3}),
    )
    own[1] += 1
    assert counters.read(page.path).total("ingest", "odd") == 3
    page.close()
    page.close()
    assert list(tmp_path.iterdir()) == []
    own[0] = 5  # An unused counter is no error.


def test_a_page_that_nobody_holds_is_removed_with_the_file(tmp_path: Path) -> None:
    page = CounterPage(0, 1, tmp_path)
    del page
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writers_page_stays_until_the_next_writer(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        file = Path(process.stdout.readline().strip())
        kept = CounterPage(1, 4, tmp_path)
        assert counters.read(file).is_alive
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    left = counters.read(file)
    assert (left.rank, left.is_alive, left.total("g", "a")) == (3, False, 7)
    other = CounterPage(2, 4, tmp_path)
    assert {page.rank for page in counters.pages(tmp_path)} == {1, 2}
    kept.close()
    other.close()


def test_without_a_folder_it_counts_for_itself(tmp_path: Path) -> None:
    page = CounterPage(0, 1, tmp_path / "absent")
    own = page.add("g", ["a"])
    own[0] = 9
    assert page.path is None
    assert own.tolist() == [9]
    page.close()


def test_a_page_is_full_at_some_time(tmp_path: Path) -> None:
    page = CounterPage(0, 1, tmp_path)
    with pytest.raises(ValueError, match=f"allowed: {FILE_BYTES}"):
        page.add("g", [f"counter{n:057}" for n in range(1_000)])
    page.add("g", ["a"])[0] = 1
    (found,) = counters.pages(tmp_path)
    assert found.total("g", "a") == 1
    page.close()
