# SPDX-License-Identifier: Apache-2.0
"""The choice of a VM's kernel: a User-Mode Linux that boots here, else QEMU, else none, each time with the reason.

The kernels are scripts. One panics as a User-Mode Linux does on an unknown processor. One reports what the first
process of a guest reports. Each writes its starts to a file.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from sennit import debian
from sennit.commands.cli import app
from sennit.testbed.vm import boot, kernels, machines, runner, stock_kernel, uml_kernel
from sennit.testbed.vm.kernels import Kind

PANIC = "Kernel panic - not syncing: userspace - ptrace set fp regs failed, errno = 14"
# The third console of a User-Mode Linux and the fourth descriptor of QEMU are the control channel (machines.py).
UML_CONTROL = "s/.*con3=null,fd:\\([0-9]*\\).*/\\1/p"
QEMU_CONTROL = "s/.*fd=\\([0-9]*\\),set=3.*/\\1/p"
REPORTS = "fd=$(echo \"$*\" | sed -n '{pattern}'); printf 'started\\nexit 0\\n' >/proc/self/fd/$fd"

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "ip", "rdma", "tc", "setpriv")), reason="needs gcc and iproute2"
)


@dataclass
class Bench:
    """A cache, and programs that hide those of the machine."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "sennit"

    def script(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho >>"{self.folder}/starts-{path.name}"\n{body}\n')
        path.chmod(0o755)

    def uml(self, body: str, patches: tuple[Path, ...] = ()) -> Path:
        kernel = self.cache / kernels._name(Kind.UML, "6.12.1-1", patches)
        self.script(kernel / uml_kernel.BINARY, body)
        return kernel

    def qemu(self, body: str) -> Path:
        kernel = self.cache / kernels._name(Kind.QEMU, "6.12.1")
        (kernel / stock_kernel.MODULES).mkdir(parents=True)
        (kernel / stock_kernel.IMAGE).touch()
        self.script(self.folder / "bin" / machines.QEMU, body)
        return kernel

    def starts(self, name: str) -> int:
        noted = self.folder / f"starts-{name}"
        return noted.read_text().count("\n") if noted.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Bench(tmp_path)


def panics() -> str:
    return f"echo '{PANIC}'; kill -ABRT $$"


def boots(pattern: str) -> str:
    return REPORTS.format(pattern=pattern)


def vm(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["testbed", "vm", "--links", "0", *options, "--", "true"])
    return done.exit_code, done.output


def test_a_user_mode_linux_that_boots_is_taken_without_a_word(bench: Bench) -> None:
    bench.uml(boots(UML_CONTROL))
    bench.qemu(boots(QEMU_CONTROL))
    assert vm() == (0, "")
    assert vm() == (0, "")
    assert bench.starts(uml_kernel.BINARY) == 3  # one start to see whether it boots
    assert bench.starts(machines.QEMU) == 0


def test_one_that_panics_is_replaced_by_qemu_which_says_why(bench: Bench) -> None:
    bench.uml(panics())
    bench.qemu(boots(QEMU_CONTROL))
    for _ in range(2):
        code, output = vm()
        assert code == 0, output
        assert f"in QEMU: User-Mode Linux does not boot here: the VM ended before its command did: {PANIC}" in output
    assert bench.starts(uml_kernel.BINARY) == 1
    assert bench.starts(machines.QEMU) == 3


def test_a_kernel_from_another_kind_of_processor_is_booted_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = bench.uml(boots(UML_CONTROL))
    assert boot.problem(Kind.UML, kernel) == ""
    cpuinfo = bench.folder / "cpuinfo"
    cpuinfo.write_text(boot.CPUINFO.read_text().replace("flags\t\t:", "flags\t\t: amx_tile", 1))
    bench.uml(panics())
    with monkeypatch.context() as other_machine:
        other_machine.setattr(boot, "CPUINFO", cpuinfo)
        assert PANIC in boot.problem(Kind.UML, kernel)
    assert boot.problem(Kind.UML, kernel) == ""
    assert bench.starts(uml_kernel.BINARY) == 2


def test_make_kernel_tries_again_what_did_not_boot(bench: Bench) -> None:
    kernel = bench.uml(panics())
    bench.qemu(boots(QEMU_CONTROL))
    said: list[str] = []
    assert boot.provide(boot.wanted("auto"), said.append).kind is Kind.QEMU
    assert any(PANIC in line for line in said)
    bench.uml(boots(UML_CONTROL))
    assert boot.provide(boot.wanted("auto"), said.append) == boot.Choice(kind=Kind.UML, kernel=kernel)


def test_where_neither_boots_both_reasons_are_named_and_the_status_is_69(bench: Bench) -> None:
    bench.uml(panics())
    bench.qemu("echo 'Kernel panic - not syncing: no root'; exit 1")
    done = CliRunner().invoke(app, ["testbed", "kernel"])
    assert done.exit_code == 69
    assert PANIC in done.output
    assert "QEMU does not boot here: the VM ended before its command did: Kernel panic - not syncing: no" in done.output
    code, output = vm()
    assert code == 125
    assert PANIC in output


def test_one_command_makes_the_kernel_and_runs_in_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def newest(kind: Kind, patches: tuple[Path, ...], say: object) -> tuple[str, Callable[[Path], None]]:
        def make(entry: Path) -> None:
            bench.script(entry / uml_kernel.BINARY, boots(UML_CONTROL))
            made.append(entry)

        return kernels._name(kind, "6.12.1-1", patches), make

    monkeypatch.setattr(kernels, "_newest", newest)
    code, output = vm()
    assert code == 125
    assert "or the VM with --make-kernel" in output
    assert vm("--make-kernel") == (0, "")
    assert vm("--make-kernel", "--kernel", "uml") == (0, "")
    assert len(made) == 1


def test_missing_programs_are_named_before_a_kernel_is_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.uml(panics())
    monkeypatch.setattr(runner, "TOOLS", (("no-such-rdma", "iproute2"),))
    monkeypatch.setattr(kernels, "provide", lambda *arguments, **options: pytest.fail("made a kernel"))
    done = CliRunner().invoke(app, ["testbed", "kernel", "uml"])
    assert done.exit_code == 69
    assert "needs no-such-rdma: apt-get install iproute2" in done.output


def test_a_patched_kernel_has_no_substitute(bench: Bench) -> None:
    patch = bench.folder / "0001-one.patch"
    patch.write_text("diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n")
    bench.uml(panics(), (patch,))
    bench.qemu(boots(QEMU_CONTROL))
    code, output = vm("--patch", str(patch))
    assert code == 125
    assert PANIC in output
    assert bench.starts(machines.QEMU) == 0


def test_a_kernel_asked_for_by_name_is_the_one_that_runs(bench: Bench) -> None:
    bench.uml(panics())
    bench.qemu(boots(QEMU_CONTROL))
    code, output = vm("--kernel", "uml")
    assert code == 125
    assert PANIC in output
    assert vm("--kernel", "qemu") == (0, "")


def test_what_can_be_installed_is_no_property_of_the_machine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = bench.qemu(boots(QEMU_CONTROL))
    with monkeypatch.context() as before:
        before.setattr(machines.Qemu, "tools", (("no-such-emulator", "qemu-system-x86"),))
        assert "needs no-such-emulator: apt-get install qemu-system-x86" in boot.problem(Kind.QEMU, kernel)
        with pytest.raises(debian.Unavailable, match="apt-get install qemu-system-x86"):
            boot.provide([Kind.QEMU], print)
    assert boot.problem(Kind.QEMU, kernel) == ""


def test_without_a_folder_for_its_memory_a_user_mode_linux_says_what_each_lacks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.uml(boots(UML_CONTROL))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    code, output = vm("--kernel", "uml")
    assert code == 125
    temporary = tempfile.gettempdir()
    reason = f"no room for the VM's memory of 64 MiB: /dev/shm is mounted noexec, {temporary} is mounted noexec"
    assert reason in output
    bench.qemu(boots(QEMU_CONTROL))
    code, output = vm()
    assert code == 0, output
    assert f"in QEMU: there is {reason}" in output
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=40 << 20))
    code, output = vm("--kernel", "uml")
    assert code == 125
    assert f"64 MiB: /dev/shm has 40 MiB free, {temporary} has 40 MiB free; ask for less" in output


def test_full_disks_are_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.uml(boots(UML_CONTROL))
    with monkeypatch.context() as full:
        error = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
        full.setattr(tempfile, "gettempdir", Mock(side_effect=error))
        code, output = vm("--kernel", "uml")
    assert code == 125
    assert "directory found in ['/tmp']: set TMPDIR to a folder that can be written" in output
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        code, output = vm("--kernel", "uml")
    assert code == 125
    assert re.search(
        rf"{tempfile.gettempdir()} does not take the VM's \d+ KiB \(No space left on device\): set", output
    )


def test_a_cache_that_cannot_be_written_is_tried_each_time(bench: Bench) -> None:
    kernel = bench.uml(boots(UML_CONTROL))
    (kernel / boot.RECORDS).touch()  # Not a folder, so even root cannot write there.
    assert boot.problem(Kind.UML, kernel) == ""
    assert boot.problem(Kind.UML, kernel) == ""
    assert bench.starts(uml_kernel.BINARY) == 2
