# SPDX-License-Identifier: Apache-2.0
"""Runs the tasks of steps on a few named threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from sennit.closing import Closing
from sennit.runtime.pipeline.task import Record, Task
from sennit.thread_names import name_thread
from sennit.transport.errors import SennitError

MAIN: Final = "main"
"""The thread that submits tasks. It runs its own at once."""


class Stopped(SennitError):
    """A task was not run, because its scheduler was closed."""


class Scheduler(Closing):
    """Each thread runs its tasks in the order in which they were submitted, each one when its inputs are done.

    So a thread that alone uses a group of ranks makes the same calls in the same order on all of them, whatever else
    goes on. Tasks are submitted from one thread, inputs first: nothing can wait for itself.
    """

    def __init__(
        self, *, before: Callable[[Task], None] | None = None, on_task: Callable[[Record], None] | None = None
    ) -> None:
        """Calls `before` ahead of each task, when its inputs are there, and `on_task` after it, in its thread."""
        self._before, self._on_task = before, on_task
        self._queues: dict[str, queue.SimpleQueue[Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, name: str, function: Callable[..., Any], *inputs: Task, thread: str, step: int) -> Task:
        """Calls `function` with the results of `inputs` in a thread. It is not called if one of them fails."""
        task = Task(name, function, inputs, thread=thread, step=step)
        if thread == MAIN:
            self._run(task)
        else:
            self._queue_of(thread).put(task)
        return task

    def run(self, name: str, function: Callable[..., Any], *inputs: Task, step: int) -> Any:
        """Calls `function` here, and returns or raises what it does."""
        return self.submit(name, function, *inputs, thread=MAIN, step=step).result()

    def close(self) -> None:
        """Waits for the tasks that run. Those that have not begun fail with `Stopped`."""
        self._is_closed = True
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _queue_of(self, thread: str) -> queue.SimpleQueue[Task | None]:
        if self._is_closed:
            raise Stopped("a task for a scheduler that was closed")
        if thread not in self._queues:
            self._queues[thread] = queue.SimpleQueue()
            # A daemon, because a program that ends without `close` shall not wait for peers. Threads of
            # `concurrent.futures` are joined at exit.
            runner = threading.Thread(target=self._serve, args=(self._queues[thread],), name=f"sennit-{thread}")
            runner.daemon = True
            self._threads.append(runner)
            runner.start()
        return self._queues[thread]

    def _serve(self, waiting: queue.SimpleQueue[Task | None]) -> None:
        name_thread(threading.current_thread().name)
        while (task := waiting.get()) is not None:
            if self._is_closed:
                task.fail(Stopped(f"{task.name} of step {task.step} was not begun"))
            else:
                self._run(task)
            del task  # The next one may be long in coming.

    def _run(self, task: Task) -> None:
        record = task.run(self._before)
        if self._on_task is not None:
            self._on_task(record)
