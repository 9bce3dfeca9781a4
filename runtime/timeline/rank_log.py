# SPDX-License-Identifier: Apache-2.0
"""What one rank records, in a file of /dev/shm that outlives its process: other processes read it after a kill.

Threads of this rank write spans with `RankLog.note`, the native core writes operations (executor/operation_log.hpp).
Both are rings of records of one size. A record's number is written last, so one that a kill has cut in two is not
there. While the rank records it holds a lock of the file, which ends with its process. Nothing is a call of the kernel
for each span.

The file: a header, a table of threads, the ring of spans, the ring of operations. Each begins on a page.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import socket
import stat
import struct
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sennit.runtime.timeline.clocks import Offset
from sennit.runtime.timeline.spans import COLLECTIVE, PHASE, STEP, TASK, WAIT, Span, TimelineError

FOLDER: Final = Path("/dev/shm")
PREFIX: Final = "sennit.timeline-"

ROOM: Final = 100_000
"""Spans of a rank, and as many collectives: some thousand steps, and 27 MB."""
ROOM_MAX: Final = 10_000_000

MAGIC: Final = b"sennit rank log 1"
# magic, rank, room, when the rank left (0: it did not), its first offset (when, offset, uncertainty), host, path
HEADER: Final = struct.Struct("=24sIIQqqq256s4096s")
_LEFT: Final = struct.Struct("=Q")
_LEFT_AT: Final = struct.calcsize("=24sII")
_FIRST: Final = struct.Struct("=qqq")
_FIRST_AT: Final = struct.calcsize("=24sIIQ")

# The kernel's number of a thread, and its name.
THREAD: Final = struct.Struct("=I60s")
THREADS_MAX: Final = 128

# begin, end (0: it goes on), step, time in the queue, thread, the thread that a wait is for, kind, name, number
SPAN: Final = struct.Struct("=QQqqIIB47sQ")
_END: Final = struct.Struct("=Q")
_END_AT: Final = 8
_NUMBER_AT: Final = SPAN.size - 8
KINDS: Final = (STEP, PHASE, TASK, WAIT)

# number, sequence, bytes sent and received, posted, returned, wait, end, status, threads that posted and waited, plan,
# group
OPERATION: Final = struct.Struct("=QQQQQQQQiII4x40s48s")

# Bytes of the file that are locked: by the rank as long as it records, and by who writes what ranks have left.
_RECORDS, _WRITES = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a rank has recorded, by its own clock."""

    rank: int
    spans: list[Span]
    lost: int
    since_ns: int
    """The time from which on no span was lost."""

    host: str
    first: Offset
    last: Offset
    has_died: bool = False
    """Whether the rank's process ended inside the block, as after a kill."""


class RankLog:
    """The file of one rank. The functions that write are the recording rank's, those that lock and read anybody's."""

    def __init__(self, descriptor: int, room: int, file: Path | None, flags: int = 0) -> None:
        """Maps a file that is complete and open. `file` None: it has no name, and its memory ends with the process."""
        self.descriptor, self.room, self.file = descriptor, room, file
        self.spans_at, self.operations_at, size = _layout(room)
        self._memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | flags)
        self._numbers = itertools.count(1)
        self._newest = 0
        self._thread_count = 0

    def close(self) -> None:
        """Closes the file, and so gives up its locks. The memory goes with the last thread that uses it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @classmethod
    def create(cls, token: str, *, rank: int, path: Path, room: int) -> Self:
        """The log of this rank, with a lock on it. `token`: of all logs of this timeline. `path`: the timeline's.

        Without room in /dev/shm it gets memory that ends with the process, and a warning.
        """
        size = _layout(room)[2]
        file: Path | None = FOLDER / f"{PREFIX}{token}-{rank}"
        try:
            descriptor = _reserved(os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), size)
        except OSError as error:
            warnings.warn(
                f"{FOLDER}: {error.strerror}, for {size >> 20} MiB of a timeline: what rank {rank} records is lost if "
                "it dies. A larger /dev/shm (docker run --shm-size=1g) avoids this",
                RuntimeWarning,
                stacklevel=2,
            )
            descriptor, file = _reserved(os.memfd_create("sennit timeline", os.MFD_CLOEXEC), size), None
        host = socket.gethostname().encode()
        os.pwrite(descriptor, HEADER.pack(MAGIC, rank, room, 0, 0, 0, 0, host, os.fsencode(path)), 0)
        # Finding a page at the first span in it would take longer than the span.
        log = cls(descriptor, room, file, mmap.MAP_POPULATE)
        if file is not None:
            # It has its name when it is complete and locked.
            log._lock(_RECORDS)
            # (With a folder Python calls linkat, which follows the link, and without one link, which does not.)
            os.link(f"/proc/self/fd/{descriptor}", file, src_dir_fd=descriptor, follow_symlinks=True)
        return log

    @classmethod
    def open(cls, file: Path) -> Self:
        """Opens the log of a rank of this user. Raises OSError, and `TimelineError` for what is none.

        Not one that this process records: closing it would give up the lock.
        """
        # O_NONBLOCK: a FIFO would block.
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise TimelineError(f"{file} is no log of a rank: another user's, or no ordinary file")
            header = os.pread(descriptor, HEADER.size, 0)
            room = HEADER.unpack(header)[2] if len(header) == HEADER.size else 0
            if not header.startswith(MAGIC + b"\0") or not 0 < room <= ROOM_MAX or found.st_size != _layout(room)[2]:
                raise TimelineError(f"{file} is no log of a rank, or of another version of sennit")
            return cls(descriptor, room, file)
        except BaseException:
            os.close(descriptor)
            raise

    # Writing.

    def begin(self, first: Offset) -> None:
        """Notes how far this rank's clock is from that of the first rank."""
        _FIRST.pack_into(self._memory, _FIRST_AT, first.at_ns, first.offset_ns, first.uncertainty_ns)

    def name_thread(self, thread: int, name: str) -> None:
        """`thread`: the kernel's number of it. Later names count. Threads beyond `THREADS_MAX` have numbers alone."""
        if self._thread_count < THREADS_MAX:
            THREAD.pack_into(self._memory, _page(HEADER.size) + self._thread_count * THREAD.size, thread, name.encode())
            self._thread_count += 1

    def note(
        self, thread: int, kind: int, name: str, start_ns: int, end_ns: int, step: int, queued_ns: int, of: int
    ) -> int:
        """Writes a span and returns its number, for `end` if it goes on (`end_ns` 0). `kind`: of `KINDS`."""
        number = next(self._numbers)
        self._newest = number
        at = self.spans_at + (number - 1) % self.room * SPAN.size
        if number > self.room:  # The old number must not stand below half of the new span.
            _END.pack_into(self._memory, at + _NUMBER_AT, 0)
        SPAN.pack_into(
            self._memory, at, start_ns, end_ns, step, queued_ns, thread, of, kind, name.encode(), number
        )  # fmt: skip
        return number

    def end(self, number: int, end_ns: int) -> bool:
        """Notes the end of a span. False if its place in the ring has become another one's."""
        if self._newest - number >= self.room:
            return False
        _END.pack_into(self._memory, self.spans_at + (number - 1) % self.room * SPAN.size + _END_AT, end_ns)
        return True

    def leave(self) -> None:
        """Notes when the rank left, the first time."""
        if not self.left_ns:
            _LEFT.pack_into(self._memory, _LEFT_AT, time.monotonic_ns())

    def remove(self) -> None:
        """Removes the file's name. The file lives on while it is mapped."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    # Reading.

    @property
    def left_ns(self) -> int:
        """When the rank left; 0: it has not."""
        found: int = _LEFT.unpack_from(self._memory, _LEFT_AT)[0]
        return found

    @property
    def path(self) -> Path:
        """The path of the timeline."""
        return Path(os.fsdecode(HEADER.unpack_from(self._memory)[-1].rstrip(b"\0")))

    @property
    def token(self) -> str:
        """What the logs of this timeline have in common."""
        return "" if self.file is None else self.file.name.removeprefix(PREFIX).rpartition("-")[0]

    @property
    def rank(self) -> int:
        found: int = HEADER.unpack_from(self._memory)[1]
        return found

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name."""
        return os.fstat(self.descriptor).st_nlink > 0

    def is_free(self) -> bool:
        """Whether its rank has closed it, or died. Then this process holds the lock, until it closes the file."""
        return self._lock(_RECORDS)

    def take(self) -> bool:
        """Whether this process is now the one that may read and remove it, until it closes the file."""
        return self._lock(_WRITES)

    def _lock(self, byte: int) -> bool:
        # Not flock: forks, such as workers of a loader, would hold it after the rank's death.
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def read(self) -> Recording:
        """What the rank has recorded. Spans that had not ended then end with it, and their names say so."""
        _, rank, _, left_ns, *first, host, _ = HEADER.unpack_from(self._memory)
        names = self._thread_names()
        spans, span_count = self._records(SPAN, self.spans_at, -1)
        operations, operation_count = self._records(OPERATION, self.operations_at, 0)
        last_ns = left_ns or max([0, *(max(one[0], one[1]) for one in spans), *(one[7] for one in operations)])
        found = [_span(one, rank, names, last_ns) for one in spans if one[6] < len(KINDS)]
        for one in operations:
            found += _operation_spans(one, rank, names)
        since_ns = spans[0][1] or spans[0][0] if span_count > self.room else 0
        if operation_count > self.room:
            since_ns = max(since_ns, operations[0][7])
        offset = Offset(at_ns=first[0], offset_ns=first[1], uncertainty_ns=first[2])
        return Recording(
            rank=rank,
            spans=[one for one in found if one.start_ns <= one.end_ns],
            lost=max(0, span_count - self.room) + max(0, operation_count - self.room),
            since_ns=since_ns,
            host=_text(host),
            first=offset,
            last=offset,
            has_died=not left_ns,
        )

    def _thread_names(self) -> dict[int, str]:
        at = _page(HEADER.size)
        table = self._memory[at : at + THREADS_MAX * THREAD.size]
        return {thread: _text(name) for thread, name in THREAD.iter_unpack(table) if thread}

    def _records(self, record: struct.Struct, at: int, number: int) -> tuple[list[tuple[Any, ...]], int]:
        """The records of a ring in the order of their numbers, which are item `number`; and the newest number."""
        found = [one for one in record.iter_unpack(self._memory[at : at + self.room * record.size]) if one[number]]
        found.sort(key=lambda one: one[number])
        return found, found[-1][number] if found else 0


def _reserved(descriptor: int, size: int) -> int:
    """Raises OSError without memory for it: if it were missing later, that would be a SIGBUS."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _layout(room: int) -> tuple[int, int, int]:
    """Where the spans and the operations begin, and the size of the file."""
    spans_at = _page(HEADER.size) + _page(THREADS_MAX * THREAD.size)
    operations_at = spans_at + _page(room * SPAN.size)
    return spans_at, operations_at, operations_at + _page(room * OPERATION.size)


def _page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _text(field: bytes) -> str:
    """A text that may have been cut within a letter."""
    return field.rstrip(b"\0").decode(errors="ignore")


def _track(thread: int, names: dict[int, str]) -> str:
    return names.get(thread, f"thread {thread}")


def _span(record: tuple[Any, ...], rank: int, names: dict[int, str], last_ns: int) -> Span:
    start_ns, end_ns, step, queued_ns, thread, of, kind_number, name, _ = record
    kind, title = KINDS[kind_number], _text(name)
    facts: dict[str, int | str] = {}
    if not end_ns:
        # A step that a death cut off is not compared with others.
        kind, title, end_ns = PHASE, f"{title}, not ended", max(start_ns, last_ns)
    elif kind == STEP:
        facts = {"step": step}
    elif kind == TASK:
        facts = {"step": step, "queued_ns": queued_ns}
    elif kind == WAIT:
        facts = {"thread": _track(of, names)}
    return Span(
        rank=rank, track=_track(thread, names), kind=kind, name=title, start_ns=start_ns, end_ns=end_ns, facts=facts
    )


def _operation_spans(record: tuple[Any, ...], rank: int, names: dict[int, str]) -> Iterator[Span]:
    """A collective, and the wait for it."""
    _, sequence, sent, received, posted, returned, wait, end, status, poster, waiter, plan, group = record
    name = _text(plan) or "operation"
    facts: dict[str, int | str] = {"group": _text(group), "sequence": sequence}
    yield Span(
        rank=rank,
        track=_track(poster, names),
        kind=COLLECTIVE,
        name=name,
        start_ns=posted,
        end_ns=end,
        facts=facts | {"sent_bytes": sent, "received_bytes": received, "status": status},
    )
    # An operation that ends within the call that posts it was waited for there.
    since = wait or (posted if end <= returned else 0)
    if 0 < since < end:
        yield Span(
            rank=rank,
            track=_track(waiter if wait else poster, names),
            kind=WAIT,
            name=f"wait for {name}",
            start_ns=since,
            end_ns=end,
            facts=facts,
        )
