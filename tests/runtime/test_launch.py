# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine: what they get from the process that starts them, and what it tells of their end."""

from __future__ import annotations

import ast
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from sennit.command_line import OutputLost, ReaderGone
from sennit.runtime.training.launch import RankFailure, Ranks, serve_store
from tests.extent import briefly
from tests.ranks import start

HERE = str(Path(__file__).parent)
TIMEOUT_S = 30.0
LAUNCHER = f"""
import sys, threading
import launch_functions
from sennit.runtime.training.launch import Ranks, serve_store
how, function, argument = sys.argv[1:]
if how == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
with Ranks(2, forked=how != "server") as ranks:
    store, address = serve_store(0, timeout_s={TIMEOUT_S})
    print(ranks.run(getattr(launch_functions, function), argument, address=address, store_timeout_s={TIMEOUT_S}))
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`run(name, argument, on_loss)`: the results of two ranks that run this function of launch_functions.py."""
    monkeypatch.syspath_prepend(HERE)

    def results(name: str, argument: str, on_loss: Callable[[int, str], None] | None = None) -> list[Any]:
        function = getattr(importlib.import_module("launch_functions"), name)
        _store, address = serve_store(0, timeout_s=TIMEOUT_S)
        with Ranks(2) as ranks:
            return ranks.run(function, argument, address=address, store_timeout_s=TIMEOUT_S, on_loss=on_loss)

    return results


def test_ranks_have_the_environment_of_their_run_and_come_from_a_process_without_threads(
    run: Callable[[str, str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for value in ("first", "second"):
        monkeypatch.setenv("SENNIT_OF_A_TEST", value)
        assert run("surroundings", "SENNIT_OF_A_TEST") == [(value, "1", 1)] * 2
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("how", "told"), [("killed", "signal 9"), ("leaves", "status 3")])
def test_a_rank_that_ends_without_a_word_is_told_with_its_signal_or_status(
    run: Callable[[str, str], list[Any]], how: str, told: str
) -> None:
    with pytest.raises(RankFailure, match=rf"^rank [01]: process ended with {told}$"):
        run("end_at_once", how)


def test_a_rank_that_ends_is_told_while_the_others_go_on(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 waits until it has been told. If all fail at the same time, the call alone tells it."""
    monkeypatch.setattr("sennit.runtime.training.launch.ALONE_S", 0.2)
    told: list[tuple[int, str]] = []
    heard = tmp_path / "heard"

    def on_loss(rank: int, error: str) -> None:
        told.append((rank, error))
        heard.touch()

    assert run("first_waits_for_the_loss_of_others", str(heard), on_loss) == ["heard"]
    assert told == [(1, "no more")]
    monkeypatch.setattr("sennit.runtime.training.launch.ALONE_S", 20.0)
    told.clear()
    with pytest.raises(RankFailure, match=r"^rank [01]: process ended with status 3$"):
        run("end_at_once", "leaves", on_loss)
    assert told == []


@pytest.mark.parametrize(("path", "error"), [("pipe", ReaderGone), ("/dev/full", OutputLost)])
def test_a_rank_that_cannot_write_its_output_ends_the_command_as_any_output_does(
    run: Callable[[str, str], list[Any]], path: str, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other rank waits to the end.
    monkeypatch.setattr("sennit.runtime.training.launch.GRACE_S", 0.2)
    with pytest.raises(error):
        run("writes_to", path)


class Launcher:
    """A fork whose two ranks, forks as well, run a function of launch_functions.py. It begins seconds sooner than an
    interpreter of its own. With what tests need of `subprocess.Popen`.
    """

    def __init__(self, function: str, argument: str) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = start(partial(launch, function, argument), pipe=theirs)
        theirs.close()
        with ours:
            self.stdout = os.fdopen(os.dup(ours.fileno()))

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode


def launch(function: str, argument: str, output: Connection) -> None:
    with output:
        os.dup2(output.fileno(), 1)
    sys.path.insert(0, HERE)
    called = getattr(importlib.import_module("launch_functions"), function)
    with Ranks(2, forked=True) as ranks:
        _store, address = serve_store(0, timeout_s=TIMEOUT_S)
        ranks.run(called, argument, address=address, store_timeout_s=TIMEOUT_S)


@contextlib.contextmanager
def launched(how: str, function: str, argument: str) -> Iterator[subprocess.Popen[str] | Launcher]:
    """A process whose two ranks run this function of launch_functions.py. `fork`: it is a fork itself."""
    if how == "fork":
        fork = Launcher(function, argument)
        try:
            yield fork
        finally:
            fork.kill()
            fork.wait(TIMEOUT_S)
            fork.stdout.close()
        return
    command = [sys.executable, "-c", LAUNCHER, how, function, argument]
    environment = {**os.environ, "PYTHONPATH": HERE, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def test_ranks_of_a_process_with_other_threads_come_from_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    function = importlib.import_module("launch_functions").origin
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        _store, address = serve_store(0, timeout_s=TIMEOUT_S)
        with Ranks(2, forked=True) as ranks:
            origins = ranks.run(function, "", address=address, store_timeout_s=TIMEOUT_S)
    finally:
        done.set()
        other.join()
    assert os.getpid() not in [parent for parent, *_ in origins]


@pytest.mark.long
@pytest.mark.parametrize("how", ["forked", "threads"])
def test_only_a_process_without_other_threads_is_forked_into_its_ranks(how: str) -> None:
    with launched(how, "origin", "") as launcher:
        assert isinstance(launcher, subprocess.Popen)
        text, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0
    origins = ast.literal_eval(text)
    assert [parent == launcher.pid for parent, _, _ in origins] == [how == "forked"] * 2
    assert [flags for _, *flags in origins] == [[True, True]] * 2


def test_ranks_that_are_never_run_are_ended() -> None:
    with Ranks(2):
        started = multiprocessing.active_children()
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("how", briefly(["fork", "forked", "server"], ["fork"]))
def test_ranks_end_when_the_process_that_started_them_is_killed(how: str) -> None:
    with launched(how, "wait_to_be_ended", str(TIMEOUT_S)) as launcher:
        try:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        finally:
            launcher.kill()
        # Its end is that of the last process that has it. They may end in order: a timeline is written then.
        assert launcher.stdout.read() == "asked\n" * 2


@pytest.mark.parametrize("how", briefly(["fork", "forked", "server"], ["fork"]))
def test_an_interrupt_of_the_process_that_started_them_is_one_of_the_ranks(how: str) -> None:
    with launched(how, "wait_to_be_interrupted", str(TIMEOUT_S)) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.read() == "interrupted\n" * 2
        assert launcher.wait(TIMEOUT_S) == (1 if how == "fork" else -signal.SIGINT)


def test_a_command_that_starts_ranks_imports_neither_torchs_compiler_nor_what_is_for_xdp() -> None:
    """The compiler takes a second of processor time, and mistakes are told without it: the first rank imports it. So do
    torch's checkpoints with their sympy, which `--help` and a mistyped option would wait for.

    Nor does anything that it imports start a thread, which would send it to a server in place of a fork.
    """
    names = ("torch._dynamo", "torch.distributed.checkpoint", "sympy", "pandas", "elftools", "sennit.ebpf.")
    program = (
        "import os, sys, sennit.runtime.training.command; "
        f"print([m for m in sys.modules if m.startswith({names})], len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=110, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[] 1\n"
