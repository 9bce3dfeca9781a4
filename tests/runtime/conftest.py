# SPDX-License-Identifier: Apache-2.0
"""Worlds: groups of processes that run one function on every rank.

Starting torch takes seconds, so a world is kept for the session and serves many tests. A world in which anything
failed is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
START_S = 60.0


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
        self._ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "world_worker.py"),
                    str(rank),
                    str(size),
                    self.store,
                    backend,
                    str(timeout_s),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=variables,
            )
            for rank in range(size)
        ]
        self._buffers = [b""] * size
        self._collect(START_S)

    def run(self, file: str, function: str, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Returns what `function(rank, world, **arguments)` of `file` (in this folder) returned on every rank."""
        request = json.dumps({"file": str(HERE / file), "function": function, "arguments": arguments})
        for process in self._ranks:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        """Collects one answer of every rank. The answer of a rank that died is None."""
        deadline_s = time.monotonic() + timeout_s
        lines: list[bytes | None] = [None] * self.size
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._ranks):
                selector.register(process.stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
            while selector.get_map():
                ready = selector.select(max(deadline_s - time.monotonic(), 0))
                if not ready:
                    missing = [rank for rank, line in enumerate(lines) if line is None]
                    self.close()
                    raise RankError({rank: f"no answer within {timeout_s:g} s" for rank in missing})
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 20)
                    self._buffers[key.data] += data
                    line, found, rest = self._buffers[key.data].partition(b"\n")
                    if found:
                        lines[key.data], self._buffers[key.data] = line, rest
                    if found or not data:
                        selector.unregister(key.fileobj)
        answers = [json.loads(line) if line is not None else {"value": None} for line in lines]
        errors = {rank: str(answer["error"]) for rank, answer in enumerate(answers) if "error" in answer}
        if errors:
            self.close()
            raise RankError(errors)
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        """Kills the processes, even if they are busy."""
        self.alive = False
        for process in self._ranks:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # The process did not read its last request.
                process.stdin.close()
            process.stdout.close()
        self._folder.cleanup()


WorldFactory = Callable[..., World]


@pytest.fixture(scope="module")
def kept_world() -> Iterator[WorldFactory]:
    """`kept_world(size, transport)`: a world that other tests of the session also use."""
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
