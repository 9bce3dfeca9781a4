# SPDX-License-Identifier: Apache-2.0
"""Compiles the BPF programs of this package with clang, when they are first needed. Takes a fraction of a second."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"
COMPILE_TIMEOUT_S: Final = 60.0
# v3 has compare-and-swap and fetch-and-add; Linux 5.12.
INSTRUCTION_SET: Final = "v3"


class CompileError(RuntimeError):
    """clang refused; the message has its output."""


class ToolMissing(CompileError):
    """There is no clang, or there are no headers."""


@functools.cache
def compile_program(name: str) -> bytes:
    """The object file of `programs/<name>.bpf.c`, once a process."""
    clang = shutil.which("clang")
    if clang is None:
        raise ToolMissing("clang: command not found")
    source = PROGRAMS / f"{name}.bpf.c"
    # asm/types.h is where the host's compiler has it, which clang does not look at for the target bpf.
    multiarch = Path("/usr/include") / (sysconfig.get_config_var("MULTIARCH") or "")
    with tempfile.TemporaryDirectory(prefix="sennit-bpf-") as folder:
        target = Path(folder) / f"{name}.o"
        command = [clang, "-target", "bpf", f"-mcpu={INSTRUCTION_SET}", "-O2", "-g", "-Wall", "-Werror"]
        command += [f"-I{multiarch}", "-c", os.fspath(source), "-o", os.fspath(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            missing = re.search(r"fatal error: '(.*)' file not found", done.stderr)
            if missing:
                raise ToolMissing(f"clang: no header {missing[1]}")
            raise CompileError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
        return target.read_bytes()
