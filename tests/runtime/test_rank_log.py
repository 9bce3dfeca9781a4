# SPDX-License-Identifier: Apache-2.0
"""Logs of ranks: what threads record, what a kill leaves, and that the timeline is written of it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.timeline import Timeline, left, rank_log
from sennit.runtime.timeline.left import write_recordings
from sennit.runtime.timeline.rank_log import KINDS, OPERATION, SPAN, RankLog
from sennit.runtime.timeline.recorder import Recorder
from sennit.runtime.timeline.spans import STEP, TimelineError
from sennit.runtime.timeline.summary import summarise
from sennit.runtime.timeline.trace_file import read
from tests.extent import briefly
from tests.runtime.world import WorldFactory


def cut_short(rank: int, world: int, path: str, how: str) -> dict[str, Any] | None:
    """All take step 0; in step 1 some end as `how` says, the others wait for them. What a rank that lives has written.

    The last rank is killed, aborts or exits; all are killed, or terminated; all raise.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    timeline = Timeline(path)
    phases = timeline.clock()
    with contextlib.suppress(dist.DistBackendError, ValueError), timeline:
        with timeline.step(0), phases.phase("sum"):
            dist.all_reduce(torch.ones(5))
        dist.barrier()
        with timeline.step(1), phases.phase("last words"):
            store.set(f"inside/{rank}", "")
            if how == "all raise":
                raise ValueError(f"rank {rank}")
            if how == "all are killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == world - 1:
                store.wait([f"inside/{one}" for one in range(world)])
                end(how, [int(store.get(f"process/{one}")) for one in range(world)])
            dist.all_reduce(torch.ones(5))
    left = timeline.left
    return None if left is None else {"path": str(left.path), "ranks": list(left.ranks), "died": list(left.died)}


def end(how: str, processes: list[int]) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    assert how == "all are terminated", how
    for process in processes:  # The others wait for this rank.
        os.kill(process, signal.SIGTERM)
    signal.pause()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    """Of rank 1, with room for eight spans."""
    found = RankLog.create(secrets.token_hex(8), rank=1, path=tmp_path / "run.json", room=8)
    yield found
    found.remove()
    found.close()


def test_a_recorder_knows_threads_and_who_waited(log: RankLog) -> None:
    recorder = Recorder()
    recorder.begin(log)
    go = threading.Event()
    with Scheduler(on_task=recorder.on_task) as scheduler:
        task = scheduler.submit("ids", lambda: go.wait(30), thread="ids", step=3)
        releaser = threading.Timer(0, go.set)
        with recorder.step(3), recorder.clock().phase("input"):
            releaser.start()
            task.result()
        releaser.join()
    found = log.read()
    by_kind = {one.kind: one for one in found.spans}
    assert found.lost == 0
    assert (by_kind["task"].track, by_kind["task"].facts["step"]) == ("ids", 3)
    assert by_kind["phase"].name == "input"
    assert by_kind["step"].start_ns <= by_kind["phase"].start_ns <= by_kind["phase"].end_ns <= by_kind["step"].end_ns
    if "wait" in by_kind:  # Unless the task had ended before the main thread looked.
        assert (by_kind["wait"].track, by_kind["wait"].facts) == ("main", {"thread": "ids"})
        assert by_kind["wait"].end_ns == by_kind["task"].end_ns
    for number in range(20):
        with recorder.step(number):
            pass
    found = log.read()
    assert [one.facts["step"] for one in found.spans] == list(range(12, 20))
    assert found.lost >= 15
    recorder.end()
    with recorder.step(20):
        pass
    assert log.read().spans == found.spans


def test_a_step_of_more_spans_than_there_is_room_for_is_kept(log: RankLog) -> None:
    recorder = Recorder()
    recorder.begin(log)
    with recorder.step(0):
        for _ in range(9):
            with recorder.clock().phase("one"):
                pass
    assert [one.name for one in log.read().spans][-2:] == ["one", "step 0"]


def test_a_thread_gets_no_name_of_one_that_had_its_number_before(log: RankLog) -> None:
    """Python gives the numbers of threads that have ended to new ones."""
    recorder = Recorder()
    recorder.begin(log)

    def work() -> None:
        with recorder.clock().phase("work"):
            pass

    for name in ("one", "other"):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    assert [one.track for one in log.read().spans] == ["one", "other"]


def test_operations_become_collectives_and_waits(log: RankLog) -> None:
    recorder = Recorder()
    recorder.begin(log)
    own = threading.get_native_id()
    operations = [
        (1, 8, 8, 100, 110, 120, 200, 0, own, own, b"allreduce", b"world"),
        (2, 0, 0, 300, 350, 0, 340, 0, own, 0, b"barrier", b"world"),  # it ended within the call
        (3, 8, 8, 400, 410, 0, 500, 0, own, 0, b"alltoall", b"world"),  # nobody waited
        (0, 8, 0, 600, 610, 620, 700, 0, own, 1, b"", b"world"),  # another thread waited
    ]
    write_at(log, log.operations_at, *(OPERATION.pack(number, *one) for number, one in enumerate(operations, 1)))
    spans = log.read().spans
    waits = [(one.track, one.name, one.start_ns, one.end_ns) for one in spans if one.kind == "wait"]
    assert waits == [
        ("main", "wait for allreduce", 120, 200),
        ("main", "wait for barrier", 300, 340),
        ("thread 1", "wait for operation", 620, 700),
    ]
    assert [one.name for one in spans if one.kind == "collective"] == ["allreduce", "barrier", "alltoall", "operation"]


def write_at(log: RankLog, at: int, *records: bytes) -> None:
    os.pwrite(log.descriptor, b"".join(records), at)


def test_records_that_a_kill_cut_in_two_are_not_there(log: RankLog) -> None:
    """A span's record is written from its begin to its number; a number of before is taken away first."""
    for step in range(11):
        log.note(7, 0, f"step {step}", 10 * step + 1, 10 * step + 9, step, 0, 0)
    found = log.read()
    assert ([one.facts["step"] for one in found.spans], found.lost) == (list(range(3, 11)), 3)
    whole = SPAN.pack(111, 119, 11, 0, 7, 0, 0, b"step 11", 12)
    place = log.spans_at + 11 % 8 * SPAN.size
    for size in range(SPAN.size - 7):  # The number is written at once.
        write_at(log, place, whole[:size], bytes(SPAN.size - size))
        assert [one.facts["step"] for one in log.read().spans] == list(range(4, 11))
    write_at(log, place, whole)
    assert [one.facts["step"] for one in log.read().spans] == list(range(4, 12))


def test_what_went_on_at_the_end_is_told(log: RankLog, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.begin(log)
    with recorder.step(0):
        pass
    with recorder.step(1), recorder.clock().phase("forward"):
        names = [(one.kind, one.name) for one in log.read().spans]
        died = log.read()
    assert names == [("step", "step 0"), ("phase", "step 1, not ended"), ("phase", "forward, not ended")]
    assert died.has_died
    # The last thing that is known of it.
    assert [one.end_ns for one in died.spans[1:]] == [died.spans[2].start_ns] * 2
    log.leave()
    assert not log.read().has_died
    path = tmp_path / "run.json"
    write_recordings([died], path)
    assert read(path).ranks[0].has_died
    shown = CliRunner().invoke(app, ["timeline", str(path)])
    assert "rank 1 died" in shown.stdout


def test_logs_that_are_none_are_refused(log: RankLog, seed: int) -> None:
    """Cut, damaged at random, a link, a pipe: nothing else than a refusal, or a recording."""
    assert log.file is not None
    good = log.file.read_bytes()
    forged = log.file.with_name(f"{log.file.name}0")
    chance = random.Random(seed)
    try:
        for size in (0, 10, len(good) // 2, len(good) - 1, len(good) + 1):
            forged.write_bytes(good[:size].ljust(size, b"x"))
            with pytest.raises(TimelineError, match="no log of a rank"):
                RankLog.open(forged)
        for _ in range(200):
            damaged = bytearray(good)
            for _ in range(chance.randrange(1, 20)):
                struct.pack_into("=Q", damaged, chance.randrange(len(good) - 8), chance.getrandbits(64))
            forged.write_bytes(damaged)
            with contextlib.suppress(TimelineError), contextlib.closing(RankLog.open(forged)) as opened:
                write_recordings([opened.read()], log.path)
        forged.unlink()
        os.mkfifo(forged)
        with pytest.raises(TimelineError, match="no ordinary file"):
            RankLog.open(forged)
        forged.unlink()
        forged.symlink_to(log.file)
        with pytest.raises(OSError, match="symbolic links"):
            RankLog.open(forged)
    finally:
        forged.unlink(missing_ok=True)


def test_without_shared_memory_a_rank_records_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_log, "FOLDER", tmp_path / "none")
    with pytest.warns(RuntimeWarning, match="No such file or directory, for 0 MiB of a timeline: what rank 3 records"):
        log = RankLog.create("token", rank=3, path=tmp_path / "run.json", room=8)
    log.note(7, 0, "step 0", 1, 9, 0, 0, 0)
    assert [one.name for one in log.read().spans] == ["step 0"]
    log.close()


HOLDS = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
    print(flush=True)
    input()
"""


def test_what_is_left_is_written_when_no_rank_records(
    log: RankLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has died and rank 2 lives on. Rank 0 was on another host, which has a file of its own."""
    monkeypatch.setattr(left, "PATIENCE_S", 0.0)
    path = tmp_path / "run.json.gz"
    other = RankLog.create(log.token, rank=2, path=log.path, room=8)
    for one in (log, other):
        one.note(7, 0, "step 0", 1, 9, 0, 0, 0)
        one.close()
    assert other.file is not None
    command = [sys.executable, "-c", HOLDS, str(other.file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "\n"
        assert left.write_left(log.path) is None
        assert left.left_paths() >= {log.path}
        holder.communicate("\n", timeout=60)
    found = left.write_left(log.path)
    assert found is not None
    assert (found.path, found.ranks, found.died) == (tmp_path / f"run.{socket.gethostname()}.json", (1, 2), (1, 2))
    assert str(found) == "ranks 1, 2 until the failure, where ranks 1, 2 died"
    assert [clock.rank for clock in read(found.path).ranks] == [1, 2]
    assert log.path not in left.left_paths()
    assert not path.exists()


def test_what_cannot_be_written_stays_left(log: RankLog, tmp_path: Path) -> None:
    log.note(7, 0, "step 0", 1, 9, 0, 0, 0)
    log.close()
    tmp_path.chmod(0o700)
    away = tmp_path.with_name(f"{tmp_path.name} away")
    tmp_path.rename(away)
    try:
        with pytest.raises(FileNotFoundError):
            left.write_left(log.path)
        result = CliRunner().invoke(app, ["timeline", str(log.path)])
        assert result.exit_code == 1
        assert f"{log.path} cannot be written of what ranks have left: No such file or directory" in result.stderr
    finally:
        away.rename(tmp_path)
    assert left.write_left(log.path) is not None


def test_a_run_to_the_same_path_removes_what_an_earlier_one_has_left(log: RankLog, tmp_path: Path) -> None:
    log.note(7, 0, "step 0", 1, 9, 0, 0, 0)
    log.close()
    left.remove_left(tmp_path / "other.json")
    assert log.path in left.left_paths()
    left.remove_left(log.path)
    assert log.path not in left.left_paths()
    assert left.write_left(log.path) is None


@pytest.mark.parametrize(
    ("how", "died"),
    briefly(
        [
            ("killed", [2]),
            ("exits", [2]),
            ("all raise", []),
            ("all are killed", [0, 1, 2]),
            ("all are terminated", []),
        ],
        [("killed", [2]), ("all raise", []), ("all are killed", [0, 1, 2])],
    ),
)
def test_ranks_that_die_leave_their_timeline(
    new_world: WorldFactory, tmp_path: Path, how: str, died: list[int]
) -> None:
    path = tmp_path / "run.json.gz"
    world = new_world(3)
    told = [one for one in world.run(cut_short, path=str(path), how=how) if one is not None]
    world.close()
    if how == "all are killed":
        assert not path.exists()
        result = CliRunner().invoke(app, ["timeline", str(path)])
        assert f"{path}: written of ranks 0, 1, 2 until the failure, where ranks 0, 1, 2 died" in result.stderr
        assert "3 ranks, steps 0 to 0" in result.stdout
    elif how != "all are terminated":
        assert told == [{"path": str(path), "ranks": [0, 1, 2], "died": died}]
    trace = read(path)
    assert [(clock.rank, clock.has_died) for clock in trace.ranks] == [(rank, rank in died) for rank in range(3)]
    for rank in range(3):
        names = [(one.kind, one.name) for one in trace.spans if one.rank == rank and one.track == "main"]
        assert {("step", "step 0"), ("phase", "sum"), ("collective", "allreduce")} <= set(names), names
        is_open = how.startswith("all are") or rank in died
        assert (("phase", "last words, not ended") in names) is is_open
        assert (("phase", "step 1, not ended") in names) is is_open
        assert (("step", "step 1") in names) is not is_open
    assert summarise(trace).steps[0] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path not in left.left_paths()


RESTARTS = """
import os, signal, sys
import torch
import torch.distributed as dist
from sennit.runtime.timeline import Timeline

dist.init_process_group("sennit")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with Timeline(sys.argv[1]) as timeline:
    for step in range(3):
        with timeline.step(10 * restarts + step):
            dist.all_reduce(torch.ones(5))
    if not restarts:
        os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 0:
    print(timeline.path)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_torchrun_restarts_a_program_and_the_timeline_of_its_failure_stays(tmp_path: Path) -> None:
    """All ranks are killed, so none has written what they have left."""
    program, path = tmp_path / "program.py", tmp_path / "run.json"
    program.write_text(RESTARTS)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", str(program), str(path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run.2.json'}\n"), done.stderr
    for file, steps, has_died in ((path, {0, 1, 2}, True), (tmp_path / "run.2.json", {10, 11, 12}, False)):
        trace = read(file)
        assert {span.facts["step"] for span in trace.spans if span.kind == STEP} == steps
        assert [clock.has_died for clock in trace.ranks] == [has_died] * 2


def restarted(rank: int, world: int, path: str) -> list[str]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    try:
        with Timeline(path) as timeline, timeline.step(7):
            pass
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
    return [str(timeline.path), str(timeline.is_written)]


def test_a_restart_writes_what_is_left_of_earlier_starts_and_replaces_nothing(
    kept_world: WorldFactory, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    kept = tmp_path / "run.2.json"
    kept.write_text("written by the ranks of the second start\n")
    first = RankLog.create(secrets.token_hex(8), rank=0, path=path, room=8)
    first.note(7, KINDS.index(STEP), "step 3", 1, 9, 3, 0, 0)
    first.close()
    third = tmp_path / "run.3.json"
    assert kept_world(2).run(restarted, path=str(path)) == [[str(third), "True"], [str(third), "False"]]
    assert [(clock.rank, clock.has_died) for clock in read(path).ranks] == [(0, True)]
    assert {span.facts["step"] for span in read(path).spans} == {3}
    assert kept.read_text() == "written by the ranks of the second start\n"
    assert [clock.rank for clock in read(third).ranks] == [0, 1]
    assert {span.facts["step"] for span in read(third).spans if span.kind == STEP} == {7}
    assert not {path, third} & left.left_paths()
