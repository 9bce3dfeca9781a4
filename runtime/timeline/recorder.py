# SPDX-License-Identifier: Apache-2.0
"""Tells a log what the threads of this rank do. A span costs a microsecond or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.timeline.rank_log import KINDS, RankLog
from sennit.runtime.timeline.spans import MAIN, PHASE, STEP, TASK, WAIT

_STEP, _PHASE, _TASK, _WAIT = (KINDS.index(kind) for kind in (STEP, PHASE, TASK, WAIT))
NO_STEP: Final = -1


class TaskRecord(Protocol):
    """What a scheduler tells of a task that has ended (`pipeline.task.Record`)."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def thread(self) -> str: ...
    @property
    def submitted_ns(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def waiters(self) -> tuple[tuple[int, int], ...]: ...


Begun = tuple[RankLog, int, int, int, str, int, int]
"""A span that goes on: its log and number there, thread, kind, name, begin and step."""


class Recorder:
    """What threads of this rank do, by `time.monotonic_ns`. The thread that makes it takes the steps."""

    def __init__(self) -> None:
        self._log: RankLog | None = None
        # The kernel's number of each thread, which operations have, and its name; by Python's number of it.
        self._threads: dict[int, tuple[int, str]] = {}
        self._here = threading.local()
        self._meet(MAIN)

    def begin(self, log: RankLog) -> None:
        """Records to this log from now on."""
        for thread, name in self._threads.values():
            log.name_thread(thread, name)
        self._log = log

    def end(self) -> None:
        """Records nothing from now on. Spans that go on end in the log that they began in."""
        self._log = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is one step of this rank."""
        begun = self._begin(_STEP, f"step {number}", number)
        try:
            yield
        finally:
            self.end_span(begun)

    def begin_phase(self, name: str) -> Begun | None:
        """A phase of the thread that calls this begins. None: nothing is recorded."""
        return self._begin(_PHASE, name, NO_STEP)

    def end_span(self, begun: Begun | None) -> None:
        """What `begin_phase` returned ends."""
        if begun is None:
            return
        end_ns = time.monotonic_ns()
        log, number, thread, kind, name, start_ns, step = begun
        if not log.end(number, end_ns):
            log.note(thread, kind, name, start_ns, end_ns, step, 0, 0)

    def on_task(self, record: TaskRecord) -> None:
        """A task has ended, in the thread that calls this."""
        log = self._log
        if log is None:
            return
        thread, name = self._threads[threading.get_ident()] if self._is_known() else self._meet(record.thread)
        if name not in (record.thread, MAIN):
            thread, _ = self._meet(record.thread)
        queued_ns = record.start_ns - record.submitted_ns
        log.note(thread, _TASK, record.name, record.start_ns, record.end_ns, record.step, queued_ns, 0)
        for waiter, since_ns in record.waiters:
            waiting = self._number_of(waiter)
            log.note(waiting, _WAIT, f"wait for {record.name}", since_ns, record.end_ns, NO_STEP, 0, thread)

    def clock(self) -> PhaseClock:
        """A clock of phases whose phases are recorded here."""
        return _RecordedPhases(self)

    def _begin(self, kind: int, name: str, step: int) -> Begun | None:
        log = self._log
        if log is None:
            return None
        if not self._is_known():
            self._meet(threading.current_thread().name)
        thread, start_ns = self._here.number, time.monotonic_ns()
        return log, log.note(thread, kind, name, start_ns, 0, step, 0, 0), thread, kind, name, start_ns, step

    def _is_known(self) -> bool:
        # Python gives the number of a thread that has ended to a new one, but not its local variables.
        return hasattr(self._here, "number")

    def _meet(self, name: str) -> tuple[int, str]:
        """Notes the thread that calls this."""
        self._here.number = threading.get_native_id()
        found = self._threads[threading.get_ident()] = (self._here.number, name)
        if self._log is not None:
            self._log.name_thread(*found)
        return found

    def _number_of(self, thread: int) -> int:
        """The kernel's number of a thread, by Python's. 0: it has ended, and was never seen."""
        if thread not in self._threads:
            for one in threading.enumerate():
                if one.ident == thread and one.native_id is not None:
                    self._threads[thread] = (one.native_id, one.name)
                    if self._log is not None:
                        self._log.name_thread(one.native_id, one.name)
        return self._threads.get(thread, (0, ""))[0]


class _RecordedPhases(PhaseClock):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @contextmanager
    def phase(self, name: str, *, is_whole: bool = False) -> Iterator[None]:
        begun = self._recorder.begin_phase(name)
        try:
            with super().phase(name, is_whole=is_whole):
                yield
        finally:
            self._recorder.end_span(begun)
