# SPDX-License-Identifier: Apache-2.0
"""`make test-rdma` ends as its one VM does: also where the guest's kernel failed (125), nothing is tried again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands in for Python: a kernel is there or not, and the VM ends with a status.
STAND_IN = """#!/bin/bash
[ "$4" = kernel ] && echo "kernel: ready: /cache/kernel-uml-6.12" && exit {kernel}
echo vm >>{log}
exit {vm}
"""


def make(folder: Path, *, kernel: int = 0, vm: int = 0) -> tuple[subprocess.CompletedProcess[str], int]:
    """Runs the ring, and counts its VMs."""
    log, python = folder / "log", folder / "python"
    log.touch()
    python.write_text(STAND_IN.format(log=log, kernel=kernel, vm=vm))
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "BUILT=yes", f"PY={python}", "test-rdma"]
    # Not the options of a make above.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done, log.read_text().count("vm")


@pytest.mark.parametrize("status", [0, 1, 124, 125])
def test_there_is_one_vm_however_it_ends(tmp_path: Path, status: int) -> None:
    done, vms = make(tmp_path, vm=status)
    assert vms == 1, done.stdout + done.stderr
    assert (done.returncode == 0) == (status == 0)
    assert status == 0 or f"Error {status}" in done.stderr


@pytest.mark.parametrize(("status", "fails"), [(69, False), (1, True)])
def test_without_a_kernel_there_is_no_vm(tmp_path: Path, status: int, fails: bool) -> None:
    """69: no kernel runs here. tests/testbed/test_rings.py: whether that is an excuse."""
    done, vms = make(tmp_path, kernel=status)
    assert vms == 0
    assert (done.returncode != 0) == fails
