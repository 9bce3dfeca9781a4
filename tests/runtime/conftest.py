# SPDX-License-Identifier: Apache-2.0
"""Worlds: groups of processes that run one function on every rank.

Importing torch takes a second or more, so ranks are forked from one process that has imported it, and a world serves
many tests of a module. A world in which anything failed is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORKER = str(HERE / "world_worker.py")
START_S = 60.0
FORKSERVER = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A function failed on a rank; `errors` has each failed rank's traceback."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in errors.items()))
        self.errors = errors


class World:
    """`size` processes in one process group over sennit (`backend` empty: no group)."""

    def __init__(
        self,
        size: int,
        *,
        backend: str = "sennit",
        environment: dict[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.size = size
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="sennit-test-")
        self.store = str(Path(self._folder.name) / "store")
        variables = {**os.environ, "SENNIT_INTERFACES": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
        # torch reads its own variables when it is imported, so they need a new interpreter.
        is_forked = all(name.startswith("SENNIT_") for name in environment or {})
        context = FORKSERVER if is_forked else multiprocessing.get_context("spawn")
        self._ranks: list[BaseProcess] = []
        self._ends: list[Connection] = []
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            for rank in range(size):
                ours, theirs = context.Pipe()
                # A path, because other packages have modules called `tests`, too.
                given = {"ARGUMENTS": (theirs, variables, rank, size, self.store, backend, timeout_s)}
                process = context.Process(target=runpy.run_path, args=(WORKER, given, "__main__"))
                process.start()
                theirs.close()
                self._ranks.append(process)
                self._ends.append(ours)
        self._collect(START_S)

    def run(self, file: str, function: str, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Returns what `function(rank, world, **arguments)` of `file` (in this folder) returned on every rank."""
        request = json.dumps({"file": str(HERE / file), "function": function, "arguments": arguments})
        for process, end in zip(self._ranks, self._ends, strict=True):
            if process.is_alive():
                end.send_bytes(request.encode())
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        """Collects one answer of every rank. The answer of a rank that died is None."""
        deadline_s = time.monotonic() + timeout_s
        lines: list[bytes | None] = [None] * self.size
        waiting = {end: rank for rank, end in enumerate(self._ends)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(deadline_s - time.monotonic(), 0))
            if not ready:
                self.close()
                raise RankError({rank: f"no answer within {timeout_s:g} s" for rank in waiting.values()})
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    lines[rank] = end.recv_bytes()
        answers = [json.loads(line) if line is not None else {"value": None} for line in lines]
        errors = {rank: str(answer["error"]) for rank, answer in enumerate(answers) if "error" in answer}
        if errors:
            self.close()
            raise RankError(errors)
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        """Kills the processes, even if they are busy."""
        self.alive = False
        for process, end in zip(self._ranks, self._ends, strict=True):
            process.kill()
            process.join()
            process.close()
            end.close()
        self._folder.cleanup()


WorldFactory = Callable[..., World]


@pytest.fixture(scope="module")
def kept_world() -> Iterator[WorldFactory]:
    """`kept_world(size, transport)`: a world that other tests of the module also use."""
    kept: dict[tuple[int, str], World] = {}

    def get(size: int, transport: str = "shm") -> World:
        world = kept.get((size, transport))
        if world is None or not world.alive:
            world = kept[size, transport] = World(size, environment={"SENNIT_TRANSPORT": transport})
        return world

    yield get
    for world in kept.values():
        if world.alive:
            world.close()


@pytest.fixture
def new_world() -> Iterator[WorldFactory]:
    """`new_world(size, ...)`: a world for this test alone, which may break it."""
    made: list[World] = []

    def make(size: int, **options: Any) -> World:
        made.append(World(size, **options))
        return made[-1]

    yield make
    for world in made:
        if world.alive:
            world.close()


@pytest.fixture
def port() -> int:
    """Returns the first of four free ports, below those that the kernel gives to others.

    The search begins anywhere: two runs of a test on one machine would find the same ones before they use them.
    """
    for first in random.SystemRandom().sample(range(20_000, 32_000, 4), 3_000):
        with contextlib.ExitStack() as stack:
            try:
                for place in range(first, first + 4):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", place))
            except OSError:
                continue
            return first
    raise AssertionError("no four free ports")
