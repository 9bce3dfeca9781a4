# SPDX-License-Identifier: Apache-2.0
"""Records one rank's spans. A span costs about a microsecond, and the oldest go when there is no room left."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.timeline.spans import COLLECTIVE, MAIN, PHASE, STEP, TASK, WAIT, Span

ROOM: Final = 100_000

Operation = tuple[str, int, str, int, int, int, int, int, int, int, int, int]
"""Of `operation_log_read`."""
"""Spans of a rank, and as many collectives: some thousand steps, and 30 MB."""


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


class Recorder:
    """What threads of this rank did, by `time.monotonic_ns`. The thread that makes it takes the steps."""

    def __init__(self, room: int = ROOM) -> None:
        self._main = threading.get_ident()
        # Threads by Python's number of them: the kernel's, which operations have, and a name.
        self._threads = {self._main: (threading.get_native_id(), MAIN)}
        # Thread, kind, name, begin, end, step, time in the queue, the thread whose task was waited for. The garbage
        # collector forgets tuples of numbers and texts.
        self._noted: deque[tuple[int, str, str, int, int, int, int, str]] = deque(maxlen=room)
        self._counter = itertools.count()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is one step of this rank."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._note(self._main, STEP, f"step {number}", start_ns, time.monotonic_ns(), step=number)

    def on_phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """A phase of the thread that calls this has ended."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = (threading.get_native_id(), threading.current_thread().name)
        self._note(thread, PHASE, name, start_ns, end_ns)

    def on_task(self, record: TaskRecord) -> None:
        """A task has ended, in the thread that calls this."""
        thread = threading.get_ident()
        if self._threads.get(thread, (0, ""))[1] != record.thread and thread != self._main:
            self._threads[thread] = (threading.get_native_id(), record.thread)
        queued_ns = record.start_ns - record.submitted_ns
        self._note(thread, TASK, record.name, record.start_ns, record.end_ns, step=record.step, queued_ns=queued_ns)
        for waiter, since_ns in record.waiters:
            self._note(waiter, WAIT, f"wait for {record.name}", since_ns, record.end_ns, of=record.thread)

    def clock(self) -> PhaseClock:
        """A clock of phases whose phases are recorded here."""
        return _RecordedPhases(self)

    def spans(self, rank: int) -> tuple[list[Span], int]:
        """What was recorded of threads, and how much was lost."""
        noted = list(self._noted)
        found = [
            Span(
                rank=rank,
                track=self._threads[thread][1] if thread in self._threads else f"thread {thread}",
                kind=kind,
                name=name,
                start_ns=start_ns,
                end_ns=end_ns,
                facts=_facts(kind, step, queued_ns, of),
            )
            for thread, kind, name, start_ns, end_ns, step, queued_ns, of in noted
            if start_ns <= end_ns
        ]
        return found, next(self._counter) - len(noted)

    def track_of(self, native_id: int) -> str:
        """The track of a thread, by the kernel's number of it."""
        names = {native: name for native, name in self._threads.values()}
        return names.get(native_id, f"thread {native_id}")

    def _note(
        self,
        thread: int,
        kind: str,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        step: int = -1,
        queued_ns: int = 0,
        of: str = "",
    ) -> None:
        next(self._counter)
        self._noted.append((thread, kind, name, start_ns, end_ns, step, queued_ns, of))


def _facts(kind: str, step: int, queued_ns: int, of: str) -> dict[str, int | str]:
    if kind == STEP:
        return {"step": step}
    if kind == TASK:
        return {"step": step, "queued_ns": queued_ns}
    return {"thread": of} if kind == WAIT else {}


class _RecordedPhases(PhaseClock):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @contextmanager
    def phase(self, name: str, *, is_whole: bool = False) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            with super().phase(name, is_whole=is_whole):
                yield
        finally:
            self._recorder.on_phase(name, start_ns, time.monotonic_ns())


def operation_spans(
    operations: Sequence[Operation],
    recorder: Recorder,
    rank: int,
) -> list[Span]:
    """Collectives and the waits for them, from what `operation_log_read` returns."""
    found = []
    for group, sequence, plan, sent, received, status, posted, returned, wait, end, poster, waiter in operations:
        name = plan or "operation"
        facts: dict[str, int | str] = {"group": group, "sequence": sequence}
        found.append(
            Span(
                rank=rank,
                track=recorder.track_of(poster),
                kind=COLLECTIVE,
                name=name,
                start_ns=posted,
                end_ns=end,
                facts=facts | {"sent_bytes": sent, "received_bytes": received, "status": status},
            )
        )
        # What ends within the call that posts it was waited for there.
        since = wait or (posted if end <= returned else 0)
        if 0 < since < end:
            track = recorder.track_of(waiter if wait else poster)
            found.append(
                Span(
                    rank=rank, track=track, kind=WAIT, name=f"wait for {name}", start_ns=since, end_ns=end, facts=facts
                )
            )
    return found
