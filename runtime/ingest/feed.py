# SPDX-License-Identifier: Apache-2.0
"""`sennit feed`: one process reads the data set chunk by chunk, and workers each feed every rank of a run from it."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from sennit.closing import Closing
from sennit.offload.ingest.feeder import FeedCounters
from sennit.offload.ingest.protocol import Preparing, Terms, encode, error
from sennit.offload.ingest.trainer_search import FeedError, meet
from sennit.runtime.ingest.address import Address
from sennit.runtime.ingest.chunk_ring import ChunkRing
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.ingest.shelf import Release, Stop, Want, give
from sennit.runtime.ingest.worker import Outcome, Task, work
from sennit.transport.errors import SennitError

# How many workers may be replaced. If more die, a replacement does not remove the cause.
REPLACEMENTS_MAX: Final = 2
LEAVE_S: Final = 5.0
# Between words to a trainer that waits for this feeder.
PREPARING_S: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedReport:
    """The result of feeding, at the end of the run."""

    name: str
    samples: int
    record_bytes: int
    """The most bytes of records that were in memory at once."""

    ranks: int
    workers: int
    replaced: int
    """Workers that died and were replaced."""

    feeding_s: float
    """Time from the first record to the end of the run."""

    counters: FeedCounters
    """The sum over all workers."""

    user_s: float
    """Processor time of the workers while they fed, in the program. Their start is not in it."""

    system_s: float
    """Processor time of the workers in the kernel, mostly for packets; over a virtual cable with the receiver's."""

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "records_per_s": self.records_per_s,
            "processor_s_per_million_records": self.processor_s_per_million_records,
        }

    @property
    def records_per_s(self) -> float:
        return self.counters.records / self.feeding_s if self.feeding_s else 0.0

    @property
    def processor_s_per_million_records(self) -> float | None:
        """Processor seconds of the workers for a million records; None: nothing was sent."""
        return (self.user_s + self.system_s) * 1e6 / self.counters.records if self.counters.records else None


@dataclass(slots=True)
class _Worker:
    number: int
    process: BaseProcess
    end: Connection
    counters: FeedCounters = field(default_factory=FeedCounters)
    spent_s: tuple[float, float] = (0.0, 0.0)
    has_met: bool = False
    """Whether it has found the trainer."""


Listener = Callable[[str], None]


class Asking(Closing):
    """Asks a run for its terms. Until it is closed, it tells the trainer that this feeder prepares."""

    def __init__(self, address: Address, *, name: str, timeout_s: float) -> None:
        """Waits for the run. Raises FeedError if there is none in time."""
        try:
            self._control, self.terms = meet(
                [(address.host, address.port)], name=f"{name} (asks)", deadline_s=time.monotonic() + timeout_s
            )
        except FeedError as error:
            raise FeedError(f"{error}; start `sennit train --ingest …` there, or give it more --timeout") from error
        self._control.settimeout(LEAVE_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="sennit-asking", daemon=True)
        self._thread.start()

    def give_up(self, reason: str) -> None:
        """Tells the trainer why this feeder does not come, for the error at its deadline."""
        self._end()
        with contextlib.suppress(OSError):
            self._control.sendall(encode(error(reason)))

    def close(self) -> None:
        self._end()
        self._control.close()

    def _end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _prepare(self) -> None:
        # A trainer that is gone is noticed by the workers.
        with contextlib.suppress(OSError):
            while not self._ended.wait(PREPARING_S):
                self._control.sendall(encode(Preparing()))


def run(
    address: Address,
    stream: FeedStream,
    terms: Terms,
    *,
    name: str,
    workers: int,
    timeout_s: float,
    on_event: Listener,
    on_progress: Callable[[FeedCounters], None],
) -> FeedReport:
    """Feeds until the trainer says that the run is over. A FeedError or KeyboardInterrupt ends all workers."""
    task = Task(
        name=name,
        places=[(address.host, address.port)],
        timeout_s=timeout_s,
        facts=stream.facts.as_json(),
        order=stream.order,
        terms=terms.order,
    )
    with ChunkRing(stream) as chunks:
        crew = _Crew(task, workers, chunks, on_event)
        began_s = ended_s = time.monotonic()
        try:
            for counters in crew.progress():
                on_progress(counters)
                ended_s = time.monotonic()
                if not counters.records:
                    began_s = ended_s
        finally:
            crew.end()
    return FeedReport(
        name=stream.facts.name,
        samples=stream.facts.sample_count,
        record_bytes=chunks.peak_bytes,
        ranks=terms.world_size,
        workers=workers,
        replaced=crew.replaced,
        feeding_s=ended_s - began_s,
        counters=crew.totals(),
        user_s=crew.spent_s[0],
        system_s=crew.spent_s[1],
    )


class _Crew:
    """The workers.

    A worker that dies is replaced, or the others go on. An error that a worker reports ends all of them.
    """

    def __init__(self, task: Task, count: int, chunks: ChunkRing, on_event: Listener) -> None:
        self.replaced = 0
        self.spent_s = (0.0, 0.0)
        """Processor time of workers that have left, in the program and in the kernel."""

        self._task, self._chunks, self._on_event = task, chunks, on_event
        self._context = multiprocessing.get_context("spawn")
        self._past = FeedCounters()
        self._workers: dict[Connection, _Worker] = {}
        for number in range(count):
            self._start(number)

    def progress(self) -> Iterator[FeedCounters]:
        """Yields the counters of all workers until the run is over. Raises FeedError if it cannot be fed to its end."""
        is_over = False
        while self._workers:
            for end in multiprocessing.connection.wait([*self._workers, self._chunks.fileno()]):
                if isinstance(end, int):
                    self._give_chunks()
                    continue
                assert isinstance(end, Connection)
                worker = self._workers[end]
                try:
                    said = end.recv()
                except (EOFError, ConnectionError):
                    self._leave(worker)
                    if not is_over:
                        self._replace(worker)
                    continue
                if isinstance(said, Want):
                    self._chunks.ask(said.batch, worker.number)
                elif isinstance(said, Release):
                    self._chunks.release(said.key, worker.number)
                elif isinstance(said, Outcome):
                    self._leave(worker)
                    if said.error is not None and not is_over:
                        raise FeedError(said.error)
                    is_over = True
                else:
                    worker.counters, worker.spent_s = said.counters, said.spent_s
                    # The rank that the user named may leave an elastic run before another worker starts.
                    self._task = replace(self._task, places=said.places)
                    worker.has_met = True
                if is_over:
                    self._give_up_search()
                yield self.totals()

    def totals(self) -> FeedCounters:
        return sum((worker.counters for worker in self._workers.values()), self._past)

    def end(self) -> None:
        """Terminates all workers."""
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in list(self._workers.values()):
            self._leave(worker)

    def _give_chunks(self) -> None:
        """Sends chunks to the workers that want them. If one cannot be made, the workers tell the ranks why."""
        by_number = {worker.number: worker for worker in self._workers.values()}
        try:
            for number, key, store in self._chunks.ready():
                worker = by_number[number]
                # A worker that is gone is noticed by what it says.
                with contextlib.suppress(OSError):
                    give(worker.end, key, store, worker.process.pid)
        except SennitError as why:
            for worker in self._workers.values():
                with contextlib.suppress(OSError):
                    worker.end.send(Stop(str(why)))

    def _give_up_search(self) -> None:
        """The run is over. A worker that is still looking for it would do so until its deadline."""
        for worker in self._workers.values():
            if not worker.has_met:
                worker.process.terminate()

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._task, number, theirs), name=f"sennit-feed-{number}")
        process.start()
        theirs.close()
        self._workers[ours] = _Worker(number, process, ours)

    def _leave(self, worker: _Worker) -> None:
        del self._workers[worker.end]
        self._chunks.leave(worker.number)
        self._past += worker.counters
        self.spent_s = (self.spent_s[0] + worker.spent_s[0], self.spent_s[1] + worker.spent_s[1])
        worker.end.close()
        worker.process.join(LEAVE_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()

    def _replace(self, worker: _Worker) -> None:
        code = worker.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        if self.replaced < REPLACEMENTS_MAX:
            self.replaced += 1
            self._on_event(f"worker {worker.number} died with {how}; another one takes its place")
            self._start(worker.number)
        elif self._workers:
            self._on_event(f"worker {worker.number} died with {how}; {len(self._workers)} go on")
        else:
            raise FeedError(f"worker {worker.number} died with {how}, as {self.replaced} before it")
