# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of tests: each runs a function that the test hands over.

A test gives a *call*: a function of a module, or a `functools.partial` of one. The call travels by pickle, which sends
the arguments, and of the function its name and that of its module. The process imports this module.

How it finds the module: pytest runs with `--import-mode=importlib`, and calls `tests/runtime/test_slices.py`
`tests.runtime.test_slices`, wherever it was started. Other packages are called `tests`, too, and one with an
`__init__.py` would win. So a process first makes `tests` the name of this folder. The files in it are then found as
usual, and have the names that pytest gives them.

A process imports the test file whose function it runs, with all that the file imports. The fork server already has
pytest, torch and the core (`FORKED_HAVE` in conftest.py). What takes long beside them is imported in the functions that
need it.

There are four ways to a process:

- `start` forks it from the server. Or it gives it an interpreter of its own: for what happens when an interpreter ends,
  and for variables that libraries read when they are imported.
- `command` is a command line, for `unshare`, network namespaces and virtual machines.
- `runtime/world.py` keeps a group of ranks, which run one function after the other.
- `forked_commands.py` runs `sennit` as a command in a fork.

Some processes are not started here: other uses of `sennit`, torchrun, programs that stand in their place, and programs
that are text (`python -c`). They show what a user's program does from its first line to its last, or need nothing of a
test file and begin sooner without it.
"""

from __future__ import annotations

import base64
import functools
import gc
import multiprocessing
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

HERE = Path(__file__).resolve()
FORKSERVER = multiprocessing.get_context("forkserver")
SPAWN = multiprocessing.get_context("spawn")
Call = TypeVar("Call", bound=Callable[..., object])


def start(
    call: Callable[..., object],
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    own_interpreter: bool = False,
    pipe: Connection | None = None,
) -> BaseProcess:
    """Returns the process once it runs. It ends with status 0, or with 1 and a traceback if `call` raises.

    `environment`: all its variables; by default those of this process. `log`: the file to which its standard error is
    appended. `own_interpreter`: no fork; a fork ends without its destructors. `pipe`: becomes the argument of `call`.
    """
    if log is not None:
        log.touch()
    given = (pickle.dumps(importable(call)), dict(os.environ if environment is None else environment), log, pipe)
    context = SPAWN if own_interpreter else FORKSERVER
    # By its path: `tests` is this folder only once this file has run.
    process = context.Process(target=runpy.run_path, args=(str(HERE), {"GIVEN": given}, "__main__"))
    process.start()
    return process


def command(call: Callable[..., object]) -> list[str]:
    """A command line that runs `call` in a new interpreter, with the environment and streams that it is given."""
    # -P: the folder of this file is no place to import from.
    return [sys.executable, "-P", str(HERE), name_of(call), base64.b64encode(pickle.dumps(importable(call))).decode()]


def importable(call: Call) -> Call:
    """The same, unless its function has no name in a module: then TypeError."""
    name = name_of(call)
    if "<" in name:
        raise TypeError(
            f"{name} is a lambda, or inside a function: no other process can import it; allowed: functions of a module"
        )
    return call


def name_of(call: Callable[..., object]) -> str:
    function: Any = call
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}.{function.__qualname__}"


def _begin(call: bytes, environment: Mapping[str, str], log: Path | None, pipe: Connection | None) -> None:
    gc.freeze()  # as a rank of `sennit train` does: what the server imported stays
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 2)
    _run(call, *([] if pipe is None else [pipe]))


def _run(call: bytes, *arguments: object) -> None:
    tests = ModuleType("tests")
    tests.__path__ = [str(HERE.parent)]
    sys.modules["tests"] = tests
    pickle.loads(call)(*arguments)


if __name__ == "__main__":
    if "GIVEN" in globals():  # From `start`, through runpy.
        _begin(*globals()["GIVEN"])
    else:  # From `command`.
        _run(base64.b64decode(sys.argv[2]))
