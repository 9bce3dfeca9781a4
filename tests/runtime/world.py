# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr"
"""Worlds: groups of processes that run one function on every rank.

Importing torch takes a second or more, so ranks are forked from one process that has imported it, and a world serves
many tests of a module. A world in which anything failed is thrown away, and so is one that a call did not return from.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tests.ranks import importable, start

START_S = 60.0
ANSWER_S = 60.0

OLD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}

P = ParamSpec("P")
T = TypeVar("T")


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
        # torch reads its own variables when it is imported.
        own_interpreter = not all(name.startswith("SENNIT_") for name in environment or {})
        self._ranks: list[BaseProcess] = []
        self._ends: list[Connection] = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            serves = functools.partial(serve, rank, size, self.store, backend, timeout_s)
            self._ranks.append(start(serves, environment=variables, own_interpreter=own_interpreter, pipe=theirs))
            theirs.close()
            self._ends.append(ours)
        self._call(None, START_S)

    def run(self, function: Callable[Concatenate[int, int, P], T], /, *arguments: P.args, **named: P.kwargs) -> list[T]:
        """Returns what `function(rank, world, **named)` returned on every rank; of a rank that died, None.

        Arguments and results are pickled. Raises RankError if it raised anywhere, or took longer than ANSWER_S.
        """
        return self.run_within(ANSWER_S, function, *arguments, **named)

    def run_within(
        self,
        timeout_s: float,
        function: Callable[Concatenate[int, int, P], T],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[T]:
        """Like `run`, with another limit in place of ANSWER_S."""
        return self._call(pickle.dumps((importable(function), arguments, named)), timeout_s)

    def _call(self, request: bytes | None, timeout_s: float) -> list[Any]:
        """Sends the request, if there is one, and collects one answer of every rank."""
        try:
            if request is not None:
                for process, end in zip(self._ranks, self._ends, strict=True):
                    if process.is_alive():
                        end.send_bytes(request)
            return self._answers(timeout_s)
        except BaseException:
            # The timeout of a test, too, may come at any point here. The next call would read the answers of this one.
            self.close()
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        answers: list[tuple[str | None, Any]] = [(None, None)] * self.size
        waiting = {end: rank for rank, end in enumerate(self._ends)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(deadline_s - time.monotonic(), 0))
            if not ready:
                raise RankError({rank: f"no answer within {timeout_s:g} s" for rank in waiting.values()})
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answers[rank] = pickle.loads(end.recv_bytes())
        errors = {rank: error for rank, (error, _) in enumerate(answers) if error is not None}
        if errors:
            raise RankError(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        """Kills the processes, even if they are busy. A world that is closed stays so."""
        if not self.alive:
            return
        self.alive = False
        for process, end in zip(self._ranks, self._ends, strict=True):
            process.kill()
            process.join()
            process.close()
            end.close()
        self._folder.cleanup()


WorldFactory = Callable[..., World]


def serve(rank: int, world: int, store: str, backend: str, timeout_s: float, requests: Connection) -> None:
    """A rank: answers requests until the World closes its end."""
    import torch
    import torch.distributed as dist

    import sennit  # noqa: F401  the backend, in a checkout without entry points too

    # The names of torch 2.11.
    for name, old in OLD_NAMES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, old))
    # All output goes to standard error.
    os.dup2(2, 1)
    warnings.simplefilter("error")
    # torch always warns about its own complex32.
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if backend:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
    requests.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            request = requests.recv_bytes()
        except EOFError:
            break
        try:
            function, arguments, named = pickle.loads(request)
            answer = pickle.dumps((None, function(rank, world, *arguments, **named)))
        except BaseException:
            answer = pickle.dumps((traceback.format_exc(), None))
        requests.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def raised(call: Any, *arguments: Any, **options: Any) -> str:
    """Returns the class and text of the error that `call` raises, or its work; empty if there is none."""
    try:
        result = call(*arguments, **options)
        if result is not None and hasattr(result, "wait"):
            result.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
