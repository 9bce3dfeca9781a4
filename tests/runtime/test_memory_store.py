# SPDX-License-Identifier: Apache-2.0
"""Stores of rows: flushed rows survive kills and power cuts; errors name bad files and full disks."""

from __future__ import annotations

import errno
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sennit.runtime.memory import _memory, store
from sennit.runtime.memory.errors import CorruptStore, ForeignStore
from sennit.runtime.memory.layout import Arrays, RowPart, StoreLayout
from sennit.transport.errors import ArgumentError, DeviceError
from tests import extent
from tests.extent import examples

LAYOUT = StoreLayout(
    tables=(
        ("ads", 700),
        ("empty", 0),
        ("users", 300),
    ),
    parts=(RowPart(name="weight", columns=20), RowPart(name="sum", columns=1)),
)
BACKENDS = [pytest.param("io_uring", marks=pytest.mark.needs("io-uring")), "threads"]


def rows_of(number: int, rows: NDArray[np.int64]) -> Arrays:
    """Returns the content of rows in version `number`. No two rows or versions are alike."""
    weight = (np.arange(20, dtype=np.float32) + rows[:, None] * 20 + number * 1e6).astype(np.float32)
    return {"weight": weight, "sum": np.full((len(rows), 1), number, np.float32)}


def first_rows(first: int, count: int) -> Arrays:
    return rows_of(0, np.arange(first, first + count))


def assert_rows(found: Arrays, versions: NDArray[np.int64]) -> None:
    for row, number in enumerate(versions):
        expected = rows_of(int(number), np.array([row]))
        for part, array in expected.items():
            np.testing.assert_array_equal(found[part][row : row + 1], array, f"row {row}, {part}")


ALL = np.arange(LAYOUT.row_count)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_direct", [True, False])
def test_rows_come_back_from_a_file(tmp_path: Path, backend: str, is_direct: bool, rng: np.random.Generator) -> None:
    path = tmp_path / "rows"
    access = store.FileAccess(backend=backend, is_direct=is_direct)
    versions = np.zeros(LAYOUT.row_count, np.int64)
    with store.create(path, LAYOUT, first_rows, access=access) as rows:
        assert rows.access.startswith(backend)
        assert path.stat().st_size == _memory.store_bytes(*LAYOUT.native)
        for number in range(1, 30):
            written = rng.choice(LAYOUT.row_count, 400, replace=False)
            rows.write(written, rows_of(number, written))
            versions[written] = number
        assert_rows(rows.read(ALL), versions)
        assert rows.flush(tag=29) == 1
        assert_rows(rows.read(ALL), versions)
        rows.write(ALL, rows_of(30, ALL))
    with store.open_store(path, access=access) as rows:
        assert rows.layout == LAYOUT
        assert (rows.generation, rows.tag) == (1, 29)
        assert_rows(rows.read(ALL), versions)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.integers(0, 999), min_size=1, max_size=300, unique=True)),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("kill"), st.integers(0, 12)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
    ),
    max_size=12,
)


@examples(8)
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 32))
def test_a_store_is_a_dictionary_that_remembers_its_last_flush(operations: list[tuple[str, object]], seed: int) -> None:
    """Kills and power cuts come after a number of disk operations, at any place in the code."""
    disk = _memory.SimulatedDisk(_memory.store_bytes(*LAYOUT.native), seed)
    store.fill(_memory.build_simulated(disk, *LAYOUT.native), LAYOUT, first_rows)
    rows = store.RowStore(_memory.open_simulated(disk), LAYOUT)
    now = np.zeros(LAYOUT.row_count, np.int64)
    flushed = {0: now.copy()}
    durable, number = 0, 0
    how = "kill"

    def start_again() -> None:
        nonlocal rows, now, durable
        disk.cut_power() if how == "cut" else disk.start_again()
        rows = store.RowStore(_memory.open_simulated(disk), LAYOUT)
        assert durable <= rows.generation <= durable + 1
        durable = rows.generation
        now = flushed[durable].copy()
        assert_rows(rows.read(ALL), now)

    for kind, argument in [*operations, ("flush", None), ("kill", 0)]:
        try:
            if kind == "write":
                number += 1
                assert isinstance(argument, list)
                written = np.array(argument)
                rows.write(written, rows_of(number, written))
                now[written] = number
            elif kind == "flush":
                flushed[durable + 1] = now.copy()
                durable = rows.flush()
            else:
                assert isinstance(argument, int)
                how = kind
                disk.fail_at = disk.operations + argument
        except _memory.Killed:
            start_again()
    start_again()


FLUSHER = """
import sys
import numpy as np
from sennit.runtime.memory import store
rows = store.open_store(sys.argv[1], access=store.FileAccess(backend="threads"))
numbers = np.arange(rows.layout.row_count)
for number in range(rows.generation + 1, 1 << 20):
    for part in np.array_split(numbers, 5):
        weight = np.full((len(part), 20), number, np.float32)
        rows.write(part, {"weight": weight, "sum": weight[:, :1].copy()})
    print(rows.flush(number), flush=True)
"""


def test_a_killed_process_loses_no_flush_that_returned(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "rows"
    store.create(path, LAYOUT, lambda _, count: rows_of(0, np.zeros(count, np.int64))).close()
    reported = 0
    for _ in range(extent.number(2)):
        until = reported + int(rng.integers(1, 8))
        with subprocess.Popen([sys.executable, "-c", FLUSHER, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                reported = int(line)
                if reported >= until:
                    break
            process.send_signal(signal.SIGKILL)
            # The process may have reported more before it died.
            reported = max([reported, *map(int, process.stdout.read().split())])
        with store.open_store(path, LAYOUT) as rows:
            assert reported <= rows.generation <= reported + 1
            assert rows.tag == rows.generation
            found = rows.read(ALL)
            assert (found["sum"] == rows.generation).all()
            assert (found["weight"] == rows.generation).all()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flush_of_more_rows_than_are_copied_at_once(tmp_path: Path, rng: np.random.Generator) -> None:
    """Records of 1 KiB. The flush takes 64 MiB from the log at a time, and copies 16 MiB to the base at a time."""
    count = 70_000
    layout = StoreLayout(tables=(("ads", count),), parts=(RowPart(name="weight", columns=256),))
    columns = np.arange(256, dtype=np.float32)
    with store.create(tmp_path / "rows", layout, lambda first, n: {"weight": np.zeros((n, 256), np.float32)}) as rows:
        for part in np.array_split(rng.permutation(count), 7):
            rows.write(part, {"weight": (part[:, None] + columns).astype(np.float32)})
        rows.flush()
    with store.open_store(tmp_path / "rows", layout) as rows:
        for part in np.array_split(np.arange(count), 7):
            np.testing.assert_array_equal(rows.read(part)["weight"], part[:, None] + columns)


def test_a_file_that_may_not_be_so_large_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with (
        file_size_limit(1 << 20),
        pytest.raises(DeviceError, match=r"rows: setting \d+ bytes aside: File too large") as caught,
    ):
        store.create(path, LAYOUT, first_rows)
    assert caught.value.errno == errno.EFBIG
    assert not path.exists()


FULL_DISK = """
import errno, subprocess, sys
import numpy as np
from sennit.runtime.memory import store
from sennit.runtime.memory.layout import RowPart, StoreLayout
from sennit.transport.errors import DeviceError
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", sys.argv[1]], check=True)
layout = StoreLayout(tables=(("ads", 9),), parts=(RowPart(name="weight", columns=4),))
try:
    store.create(sys.argv[1] + "/rows", layout, lambda first, count: {"weight": np.zeros((count, 4), np.float32)})
except DeviceError as error:
    assert error.errno == errno.ENOSPC, error
    print(error)
"""


@pytest.mark.root
def test_a_full_disk_is_named_before_training_begins(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/rows: setting {4 << 20} bytes aside: No space left on device" in done.stdout


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with store.create(path, LAYOUT, first_rows):
        with pytest.raises(DeviceError, match="another process has this store open"):
            store.open_store(path)
        with pytest.raises(DeviceError, match="File exists"):
            store.create(path, LAYOUT, first_rows)
    store.open_store(path).close()


def test_foreign_torn_and_short_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"GIF89a" + bytes(99_999))
    with pytest.raises(ForeignStore, match="not an embedding store"):
        store.open_store(path)
    path.unlink()
    store.create(path, LAYOUT, first_rows).close()
    other = StoreLayout(tables=LAYOUT.tables, parts=(RowPart(name="weight", columns=20, dtype="float16"),))
    with pytest.raises(ForeignStore, match=r"weight \[20\] float32 where weight \[20\] float16 is expected"):
        store.open_store(path, other)
    offset = 12_288 + (LAYOUT.first_row("users") + 7) * 88
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"torn")
    with store.open_store(path) as rows:
        with pytest.raises(CorruptStore, match=rf"{path}: table 'users' row 7 at offset {offset} fails its CRC"):
            rows.read(ALL)
        with pytest.raises(DeviceError, match="stopped by an earlier error"):
            rows.read(ALL[:1])
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(CorruptStore, match="the file at 1048576"):
        store.open_store(path)


def crc32c(data: bytes) -> int:
    """CRC-32C by the definition (RFC 3720, section 12.1), without the final inversion."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    """Reads a file by docs/reference/embedding-store.md, with code that is independent of the writer."""
    path = tmp_path / "rows"
    with store.create(path, LAYOUT, first_rows) as rows:
        rows.write(ALL[:5], rows_of(1, ALL[:5]))
        rows.flush(tag=77)
    file = path.read_bytes()
    superblocks = [file[at : at + 120] for at in (0, 4096)]
    for block in superblocks:
        assert block[:8] == b"SENNITRS"
        assert int.from_bytes(block[116:], "little") == crc32c(block[:116])
    newest = max(superblocks, key=lambda block: int.from_bytes(block[16:24], "little"))
    version, state, sequence, generation, tag, incarnation, row_count, base, log, segment, segments, size = (
        struct.unpack("<II10Q", newest[8:96])
    )
    assert (version, state, generation, tag, row_count) == (1, 0, 1, 77, LAYOUT.row_count)
    assert superblocks[sequence % 2] == newest
    assert len(file) == log + segment * segments
    directory = file[8192 : 8192 + size]
    assert directory.startswith(struct.pack("<II6sI7sII", 2, 6, b"weight", 7, b"float32", 20, 80))
    assert directory.endswith(struct.pack("<I5sQ", 5, b"users", 300))
    assert int.from_bytes(newest[112:116], "little") == crc32c(directory)
    record = file[base + 4 * 88 : base + 5 * 88]
    assert record[:80] == rows_of(1, ALL[4:5])["weight"].tobytes()
    assert int.from_bytes(record[84:], "little") == crc32c(struct.pack("<Q", 4) + record[:84])
    magic, count, of, generation, sequence, zeros, crc = struct.unpack("<4sIQQQII", file[log : log + 40])
    assert (magic, count, of, generation, sequence, zeros) == (b"SLOG", 5, incarnation, 1, 0, 0)
    numbers = file[log + 40 : log + 40 + 8 * count]
    assert crc == crc32c(file[log : log + 36] + numbers)
    assert numbers == ALL[:5].tobytes()


def test_making_a_store_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(ArgumentError, match=r"part sum: missing; expected float32 \[1000, 1\]"):
        store.create(path, LAYOUT, lambda first, count: {"weight": np.zeros((count, 20), np.float32)})
    assert not path.exists()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with store.create(tmp_path / "rows", LAYOUT, first_rows) as rows:
        with pytest.raises(ArgumentError, match="row 1000; allowed: below 1000"):
            rows.read(np.array([1000]))
        with pytest.raises(ArgumentError, match=r"part weight: float64 \[1, 20\]; expected float32 \[1, 20\]"):
            rows.write(np.array([0]), {"weight": np.zeros((1, 20)), "sum": np.zeros((1, 1), np.float32)})
        assert_rows(rows.read(ALL), np.zeros(LAYOUT.row_count, np.int64))
    with pytest.raises(ArgumentError, match="the store is closed"):
        rows.read(ALL)
    with pytest.raises(ArgumentError, match="depth 0; allowed: 1 to 4096"):
        store.FileAccess(depth=0)
    with pytest.raises(ArgumentError, match="dtype 'float64'; allowed"):
        RowPart(name="weight", columns=3, dtype="float64")
