# SPDX-License-Identifier: Apache-2.0
"""Records a timeline of all ranks, and has rank 0 write it.

with Timeline("step.json.gz") as timeline, Pipeline(model, optimizer, loader, timeline=timeline) as pipeline:
    for loss in pipeline:
        print(float(loss))
"""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch.distributed as dist

from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.timeline.clocks import Offset, offset_to_first, shift
from sennit.runtime.timeline.exposure import exposed
from sennit.runtime.timeline.recorder import ROOM, Operation, Recorder, TaskRecord, operation_spans
from sennit.runtime.timeline.spans import RankClock, Span, TimelineError, Trace
from sennit.runtime.timeline.trace_file import open_new, write
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a rank has recorded, by its own clock."""

    rank: int
    spans: list[Span]
    lost: int
    since_ns: int
    """From here on nothing was lost."""

    host: str
    first: Offset
    last: Offset


class Timeline:
    """A context manager around steps. Every rank has one, made from the thread that takes the steps. Collective."""

    def __init__(self, path: str | Path, *, group: dist.ProcessGroup | None = None, room: int = ROOM) -> None:
        """`path`: of rank 0; gzip if it ends in .gz. `room`: spans that a rank keeps, the last ones.

        Operations of all groups of backend sennit are recorded, whichever `group` the ranks are of.
        """
        self.path = Path(path)
        self._group, self._room = group, room
        self._rank = dist.get_rank(group)
        self._recorder = Recorder(room)
        self._file: IO[bytes] | None = None
        self._first = Offset(at_ns=0, offset_ns=0, uncertainty_ns=0)
        self.is_written = False
        """Whether this rank has written the file."""
        self.left: Recording | None = None
        """What this rank has recorded, where an error kept it from being gathered (`write_left`)."""

    def __enter__(self) -> Self:
        """Opens the file and compares clocks. Raises `ConfigError` on all ranks if the file cannot be made."""
        from sennit.transport import _core

        refusal: list[str | None] = [None]
        if self._rank == 0:
            try:
                self._file = open_new(self.path)
            except OSError as error:
                refusal = [f"timeline {self.path}: {error.strerror or error}"]
        dist.broadcast_object_list(refusal, group=self._group, group_src=0)
        if refusal[0] is not None:
            raise ConfigError(refusal[0])
        try:
            self._first = offset_to_first(self._group)
        except BaseException:
            self._discard()
            raise
        _core.operation_log_begin(self._room)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gathers and writes. After an error there is no file, and what was recorded is `left`.

        A file that cannot be written is warned of.
        """
        from sennit.transport import _core

        operations, lost = _core.operation_log_read()
        _core.operation_log_end()
        self.left = self._recording(operations, lost)
        if error is not None:
            self._discard()
            return
        found: list[Recording | None] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        try:
            mine = replace(self.left, last=offset_to_first(self._group))
            dist.gather_object(mine, found, group=self._group, group_dst=0)
        except BaseException:
            self._discard()
            raise
        self.left = None
        if found is None:
            return
        assert self._file is not None
        try:
            write(aligned([one for one in found if one is not None]), self._file, self.path)
            self.is_written = True
        except (OSError, TimelineError) as failure:
            self._discard()
            warnings.warn(f"no timeline in {self.path}: {failure}", RuntimeWarning, stacklevel=2)

    def step(self, number: int) -> AbstractContextManager[None]:
        """The block is a step of this rank: from its batch to its update. `Pipeline` says so by itself."""
        return self._recorder.step(number)

    def clock(self) -> PhaseClock:
        """A clock for `ShardedEmbeddingBags` and `SlicedReplicas`, so that their phases are seen."""
        return self._recorder.clock()

    def on_task(self, record: TaskRecord) -> None:
        """Of `Scheduler`."""
        self._recorder.on_task(record)

    def _recording(self, operations: Sequence[Operation], lost: int) -> Recording:
        """What there is so far, with the clock as it was compared at the begin."""
        spans, lost_here = self._recorder.spans(self._rank)
        since_ns = max(spans[0].end_ns if lost_here and spans else 0, operations[0][9] if lost and operations else 0)
        return Recording(
            rank=self._rank,
            spans=spans + operation_spans(operations, self._recorder, self._rank),
            lost=lost + lost_here,
            since_ns=since_ns,
            host=socket.gethostname(),
            first=self._first,
            last=self._first,
        )

    def _discard(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            Path(self._file.name).unlink()


def write_left(recordings: Sequence[Recording], path: Path) -> None:
    """Writes what some ranks have `left` of a timeline. Raises `OSError`, `TimelineError`. Not collective."""
    trace = aligned(recordings)
    write(trace, open_new(path), path)


def aligned(recordings: Sequence[Recording]) -> Trace:
    """All ranks on the clock of the first, from the first moment that all of them have.

    Raises `TimelineError` if there is no such moment.
    """
    shifted: list[Span] = []
    ranks = []
    since_ns = 0
    for one in recordings:
        shifted += [_moved(span, one) for span in one.spans]
        if one.lost:
            since_ns = max(since_ns, shift(one.since_ns, one.first, one.last))
        ranks.append(
            RankClock(
                rank=one.rank,
                host=one.host,
                offset_ns=(one.first.offset_ns + one.last.offset_ns) // 2,
                uncertainty_ns=max(one.first.uncertainty_ns, one.last.uncertainty_ns),
                lost=one.lost,
            )
        )
    kept = [span for span in shifted if span.start_ns >= since_ns]
    if not kept:
        raise TimelineError("the ranks have no time in common; record fewer steps, or with more room")
    zero = min(span.start_ns for span in kept)
    spans = [replace(span, start_ns=span.start_ns - zero, end_ns=span.end_ns - zero) for span in kept]
    spans.sort(key=lambda span: (span.rank, span.start_ns, -span.end_ns))
    return Trace(ranks=tuple(ranks), spans=tuple(spans + exposed(spans)))


def _moved(span: Span, of: Recording) -> Span:
    return replace(span, start_ns=shift(span.start_ns, of.first, of.last), end_ns=shift(span.end_ns, of.first, of.last))
