# SPDX-License-Identifier: Apache-2.0
"""Compiles the extension `_c10d` from the installed sources, for the torch and the Python that run this.

`sennit build-extension` and the wheel `sennit-torch` (tools/torch_extension/) use it. `make build` compiles the
same sources by CMake. A C++20 compiler and Python's headers are enough.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sennit import cache
from sennit.errors import Unsupported
from sennit.runtime.backend import extension

# Half a minute on a quiet core.
COMPILE_TIMEOUT_S: Final = 1800.0
FLAGS: Final = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
LINK_FLAGS: Final = ("-shared", "-s", "-Wl,--as-needed", "-Wl,-rpath,$ORIGIN/../sennit/transport")
# An error shows this many lines of the compiler's output.
LINES_SHOWN: Final = 20


def provide(say: Callable[[str], None] = lambda text: None) -> Path:
    """Returns the extension for this torch, compiling it into the cache if it is not there. `say` hears what is done.

    Raises Unsupported if torch, a compiler or headers are missing, or if the sources do not compile with this torch.
    """
    torch = _torch_version()
    key = extension.cache_key(torch)
    if key is None:
        raise Unsupported("sources", "the extension's sources are not installed; install the wheel of sennit again")
    compiler()  # Before anything is said.

    def make(folder: Path) -> None:
        say(f"compiling the extension for torch {torch}: about half a minute")
        compile_into(folder)

    entry = cache.provide(key, make, lambda: say("another process compiles it: waiting"))
    (path,) = entry.glob("_c10d.*.so")
    return path


def compile_into(folder: Path) -> Path:
    """Compiles the extension into a folder, with a record of the torch that it fits. Raises Unsupported."""
    from torch.utils import cpp_extension

    from sennit.transport import tracepoints

    sources = extension.sources()
    if sources is None:
        raise Unsupported("sources", "the extension's sources are not installed; install the wheel of sennit again")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise Unsupported("headers", f"{headers}/Python.h is missing; install Python's headers (Debian: python3-dev)")
    compiled, output = folder / "unit.o", folder / f"_c10d{extension.SUFFIX}"
    includes = [f"-I{path}" for path in (sources, headers)]
    for path in cpp_extension.include_paths():
        includes += ["-isystem", str(path)]
    # In two steps, because ccache does not know a compilation that links, too.
    _run([*compiler(), *FLAGS, *includes, "-c", str(sources / "unit.cpp"), "-o", str(compiled)])
    torch_folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = [str(tracepoints.library()), *torch_folders, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    _run([*compiler(), *LINK_FLAGS, str(compiled), *libraries, "-o", str(output)])
    compiled.unlink()
    record = {"torch": _torch_version(), "compiler": compiler()[-1]}
    (folder / extension.RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unsupported("compiler", f"{command[0]} took more than {COMPILE_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        shown = "\n".join(done.stderr.splitlines()[:LINES_SHOWN])
        raise Unsupported("compiler", f"{command[0]} fails on the extension for torch {_torch_version()}:\n{shown}")


def compiler() -> list[str]:
    """The compiler of the variable CXX, else `c++`, `g++` or `clang++`, whichever is there. Raises Unsupported."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and shutil.which(asked[0]):
        return asked
    for name in () if asked else ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    what = f"CXX is {asked[0]}, which is not found" if asked else "no C++ compiler is found"
    raise Unsupported("compiler", f"{what}; install g++, or set CXX to a compiler of C++20")


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
