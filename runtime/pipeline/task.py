# SPDX-License-Identifier: Apache-2.0
"""One piece of work of a step: what it needs, where it runs, when it ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A task that has ended, for a trace. Times are of `time.monotonic_ns`."""

    name: str
    step: int
    thread: str
    inputs: tuple[tuple[str, int], ...]
    """Name and step of each task that it waited for."""

    submitted_ns: int
    start_ns: int
    """When its inputs were there, and its thread had time."""

    end_ns: int
    waiters: tuple[tuple[int, int], ...]
    """Threads that waited for it, as `threading.get_ident`, and since when."""

    error: str | None
    """The type of its error; None if it has succeeded."""


class Task:
    """A call of `function` with the results of other tasks. Threads run it; anyone may wait for its result."""

    def __init__(
        self, name: str, function: Callable[..., Any], inputs: tuple[Task, ...], *, thread: str, step: int
    ) -> None:
        self.name, self.thread, self.step = name, thread, step
        self._function: Callable[..., Any] | None = function
        self._inputs = inputs
        self._waited_for = tuple((one.name, one.step) for one in inputs)
        self._submitted_ns = time.monotonic_ns()
        self._done = threading.Event()
        self._waiters: list[tuple[int, int]] = []
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        """Waits for the task. Raises its error, or that of a task that it needed.

        It has no deadline of its own: what it calls has one, as every collective does.
        """
        if not self._done.is_set():
            self._waiters.append((threading.get_ident(), time.monotonic_ns()))
            self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def run(self, before: Callable[[Task], None] | None) -> Record:
        """Waits for the inputs and calls the function. `before` is called in between. Raises nothing."""
        start_ns = 0
        try:
            values = [one.result() for one in self._inputs]
            if before is not None:
                before(self)
            start_ns = time.monotonic_ns()
            assert self._function is not None
            self._value = self._function(*values)
        except BaseException as error:  # Any type, because whoever waits gets the error.
            self._error = error
        return self._end(start_ns)

    def fail(self, error: BaseException) -> None:
        """Ends a task that will not run."""
        self._error = error
        self._end(0)

    def _end(self, start_ns: int) -> Record:
        end_ns = time.monotonic_ns()
        # Otherwise a chain of tasks would keep all batches in memory.
        self._function, self._inputs = None, ()
        self._done.set()
        return Record(
            name=self.name,
            step=self.step,
            thread=self.thread,
            inputs=self._waited_for,
            submitted_ns=self._submitted_ns,
            start_ns=start_ns or end_ns,
            end_ns=end_ns,
            waiters=tuple(self._waiters),
            error=None if self._error is None else type(self._error).__name__,
        )
