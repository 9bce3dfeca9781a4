# SPDX-License-Identifier: Apache-2.0
"""Records a timeline of all ranks, and has rank 0 write it.

with Timeline("step.json.gz") as timeline, Pipeline(model, optimizer, loader, timeline=timeline) as pipeline:
    for loss in pipeline:
        print(float(loss))
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

import torch.distributed as dist

from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.timeline.aligned import aligned
from sennit.runtime.timeline.clocks import offset_to_first
from sennit.runtime.timeline.left import Left, remove_left, write_left
from sennit.runtime.timeline.rank_log import ROOM, ROOM_MAX, RankLog, Recording
from sennit.runtime.timeline.recorder import Recorder, TaskRecord
from sennit.runtime.timeline.spans import TimelineError
from sennit.runtime.timeline.trace_file import numbered, open_new, write
from sennit.transport.errors import ArgumentError, ConfigError


def of_this_start(path: Path) -> Path:
    """The file of this start: run.json.gz, and after a restart by torchrun run.2.json.gz, run.3.json.gz, …"""
    return numbered(path, _start())


def _start() -> int:
    return 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Timeline:
    """A context manager around steps. Every rank has one, made from the thread that takes the steps. Collective."""

    def __init__(
        self,
        path: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        room: int = ROOM,
        writes_left: bool = True,
    ) -> None:
        """`path`: of rank 0; gzip if it ends in .gz; numbered by torchrun's restarts. `room`: spans that a rank keeps,
        the last ones.

        After an error the last rank of a host that leaves writes what the ranks there have recorded, also those that
        died. With `writes_left` False it is left for `take_left`.

        Operations of all groups of backend sennit are recorded, whichever `group` the ranks are of.
        """
        if not 0 < room <= ROOM_MAX:
            raise ArgumentError(f"room for {room} spans; allowed: 1 to {ROOM_MAX:,}")
        self._unnumbered = Path(path)
        self.path = of_this_start(self._unnumbered)
        """The file. After a restart by torchrun it has a number: that of the ranks that failed is not written over."""
        self._group, self._room, self._writes_left = group, room, writes_left
        self._rank = dist.get_rank(group)
        self._recorder = Recorder()
        self._log: RankLog | None = None
        self._token, self._process = "", 0
        self._before: Any = None
        self._file: IO[bytes] | None = None
        self.is_written = False
        """Whether this rank has written the file of all ranks."""
        self.left: Left | None = None
        """What this rank has written after an error."""

    def __enter__(self) -> Self:
        """Opens the file and compares clocks. Raises `ConfigError` on all ranks if the file cannot be made."""
        told: list[tuple[str | None, str, Path]] = [(None, secrets.token_hex(8), self._unnumbered.absolute())]
        if self._rank == 0:
            try:
                self._file = open_new(self.path)
            except OSError as error:
                told[0] = f"timeline {self.path}: {error.strerror or error}", "", self.path
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        refusal, self._token, unnumbered = told[0]
        if refusal is not None:
            raise ConfigError(refusal)
        self._written = of_this_start(unnumbered)
        self._write_earlier(unnumbered)
        remove_left(self._written)
        log = RankLog.create(self._token, rank=self._rank, path=self._written, room=self._room)
        try:
            # Here all ranks have their logs.
            log.begin(offset_to_first(self._group))
            self.record_to(log)
        except BaseException:
            log.remove()
            log.close()
            self._discard()
            raise
        self._process = os.getpid()
        # Only the main thread may set handlers of signals.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gathers and writes. After an error it leaves what was recorded.

        A file that cannot be written is warned of.
        """
        if os.getpid() != self._process:  # The block of a forked child ends with the child's own error.
            return
        try:
            log = self.stop()
            if error is not None:
                self._leave(log)
                return
            try:
                found = self._gather(log)
            except BaseException:
                self._leave(log)
                raise
            log.remove()
            log.close()
            if found is not None:
                self._write(found)
        finally:
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)
                self._before = None

    def step(self, number: int) -> AbstractContextManager[None]:
        """The block is a step of this rank: from its batch to its update. `Pipeline` says so by itself."""
        return self._recorder.step(number)

    def clock(self) -> PhaseClock:
        """A clock for `ShardedEmbeddingBags` and `SlicedReplicas`, so that their phases are seen."""
        return self._recorder.clock()

    def on_task(self, record: TaskRecord) -> None:
        """Records a task. `Scheduler` calls this."""
        self._recorder.on_task(record)

    def record_to(self, log: RankLog) -> None:
        """Threads and operations of this process are recorded there from now on. `with` does it."""
        from sennit.transport import _core

        self._log = log
        self._recorder.begin(log)
        _core.operation_log_begin(log.descriptor, log.operations_at, log.room)

    def stop(self) -> RankLog:
        """Nothing is recorded from now on. Returns the log."""
        from sennit.transport import _core

        assert self._log is not None
        _core.operation_log_end()
        self._recorder.end()
        self._log.leave()
        return self._log

    def _gather(self, log: RankLog) -> list[Recording] | None:
        """What all ranks have recorded, on rank 0."""
        found: list[Any] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        mine = replace(log.read(), last=offset_to_first(self._group))
        dist.gather_object(mine, found, group=self._group, group_dst=0)
        return found

    def _write(self, found: list[Recording]) -> None:
        assert self._file is not None
        try:
            write(aligned(found), self._file, self.path)
            self.is_written = True
        except (OSError, TimelineError) as failure:
            self._discard()
            self._warn(failure)

    def _leave(self, log: RankLog) -> None:
        self._discard()
        log.close()
        if self._writes_left:
            try:
                self.left = write_left(self._written, token=self._token)
            except OSError as failure:
                self._warn(failure)

    def _write_earlier(self, unnumbered: Path) -> None:
        """Writes what ranks of this host have left of earlier starts, if none of them came to that."""
        for start in range(1, _start()):
            try:
                write_left(numbered(unnumbered, start))
            except OSError as failure:
                self._warn(failure)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leaves, and ends by the signal as without a timeline. A fork has nothing to leave."""
        del frame
        try:
            if os.getpid() == self._process and self._log is not None:
                self._log.leave()
                self._leave(self._log)
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _warn(self, failure: Exception) -> None:
        warnings.warn(f"no timeline in {self._written}: {failure}", RuntimeWarning, stacklevel=3)

    def _discard(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            Path(self._file.name).unlink()
        self._file = None
