# SPDX-License-Identifier: Apache-2.0
"""`sennit testbed vm` as a user meets it: exit codes, output, clean-up, and every way to fail."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sennit.testbed.vm import boot, runner
from sennit.testbed.vm.kernels import Kind
from sennit.testbed.vm.links import Links
from tests import pages

pytestmark = [pytest.mark.needs("vm"), pytest.mark.slow]

# A VM takes a second, or ten in QEMU, but longer on a busy machine.
DEADLINE_S = 90.0
# For commands that do not end. The VM must have started by then.
LIMIT_S = {Kind.UML: 10.0, Kind.QEMU: 60.0}

Vm = Callable[..., subprocess.CompletedProcess[bytes]]


@functools.cache
def choice() -> boot.Choice:
    """Chooses the kernel that boots here."""
    return boot.choose(boot.wanted(boot.AUTO))


def tool() -> list[str]:
    return [sys.executable, "-m", "sennit", "testbed", "vm", "--kernel", choice().kind]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Puts the VM's files below the test's own folder. The folder's name identifies the VM's processes."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return {**os.environ, "TMPDIR": str(scratch), "SENNIT_MARK": "from outside"}


def processes(folder: Path) -> list[int]:
    """Returns the processes with a file below the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.01)


@pytest.fixture
def vm(environment: dict[str, str], tmp_path: Path) -> Iterator[Vm]:
    """Runs a shell command in a VM. Then checks that no file and no process of the VM is left."""

    def run(script: str, *options: str) -> subprocess.CompletedProcess[bytes]:
        command = [*tool(), "--links", "0", *options, "--", "sh", "-c", script]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False
        )

    yield run
    assert processes(tmp_path / "scratch") == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_exit_code_and_both_streams_are_the_commands(vm: Vm) -> None:
    done = vm("printf 'out, no end of line'; printf err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out, no end of line", b"err")


def test_first_vm(tmp_path: Path) -> None:
    """The tutorial's first look inside shows what its page says."""
    page = pages.ROOT / "docs" / "tutorials" / "first-vm.md"
    ((line, printed),) = pages.run(page, tmp_path, deadline_s=DEADLINE_S).items()
    (shown,) = [block.shown for block in pages.blocks(page) if block.line == line]
    assert [text.rstrip() for text in printed] == shown.splitlines()


def test_no_byte_of_the_output_is_changed_or_lost(vm: Vm) -> None:
    size_bytes = 3_000_000
    program = f"import random; random.seed(1); import sys; sys.stdout.buffer.write(random.randbytes({size_bytes}))"
    expected = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=DEADLINE_S)
    done = vm(f"{sys.executable} -c '{program}'")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == size_bytes
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(expected.stdout).digest()


def test_output_of_what_outlives_the_command_is_not_waited_for(vm: Vm) -> None:
    assert vm("sleep 1000 & echo done").stdout == b"done\n"


def test_programs_folder_and_environment_are_those_outside(vm: Vm, tmp_path: Path) -> None:
    done = vm("pwd; echo $SENNIT_MARK; echo $MORE; id -u", "--env", "MORE=a=b c")
    assert done.stdout.decode().splitlines() == [str(tmp_path), "from outside", "a=b c", "0"]


def test_signals_and_missing_programs_have_a_shells_exit_codes(vm: Vm) -> None:
    assert vm("kill -TERM $$").returncode == 128 + signal.SIGTERM
    done = vm("exec no-such-program")
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr


def test_what_is_written_is_gone_but_for_folders_to_bring_back(vm: Vm, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    script = "echo changed >file; rm -r /etc/passwd; echo kept >$SENNIT_VM_OUT/a; echo too >two/b; cat file"
    done = vm(script, "--bring-back", "new/one", "--bring-back", "two")
    assert (done.returncode, done.stdout) == (0, b"changed\n"), done.stderr
    assert (tmp_path / "file").read_text() == "before"
    assert Path("/etc/passwd").exists()
    assert (tmp_path / "new/one/a").read_text() == "kept\n"
    assert (tmp_path / "two/b").read_text() == "too\n"


def test_links_have_devices_addresses_and_netem(vm: Vm) -> None:
    done = vm(
        "rdma link show; tc qdisc show dev roce0; tc qdisc show dev roce3",
        "--links", "2", "--mtu", "1500", "--netem", "loss 1%", "--netem", "rxe3=delay 5ms",
    )  # fmt: skip
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in lines[:4]] == [f"rxe{number}/1" for number in range(4)]
    assert all("state ACTIVE" in line for line in lines[:4])
    assert "loss 1%" in lines[4]
    assert "delay 5ms" in lines[5]
    assert "loss" not in lines[5]


def test_the_time_limit_has_an_exit_code_of_its_own(vm: Vm) -> None:
    limit_s = LIMIT_S[choice().kind]
    done = vm("echo begun; sleep 1000", "--timeout", f"{limit_s:g}")
    assert (done.returncode, done.stdout) == (124, b"begun\n"), done.stderr
    assert f"the time limit of {limit_s:g} s is over".encode() in done.stderr


def test_a_panic_shows_the_end_of_the_console(vm: Vm) -> None:
    done = vm("echo c >/proc/sysrq-trigger; sleep 1000")
    assert done.returncode == 125
    assert b"the end of the VM's console:" in done.stderr
    reason = b"the VM ended before its command did: Kernel panic - not syncing: sysrq triggered crash"
    assert reason in done.stderr.splitlines()[-1]


def test_running_out_of_memory_is_a_failure_of_the_vm(vm: Vm) -> None:
    done = vm("tail /dev/zero", "--memory", "128M")
    assert done.returncode == 125
    assert b"Kernel panic - not syncing: Out of memory" in done.stderr.splitlines()[-1]


def test_a_vm_that_hangs_is_no_command_that_takes_too_long(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SILENCE_S", 1.0)  # The defaults would make the test longer.
    monkeypatch.setattr(runner, "HUNG_S", 3.0)
    monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])

    def stop(data: bytes) -> None:
        assert data == b"begun\n"
        for process in processes(tmp_path / "scratch"):
            os.kill(process, signal.SIGSTOP)

    request = runner.Request(
        command=("sh", "-c", "echo begun; sleep 1000"),
        kind=choice().kind,
        kernel=choice().kernel,
        links=Links(count=0),
    )
    outcome = runner.run(request, output=stop, errors=lambda data: None)
    assert outcome.code == 125
    assert outcome.reason.startswith("the VM hung: silent for ")
    assert processes(tmp_path / "scratch") == []


def test_a_step_that_waits_in_vain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "records", lambda self: [("await", "/sys/class/infiniband/rxe9/*", "fd5e:77")])
    request = runner.Request(command=("true",), kind=choice().kind, kernel=choice().kernel, memory_bytes=128 << 20)
    outcome = runner.run(request, output=lambda data: None, errors=lambda data: None)
    assert outcome.code == 125
    reason = "setting up the VM failed: fd5e:77 /sys/class/infiniband/rxe9/*: Connection timed out"
    assert outcome.reason == reason


def test_netem_settings_that_tc_refuses_are_named(vm: Vm) -> None:
    done = vm("true", "--links", "1", "--netem", "lose 1%")
    assert done.returncode == 125
    assert b"setting up the VM failed: 'tc ... -' ended with status 1: What is \"lose\"?" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_tool_ends_the_vm(environment: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    scratch = Path(environment["TMPDIR"])
    command = [*tool(), "--links", "0", "--", "sh", "-c", "echo up; while :; do :; done"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as running:
        assert running.stdout is not None
        # The line arrives while the command still runs, because output is passed on at once.
        assert running.stdout.readline() == b"up\n"
        assert processes(scratch)
        running.send_signal(number)
        code = running.wait(DEADLINE_S)
    if number == signal.SIGKILL:
        assert code == -number
        until(lambda: not processes(scratch), "the VM to end with its tool")
        return
    assert code == 128 + number
    assert processes(scratch) == []
    assert list(scratch.iterdir()) == []
