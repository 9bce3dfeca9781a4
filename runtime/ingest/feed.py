# SPDX-License-Identifier: Apache-2.0
"""`sennit feed`: one data set in memory, and worker processes that each feed every rank of a run from it."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.offload.ingest.feeder import FeedCounters, Feeder
from sennit.offload.ingest.protocol import LINE_MAX_BYTES, Terms
from sennit.offload.ingest.protocol import encode as encode_message
from sennit.offload.ingest.protocol import error as protocol_error
from sennit.offload.ingest.trainer_search import FeedError, Place, meet
from sennit.offload.record_store import RecordStore
from sennit.offload.records import HEADER
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import Order
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import RawSamples, fingerprint
from sennit.runtime.ingest.address import Address
from sennit.runtime.ingest.facts import encode
from sennit.transport.errors import SennitError

# How many workers may be replaced. If more die, a replacement does not remove the cause.
REPLACEMENTS_MAX: Final = 2
LEAVE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedReport:
    """The result of feeding, at the end of the run."""

    name: str
    samples: int
    record_bytes: int
    """Bytes of all records in memory."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """The arguments of a worker."""

    name: str
    places: Sequence[Place]
    """Where ranks of the run listen."""

    timeout_s: float
    store: RecordStore
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Progress:
    counters: FeedCounters
    places: Sequence[Place]
    spent_s: tuple[float, float]
    """Processor time in the program and in the kernel."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    error: str | None


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


def find_trainer(address: Address, *, name: str, timeout_s: float) -> Terms:
    """Waits for a run, and returns its terms."""
    try:
        control, terms = meet(
            [(address.host, address.port)], name=f"{name} (asks)", deadline_s=time.monotonic() + timeout_s
        )
    except FeedError as error:
        raise FeedError(f"{error}; start `sennit train --ingest …` there, or give it more --timeout") from error
    control.close()
    return terms


def give_up(address: Address, *, name: str, reason: str) -> None:
    """Tells the trainer why this feeder does not come, for the error at its deadline."""
    place = (address.host, address.port)
    with contextlib.suppress(FeedError, OSError):
        control, _ = meet([place], name=name, deadline_s=time.monotonic() + LEAVE_S)
        with control:
            control.sendall(encode_message(protocol_error(reason)))


def prepare(raw: RawSamples, terms: Terms) -> tuple[dict[str, Any], RecordStore]:
    """Returns the facts, as JSON, and the records of a run, preprocessed by its training rows."""
    if raw.eval_rows is not None:
        raise DataError(
            f"{raw.name} holds rows back for evaluation itself; allowed: data of which trainers choose them"
        )
    order = _order(raw.name, len(raw), terms)
    try:
        preprocessing = Preprocessing.fit(raw, order.is_training())
        facts, store = encode(
            preprocessing.apply(raw), fingerprint(raw), body_max_bytes=terms.packet_bytes - HEADER.size
        )
    except MemoryError as error:
        raise FeedError(f"{raw.name} does not fit this machine's memory: {error}") from error
    told = preprocessing.as_json()
    if len(json.dumps(told)) <= LINE_MAX_BYTES // 2:
        facts = replace(facts, preprocessing=told)
    return facts.as_json(), store


def run(
    address: Address,
    facts: dict[str, Any],
    store: RecordStore,
    terms: Terms,
    *,
    name: str,
    workers: int,
    timeout_s: float,
    on_event: Listener,
    on_progress: Callable[[FeedCounters], None],
) -> FeedReport:
    """Feeds until the trainer says that the run is over. A FeedError or KeyboardInterrupt ends all workers."""
    task = _Task(name=name, places=[(address.host, address.port)], timeout_s=timeout_s, store=store, facts=facts)
    crew = _Crew(task, workers, on_event)
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
        name=facts["name"],
        samples=len(store),
        record_bytes=store.extent.size_bytes,
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

    def __init__(self, task: _Task, count: int, on_event: Listener) -> None:
        self.replaced = 0
        self.spent_s = (0.0, 0.0)
        """Processor time of workers that have left, in the program and in the kernel."""

        self._task, self._on_event = task, on_event
        self._context = multiprocessing.get_context("spawn")
        self._past = FeedCounters()
        self._workers: dict[Connection, _Worker] = {}
        for number in range(count):
            self._start(number)

    def progress(self) -> Iterator[FeedCounters]:
        """Yields the counters of all workers until the run is over. Raises FeedError if it cannot be fed to its end."""
        is_over = False
        while self._workers:
            for end in multiprocessing.connection.wait(list(self._workers)):
                assert isinstance(end, Connection)
                worker = self._workers[end]
                try:
                    said = end.recv()
                except EOFError:
                    self._leave(worker)
                    if not is_over:
                        self._replace(worker)
                    continue
                if isinstance(said, _Outcome):
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

    def _give_up_search(self) -> None:
        """The run is over. A worker that is still looking for it would do so until its deadline."""
        for worker in self._workers.values():
            if not worker.has_met:
                worker.process.terminate()

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(self._task, number, theirs), name=f"sennit-feed-{number}")
        process.start()
        theirs.close()
        self._workers[ours] = _Worker(number, process, ours)

    def _leave(self, worker: _Worker) -> None:
        del self._workers[worker.end]
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


def _work(task: _Task, number: int, end: Connection) -> None:
    """The main function of a worker process."""
    # The parent handles interrupts and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    feeder_name = f"{task.name} worker {number}"
    try:
        part_of = functools.partial(_part, _Orders(task.facts["name"], len(task.store)))
        with Feeder(feeder_name, task.facts, task.store, part_of, timeout_s=task.timeout_s) as feeder:
            began = os.times()

            def tell(counters: FeedCounters) -> None:
                now = os.times()
                spent_s = (now.user - began.user, now.system - began.system)
                end.send(_Progress(counters, feeder.places, spent_s))

            try:
                feeder.run(task.places, tell)
            finally:  # counts what was sent, also if the trainer ended before it told all workers
                tell(feeder.counters)
        outcome = _Outcome(None)
    except SennitError as error:
        outcome = _Outcome(str(error))
    except BrokenPipeError:  # the parent has gone
        return
    end.send(outcome)


class _Orders:
    """The order of samples that a run's terms define."""

    def __init__(self, name: str, sample_count: int) -> None:
        self._name, self._sample_count = name, sample_count
        self._known: dict[str, Order] = {}

    def of(self, terms: Terms) -> Order:
        key = repr(sorted(terms.order.items()))
        if key not in self._known:
            self._known[key] = _order(self._name, self._sample_count, terms)
        return self._known[key]


def _part(orders: _Orders, terms: Terms, batch: int) -> NDArray[np.int64]:
    part: NDArray[np.int64] = orders.of(terms).part(batch, terms.rank, terms.world_size).numpy()
    return part


def _order(name: str, sample_count: int, terms: Terms) -> Order:
    try:
        return Order(name=name, sample_count=sample_count, **terms.order)
    except DataError:
        raise
    except (TypeError, ValueError) as error:
        raise FeedError(f"the trainer names an order that this feeder does not know: {error}") from error
