# SPDX-License-Identifier: Apache-2.0
"""Our patch of the User-Mode Linux kernel: registers of a traced process, with the state of any processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sennit.testbed.vm import uml_kernel

PROGRAM = Path(__file__).with_name("xstate_host.c")
COMPILE_TIMEOUT_S = 60.0
CANNOT_RUN = 77
# The value of UML on x86-64: 2,696 bytes.
FP_SIZE = 337
FAKE_CPUID = """
int fake_cpuid(unsigned leaf, unsigned number, unsigned* eax, unsigned* ebx, unsigned* ecx);
static inline int __get_cpuid_count(unsigned leaf, unsigned number, unsigned* eax, unsigned* ebx, unsigned* ecx,
                                    unsigned* edx) {
  *edx = 0;
  return fake_cpuid(leaf, number, eax, ebx, ecx);
}
"""

pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the patch is for x86"),
    pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("git") is None, reason="needs gcc and git"),
]


def build(folder: Path, *options: str) -> Path:
    """Builds the test program with the file that the patch adds to the kernel."""
    patch = uml_kernel.XSTATE_PATCH
    subprocess.run(
        ["git", "apply", "--include=*/xstate.[ch]", str(patch)],
        cwd=folder, env={**os.environ, "GIT_DIR": str(folder / "none")}, check=True, timeout=COMPILE_TIMEOUT_S,
    )  # fmt: skip
    shared = folder / "arch/x86/um/shared"
    (shared / "sysdep/ptrace_user.h").write_text(f"#define FP_SIZE {FP_SIZE}\n")
    program = folder / "xstate_host"
    command = ["gcc", "-std=gnu17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall"]
    command += ["-Wextra", "-Werror", *options, f"-I{shared}", "-o", str(program), str(PROGRAM)]
    subprocess.run(
        [*command, str(folder / "arch/x86/um/os-Linux/xstate.c")], check=True, cwd=folder, timeout=COMPILE_TIMEOUT_S
    )
    return program


@pytest.mark.parametrize("host", ["avx", "avx512", "amx", "amx_apx"])
def test_registers_come_back_on_every_kind_of_processor(tmp_path: Path, host: str) -> None:
    (tmp_path / "cpuid.h").write_text(FAKE_CPUID)
    program = build(tmp_path, "-DFAKE_HOST", f"-I{tmp_path}")
    done = subprocess.run([program, host], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_registers_come_back_on_this_processor(tmp_path: Path) -> None:
    program = build(tmp_path)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # it uses ptrace too
    done = subprocess.run(
        [program, "real"], env=environment, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode == CANNOT_RUN:
        pytest.skip("this machine has no AVX, or forbids ptrace")
    assert done.returncode == 0, done.stderr
