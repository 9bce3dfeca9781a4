# SPDX-License-Identifier: Apache-2.0
"""The command that a session watches goes on, whatever becomes of the session, and gets the session's signals once."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from sennit.command_line import EXIT_NO_OUTPUT, EXIT_UNAVAILABLE, OutputLost, ReaderGone
from sennit.errors import SennitError
from sennit.runtime.trace import commands
from sennit.runtime.trace.watched import Watched
from tests.testbed.answering_ranks import DEADLINE_S
from tests.testbed.trace_runs import SENNIT

# Ends with 7, and after a SIGTERM with 9. It waits for a word, so no test needs to know how long anything takes.
FINISHES = """trap 'echo terminated >> "$0"; exit 9' TERM; read word < "$1"; echo finished >> "$0"; exit 7"""

# What is raised in the session, what is said of it, and the exit code after a command that succeeds.
FAILURES: list[tuple[Callable[[], Exception], str, int]] = [
    (lambda: ReaderGone(32, "Broken pipe"), "", 0),
    (lambda: OutputLost(28, "No space left"), "error: the output cannot be written: No space left\n", EXIT_NO_OUTPUT),
    (lambda: OSError(12, "Cannot allocate"), "sennit trace: [Errno 12] Cannot allocate\n", EXIT_UNAVAILABLE),
    (lambda: SennitError("a map is gone"), "sennit trace: a map is gone\n", EXIT_UNAVAILABLE),
    (lambda: typer.Exit(1), "", 1),
    (lambda: ZeroDivisionError("by nothing"), "ZeroDivisionError: by nothing\n", 1),
]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A command that writes what becomes of it to its first file, and ends when its second one has a word."""
    said, word = tmp_path / "said", tmp_path / "word"
    os.mkfifo(word)
    return ["sh", "-c", FINISHES, str(said), str(word)]


@pytest.mark.parametrize(("make", "told", "code"), FAILURES)
def test_what_fails_in_a_session_ends_the_session_alone(
    make: Callable[[], Exception],
    told: str,
    code: int,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, said, word = command

    def fail() -> NoReturn:
        raise make()

    def fail_after(watched: Watched) -> None:
        watched.watch(None, 0, lambda: None)
        fail()

    def let_go(process: subprocess.Popen[bytes]) -> int:
        """The session waits for the command: only now it may end."""
        assert process.poll() is None
        Path(word).write_text("end\n")
        return whole(process)

    whole = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", let_go)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(typer.Exit) as ended, commands._watching(command) as watched:
        watched.watch(None, 0.01, fail)
    assert (ended.value.exit_code, Path(said).read_text()) == (7, "finished\n")
    errors = capsys.readouterr().err
    assert errors.endswith(f"{told}sennit trace: the session has ended, process {watched.started} goes on\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.undo()
    with pytest.raises(typer.Exit) as ended, commands._watching(["true"]) as watched:
        fail_after(watched)
    assert ended.value.exit_code == code


def test_a_program_that_cannot_be_started_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, commands._watching(["/no/such/program"]) as watched:
        watched.watch(None, 0, lambda: None)
    assert ended.value.exit_code == EXIT_UNAVAILABLE
    assert capsys.readouterr().err == (
        "sennit trace: /no/such/program: No such file or directory; give a program that can be started behind --\n"
    )


WATCHES = """
import sys
from sennit.runtime.trace.watched import Watched
with Watched(sys.argv[1:]) as watched:
    watched.watch(None, 0, lambda: None)
    print("the session is over", flush=True)
    sys.exit(watched.wait())
"""
# Counts what it gets, and ends with that number when it is told to.
COUNTS = """
import os, signal, sys
came = []
def note(number, frame):
    came.append(number)
    # Not `print`: a signal that comes while it writes would enter it twice.
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(10 + len(came)))
os.write(1, f"process {os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_session_is_passed_on_once(number: signal.Signals) -> None:
    """As from a container's engine or from another shell. A second one is passed on, too."""
    command = [sys.executable, "-c", WATCHES, sys.executable, "-S", "-c", COUNTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as session:
        try:
            assert session.stdout is not None
            watched = int(session.stdout.readline().removeprefix("process "))
            session.send_signal(number)
            lines = {session.stdout.readline() for _ in range(2)}
            assert lines == {f"got {number.name}\n", "the session is over\n"}
            session.send_signal(number)
            assert session.stdout.readline() == f"got {number.name}\n"
            os.kill(watched, signal.SIGUSR1)
            assert session.wait(DEADLINE_S) == 12
        finally:
            session.kill()


def test_the_keyboard_interrupts_the_command_once() -> None:
    """The terminal itself sends Ctrl-C to both."""
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-c", WATCHES, sys.executable, "-S", "-c", COUNTS]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True) as session:
        os.close(theirs)
        try:
            assert session.stdout is not None
            watched = int(session.stdout.readline().removeprefix("process "))
            os.write(ours, b"\x03")
            lines = {session.stdout.readline() for _ in range(2)}
            assert lines == {"got SIGINT\n", "the session is over\n"}
            os.kill(watched, signal.SIGUSR1)
            assert session.wait(DEADLINE_S) == 11
        finally:
            session.kill()
            os.close(ours)


@pytest.mark.root
@pytest.mark.needs("tracepoints")
def test_a_reader_that_goes_costs_the_command_nothing(command: list[str]) -> None:
    *_, said, word = command
    ours, theirs = os.pipe()
    os.close(ours)
    arguments = ["trace", "paths", "--interval", "0.1", "--", *command]
    with subprocess.Popen([*SENNIT, *arguments], stdout=theirs, stderr=subprocess.PIPE, text=True) as session:
        os.close(theirs)
        try:
            assert session.stderr is not None
            assert "tracepoints of every process" in session.stderr.readline()
            # Other processes of this machine may have libraries of their own.
            line = next(line for line in iter(session.stderr.readline, "") if not line.startswith("not seen: "))
            assert "the session has ended" in line
            Path(word).write_text("end\n")
            assert (session.wait(DEADLINE_S), session.stderr.read()) == (7, "")
        finally:
            session.kill()
    assert Path(said).read_text() == "finished\n"


FULL = """mount -t tmpfs -o size=64k tmpfs "$0" && ip link set lo up && exec "$@" """
SENDS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range(100):
        sender.sendto(bytes(1400), ("127.0.0.1", 4791))
"""


@pytest.mark.root
@pytest.mark.needs("tc-bpf")
def test_a_full_disk_ends_a_capture_and_not_the_command(command: list[str], tmp_path: Path) -> None:
    *_, said, word = command
    disk = tmp_path / "disk"
    disk.mkdir()
    capture = ["trace", "packets", "--interface", "lo", "--write", str(disk / "flow.pcapng")]
    inside = ["unshare", "--mount", "--net", "sh", "-c", FULL, str(disk), *SENNIT, *capture, "--", *command]
    with subprocess.Popen(inside, stderr=subprocess.PIPE, text=True) as session:
        try:
            assert session.stderr is not None
            assert "packets of lo" in session.stderr.readline()
            enter = ["nsenter", f"--net=/proc/{session.pid}/ns/net", sys.executable, "-S", "-c", SENDS]
            subprocess.run(enter, timeout=DEADLINE_S, check=True)
            line = session.stderr.readline()
            assert line.startswith(f"sennit trace: {disk}/flow.pcapng: No space left on device, after ")
            assert "the session has ended" in session.stderr.readline()
            Path(word).write_text("end\n")
            assert session.wait(DEADLINE_S) == 7
        finally:
            session.kill()
    assert Path(said).read_text() == "finished\n"
