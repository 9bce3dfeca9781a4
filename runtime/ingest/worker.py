# SPDX-License-Identifier: Apache-2.0
"""A worker of `sennit feed`: a process that sends chunks of records to all ranks of a run.

It imports neither torch nor pyarrow, so it starts quickly and takes little memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from sennit.offload.ingest.feeder import FeedCounters, Feeder
from sennit.offload.ingest.trainer_search import Place
from sennit.runtime.ingest.shelf import Shelf
from sennit.runtime.stream.order import StreamOrder
from sennit.transport.errors import SennitError


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The arguments of a worker."""

    name: str
    places: Sequence[Place]
    """Where ranks of the run listen."""

    timeout_s: float
    facts: dict[str, Any]
    order: StreamOrder
    terms: dict[str, Any]
    """What the order was made of."""


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker, from time to time."""

    counters: FeedCounters
    places: Sequence[Place]
    spent_s: tuple[float, float]
    """Processor time in the program and in the kernel."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """From a worker, as its last message."""

    error: str | None


def work(task: Task, number: int, end: Connection) -> None:
    """The main function of the process."""
    # The parent handles interrupts and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shelf = Shelf(end, task.order, task.terms)
        with Feeder(f"{task.name} worker {number}", task.facts, shelf, timeout_s=task.timeout_s) as feeder:
            began = os.times()

            def tell(counters: FeedCounters) -> None:
                now = os.times()
                spent_s = (now.user - began.user, now.system - began.system)
                end.send(Progress(counters, feeder.places, spent_s))

            try:
                feeder.run(task.places, tell)
            finally:  # counts what was sent, also if the trainer ended before it told all workers
                tell(feeder.counters)
        end.send(Outcome(None))
    except SennitError as error:
        end.send(Outcome(str(error)))
    except (EOFError, ConnectionError):  # the parent has gone
        return
