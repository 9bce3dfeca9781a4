# SPDX-License-Identifier: Apache-2.0
"""`make test-rdma`: a kernel of the guest that failed gets one more VM, and nothing else is tried again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands in for Python: a kernel is there, and each VM ends with the next of the given statuses.
STAND_IN = """#!/bin/bash
[ "$4" = kernel ] && echo "kernel: ready: /cache/kernel-uml-6.12" && exit
echo vm >>{log}
exit "$(sed -n "$(wc -l <{log})p" {statuses})"
"""
FAILED = "THE KERNEL OF THE VM FAILED"


@pytest.mark.parametrize(
    ("statuses", "status", "vms"), [([0], 0, 1), ([1], 1, 1), ([124], 124, 1), ([125, 0], 0, 2), ([125, 125], 125, 2)]
)
def test_only_a_kernel_that_failed_gets_one_more_vm(tmp_path: Path, statuses: list[int], status: int, vms: int) -> None:
    log, listed, python = tmp_path / "log", tmp_path / "statuses", tmp_path / "python"
    listed.write_text("".join(f"{code}\n" for code in statuses))
    python.write_text(STAND_IN.format(log=log, statuses=listed))
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "BUILT=yes", f"PY={python}", "test-rdma"]
    # Not the options of a make above.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert log.read_text().count("vm") == vms, done.stdout + done.stderr
    assert (done.returncode == 0) == (status == 0)
    assert status == 0 or f"Error {status}" in done.stderr
    assert (FAILED in done.stdout) == (vms == 2)
