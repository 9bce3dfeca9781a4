# SPDX-License-Identifier: Apache-2.0
"""A run over ten times the memory that it may use, which is killed, and goes on with other ranks: the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.memory_group import MemoryGroup, limited_memory
from tests.runtime.stream.test_stream_training import outcome

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LIMIT_BYTES = 768 << 20
"""Of two ranks and the process that starts them. Python and torch have 275 MB of it, and each rank 230."""

TIMES = 10
DAYS = 8
LIST_IDS = 1000
"""Ids of a row, of 8 bytes. All of them are decoded, and few are looked up."""

GROUP_ROWS = 4096
SCHEMA = """
label = "clicked"
time = "at"
dense = ["price"]
[sparse.user]
rows = 500
[sparse.seen]
encode = "hash"
rows = 1000
first = 3
"""
DEADLINE_S = 1200.0


def write(folder: Path, size_bytes: int, seed: int) -> int:
    """A file a day, that has no page in memory. Returns the bytes of all."""
    random = np.random.default_rng(seed)
    ids = random.integers(-(2**62), 2**62, GROUP_ROWS * LIST_IDS)
    seen = pa.ListArray.from_arrays(np.arange(GROUP_ROWS + 1, dtype=np.int32) * LIST_IDS, ids)
    groups = -(-size_bytes // (DAYS * ids.nbytes))
    rows = groups * GROUP_ROWS
    kinds = {
        "clicked": pa.int8(),
        "at": pa.timestamp("s"),
        "price": pa.float32(),
        "user": pa.int32(),
        "seen": seen.type,
    }
    folder.mkdir()
    for day in range(DAYS):
        path = folder / f"day-{day}.parquet"
        with pq.ParquetWriter(path, pa.schema(list(kinds.items())), use_dictionary=False, compression="none") as out:
            for group in range(groups):
                user = random.integers(0, 500, GROUP_ROWS)
                at = 86_400 * day + np.arange(group * GROUP_ROWS, (group + 1) * GROUP_ROWS) * 86_400 // rows
                price = random.standard_normal(GROUP_ROWS, dtype=np.float32)
                clicked = (np.sin(user) + price > 0).astype(np.int8)
                columns = [clicked, pa.array(at, pa.timestamp("s")), price, user.astype(np.int32), seen]
                out.write_table(pa.table(columns, schema=out.schema), row_group_size=GROUP_ROWS)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "schema.toml").write_text(SCHEMA)
    return sum(path.stat().st_size for path in folder.glob("*.parquet"))


class Run:
    """A `sennit train` in the group, in a session of its own."""

    def __init__(self, group: MemoryGroup, report: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "sennit", "train", *arguments, "--json", str(report)]
        self._report, self._log = report, report.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                group.command(*command), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill_once_there_is(self, path: Path) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.01)
        self.end()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def report(self) -> dict[str, Any]:
        try:
            assert self._process.wait(DEADLINE_S) == 0, self._log.read_text()
        finally:
            self.end()
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with limited_memory(LIMIT_BYTES) as made:
        yield made


# Nothing is written where there can be no group.
@pytest.fixture
def logs(seed: int, group: MemoryGroup, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "logs"
    try:
        assert write(folder, TIMES * LIMIT_BYTES, seed) >= TIMES * LIMIT_BYTES
        yield folder
    finally:
        shutil.rmtree(folder)  # pytest would keep it for the next runs


def test_ten_times_the_memory_killed_and_resumed_with_other_ranks(
    seed: int, group: MemoryGroup, logs: Path, tmp_path: Path
) -> None:
    options = ["--data", str(logs / "*.parquet"), "--schema", str(logs / "schema.toml"), "--order", "time",
        "--window", "1d", "--batch-size", "2048", "--dim", "4", "--bottom", "8", "--top", "8", "--decay", "none",
        "--sharding", "table_wise", "--seed", str(seed), "--timeout", "120",
    ]  # fmt: skip
    alone = Run(group, tmp_path / "alone.json", *options, "--ranks", "1").report()
    last = alone["steps"]["last"]
    kept = [*options, "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", str(last // 4)]
    run = Run(group, tmp_path / "killed.json", *kept, "--ranks", "1")
    run.kill_once_there_is(tmp_path / "kept" / f"step-{2 * (last // 4):09}")
    found = Run(group, tmp_path / "on.json", *kept, "--ranks", "2", "--resume").report()
    assert 0 < found["steps"]["first"] < last
    assert outcome(found) == outcome(alone)
    assert len(found["windows"]) == DAYS - 1
    assert group.killed == 0
