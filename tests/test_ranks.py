# SPDX-License-Identifier: Apache-2.0
"""Processes of tests find the function that the test hands over, and no other package called `tests`."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.ranks import command, importable, start


def say(text: str, to: Path) -> None:
    to.write_text(f"{__name__}: {text}")


def fail(text: str) -> None:
    raise ValueError(text)


def say_what_is_imported(to: Path) -> None:
    to.write_text(" ".join(sys.modules))


@pytest.fixture
def other_tests(tmp_path: Path) -> dict[str, str]:
    """An environment in which another package is called `tests`."""
    (tmp_path / "other" / "tests").mkdir(parents=True)
    (tmp_path / "other" / "tests" / "__init__.py").write_text("raise AssertionError('the other package')")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "other")}


def test_a_new_interpreter_runs_a_function_of_a_test_file(other_tests: dict[str, str], tmp_path: Path) -> None:
    called = command(partial(say, "here", tmp_path / "said"))
    subprocess.run(called, check=True, timeout=60, cwd="/", env=other_tests)
    assert (tmp_path / "said").read_text() == "tests.test_ranks: here"


def test_a_process_that_fails_leaves_a_traceback_in_its_log(tmp_path: Path) -> None:
    process = start(partial(fail, "for the test"), log=tmp_path / "log", own_interpreter=True)
    process.join(60)
    assert process.exitcode == 1
    assert "ValueError: for the test" in (tmp_path / "log").read_text()


def test_a_fork_has_what_the_server_imports_whoever_started_it(tmp_path: Path) -> None:
    """The product has a list of its own, and may come first: tests call it in this process."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mailbox"])
    process = start(partial(say_what_is_imported, tmp_path / "said"))
    process.join(60)
    imported = (tmp_path / "said").read_text().split()
    assert {"pytest", "sennit.testbed.fork_server"} <= set(imported)
    assert "mailbox" not in imported


class Interruption(BaseException):
    """As the timeout of a test raises one."""


def interrupt(rank: int, world: int, tester: int) -> None:
    """Rank 0 interrupts the test while all of them are in a call, and none ever answers."""
    if rank == 0:
        os.kill(tester, signal.SIGUSR1)
    signal.pause()


def own_rank(rank: int, world: int) -> int:
    return rank


def test_a_world_is_not_used_again_after_a_call_that_did_not_return() -> None:
    """The next call would read the answers of that one."""
    pytest.importorskip("torch")
    from tests.runtime.world import World

    def raises(number: int, frame: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGUSR1, raises)
    try:
        world = World(2, backend="")
        assert world.run(own_rank) == [0, 1]
        with pytest.raises(Interruption):
            world.run(interrupt, os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not world.alive
    world.close()


def test_what_has_no_name_in_a_module_is_refused() -> None:
    def inside() -> None: ...

    for call in (inside, lambda: None, partial(inside)):
        with pytest.raises(TypeError, match=r"test_ranks\.test_what_.*allowed: functions of a module"):
            importable(call)


def test_processes_are_forked_and_spawned_in_one_place() -> None:
    here = Path(__file__).parent
    starts = re.compile(r'get_context\("(forkserver|spawn)"\)')
    found = {str(path.relative_to(here)) for path in here.rglob("*.py") if starts.search(path.read_text())}
    # Here, and where the server is told what to import.
    assert found == {"ranks.py", "test_ranks.py", "conftest.py"}
