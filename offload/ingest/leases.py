# SPDX-License-Identifier: Apache-2.0
"""Decides which feeder sends which batch of one rank, from which row, and when to ask again.

Sans-IO: no clock, socket or thread. Times come in, messages go out. A *lease* is a batch with an open slot and the
feeder that was told to send it. It ends when all rows have arrived, when the feeder leaves, or when it stalls.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sennit.offload.ingest.protocol import Message, Send, Taken

# How long a silence may last before rows are asked for again: RFC 6298 section 2, from the feeder's earlier delays.
ASK_FIRST_S: Final = 0.5
ASK_MIN_S: Final = 0.01
ASK_MAX_S: Final = 1.0
_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
# A feeder that stays silent this long loses the batch, if another feeder is there.
STALL_S: Final = 3.0


class Why(enum.IntEnum):
    """Why rows are requested; an argument of the tracepoint `rows_requested`."""

    OPENED = 0
    """Nobody was asked for the batch before."""
    GAP = 1
    SILENCE = 2
    MOVED = 3
    """The feeder left or stalled."""


class WaitEstimate:
    """A timeout estimated from earlier durations."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def add(self, took_s: float) -> None:
        if self._mean_s is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
            return
        self._deviation_s += _DEVIATION_GAIN * (abs(self._mean_s - took_s) - self._deviation_s)
        self._mean_s += _GAIN * (took_s - self._mean_s)

    def bound_s(self) -> float:
        mean_s = self._mean_s
        return ASK_FIRST_S if mean_s is None else min(ASK_MAX_S, max(ASK_MIN_S, mean_s + 4 * self._deviation_s))


@dataclass
class _Feeder:
    answer: WaitEstimate = field(default_factory=WaitEstimate)
    """From an order to its first row. With a queue on the path this is much longer than a pause between rows."""

    pause: WaitEstimate = field(default_factory=WaitEstimate)
    """From one arrival to the next while the feeder sends."""

    leases: int = 0
    turn: int = 0
    """When the feeder got its last lease. Among equals, the one that waited longest is next."""

    is_stalled: bool = False
    """Its last lease stalled, and nothing has arrived since. Other feeders come first."""


@dataclass
class _Open:
    """A batch whose slot is open."""

    rows: int
    progress_s: float
    """When its last row arrived, or else when the slot opened."""

    lease_s: float = 0.0
    """When its last row arrived, or else when its lease began."""

    taken: int = 0
    feeder: int | None = None
    told: set[int] = field(default_factory=set)
    """Every feeder that was ever told to send the batch. Each is told when it is complete."""

    was_given: bool = False
    """Whether any feeder was told to send the batch, also one that has left."""

    stalled_feeder: int | None = None
    """The feeder whose lease stalled, so that another feeder took over."""

    ask_at_s: float = 0.0
    unanswered_s: float | None = None
    """When the first unanswered order was sent."""

    asked_row: int | None = None
    """The row where it was told to send again. Until then, later rows may belong to the earlier order."""

    tries: int = 0

    @property
    def is_complete(self) -> bool:
        return self.taken == self.rows


@dataclass(kw_only=True, slots=True)
class LeaseCounters:
    """Counters of repairs."""

    gaps: int = 0
    """Orders to send again because a later row arrived."""

    silences: int = 0
    """Orders to send again because nothing arrived."""

    moved: int = 0
    """Unfinished batches given to another feeder."""

    feeders_lost: int = 0
    """Feeders that left while they held leases."""


class Leases:
    """The batches of one rank from `first_batch` to the end. The caller numbers the feeders."""

    def __init__(
        self,
        rows_of: Callable[[int], int],
        *,
        first_batch: int,
        batch_count: int,
        slots: int,
        now_s: float,
        asked: Callable[[int, int, Why], None] = lambda batch, row, why: None,
    ) -> None:
        """`rows_of(batch)`: its record count; `batch_count`: one past the last batch. `asked(batch, row, why)` is
        called for every order to a feeder.
        """
        self.counters = LeaseCounters()
        self._rows_of, self._batch_count, self._slots = rows_of, batch_count, slots
        self._asked = asked
        self._open: dict[int, _Open] = {}
        self._feeders: dict[int, _Feeder] = {}
        self._turns = 0
        self._outbox: list[tuple[int, Message]] = []
        for batch in range(first_batch, first_batch + slots):
            self._open_slot(batch, now_s)

    def join(self, feeder: int, now_s: float) -> None:
        self._feeders[feeder] = _Feeder()
        self.advance(now_s)

    def leave(self, feeder: int, now_s: float) -> None:
        """The feeder died or was sent away. Others send its batches from the row it reached."""
        gone = self._feeders.pop(feeder, None)
        if gone is None:
            return
        self.counters.feeders_lost += gone.leases > 0
        for lease in self._open.values():
            lease.told.discard(feeder)
            if lease.feeder == feeder:
                lease.feeder = None
        self.advance(now_s)

    def awaited(self) -> Iterator[int]:
        """The batches whose slots are open."""
        return (batch for batch, lease in self._open.items() if lease.told and not lease.is_complete)

    def observe(self, batch: int, taken: int, row_ahead: int, now_s: float) -> None:
        """Takes the receiver's state of a batch: rows taken, and whether a later row arrived out of order."""
        lease = self._open[batch]
        feeder = None if lease.feeder is None else self._feeders[lease.feeder]
        if taken > lease.taken:
            if feeder is not None:
                if lease.unanswered_s is None:
                    feeder.pause.add(now_s - lease.lease_s)
                else:
                    # If several orders are open, nobody knows which one is answered (Karn's problem). Measuring from
                    # the first one makes the estimate too long at worst. Leaving the sample out, as RFC 6298 does,
                    # would never learn that a link is slow.
                    feeder.answer.add(now_s - lease.unanswered_s)
                    lease.unanswered_s = None
                feeder.is_stalled = False
                lease.ask_at_s = now_s + max(feeder.pause.bound_s(), feeder.answer.bound_s())
            lease.taken, lease.tries, lease.progress_s, lease.lease_s = taken, 0, now_s, now_s
            if lease.is_complete:
                self._end_lease(lease)
                self._outbox += [(told, Taken(batch=batch, row=taken)) for told in sorted(lease.told)]
            elif lease.feeder is not None:
                self._outbox.append((lease.feeder, Taken(batch=batch, row=taken)))
        if row_ahead > lease.taken != lease.asked_row and not lease.is_complete and lease.feeder is not None:
            self.counters.gaps += 1
            lease.asked_row = lease.taken
            self._ask(batch, lease, now_s, Why.GAP)

    def advance(self, now_s: float) -> None:
        """Assigns batches that nobody sends, and asks again for missing rows."""
        for batch, lease in self._open.items():
            if lease.is_complete:
                continue
            if lease.feeder is not None and now_s >= lease.ask_at_s:
                self._ask_after_silence(batch, lease, now_s)
            if lease.feeder is None and self._feeders:
                self._give(batch, lease, now_s)

    def release(self, batch: int, now_s: float) -> None:
        """The receiver has given the batch's slot to the batch `slots` later."""
        del self._open[batch]
        self._open_slot(batch + self._slots, now_s)
        self.advance(now_s)

    def complete(self) -> Iterator[int]:
        """Complete batches that are not released yet."""
        return (batch for batch, lease in self._open.items() if lease.is_complete)

    def is_complete(self, batch: int) -> bool:
        return self._open[batch].is_complete

    def progress(self, batch: int) -> tuple[int, int, float]:
        """(rows taken, rows in all, time of the last arrival) of an open batch."""
        lease = self._open[batch]
        return lease.taken, lease.rows, lease.progress_s

    def drain(self) -> list[tuple[int, Message]]:
        """Messages to send, each with its feeder. Messages to feeders that left are dropped."""
        messages = [(feeder, message) for feeder, message in self._outbox if feeder in self._feeders]
        self._outbox.clear()
        return messages

    def _open_slot(self, batch: int, now_s: float) -> None:
        if batch < self._batch_count:
            self._open[batch] = _Open(rows=self._rows_of(batch), progress_s=now_s)

    def _give(self, batch: int, lease: _Open, now_s: float) -> None:
        others = self._feeders.keys() - {lease.stalled_feeder} or self._feeders.keys()
        number = min(others, key=lambda number: self._preference(self._feeders[number]))
        feeder = self._feeders[number]
        self._turns += 1
        feeder.leases, feeder.turn = feeder.leases + 1, self._turns
        lease.feeder, lease.lease_s, lease.tries = number, now_s, 0
        lease.asked_row = lease.unanswered_s = None
        why = Why.MOVED if lease.was_given else Why.OPENED
        lease.was_given = True
        lease.told.add(number)
        self._ask(batch, lease, now_s, why)

    @staticmethod
    def _preference(feeder: _Feeder) -> tuple[bool, int, int]:
        return feeder.is_stalled, feeder.leases, feeder.turn

    def _ask(self, batch: int, lease: _Open, now_s: float, why: Why) -> None:
        assert lease.feeder is not None
        self._asked(batch, lease.taken, why)
        if lease.unanswered_s is None:
            lease.unanswered_s = now_s
        # The timeout doubles after each try (RFC 6298, section 5.5).
        wait_s = self._feeders[lease.feeder].answer.bound_s() * 2.0 ** min(lease.tries, 16)
        lease.ask_at_s = now_s + min(ASK_MAX_S, wait_s)
        self._outbox.append((lease.feeder, Send(batch=batch, row=lease.taken)))

    def _ask_after_silence(self, batch: int, lease: _Open, now_s: float) -> None:
        assert lease.feeder is not None
        feeder = self._feeders[lease.feeder]
        if now_s - lease.lease_s >= STALL_S:
            feeder.is_stalled = True
            # A stalled feeder is asked too: the network may have been at fault, and only rows can show that it
            # recovered.
            if len(self._feeders) > 1:
                self.counters.moved += 1
                lease.stalled_feeder = lease.feeder
                self._end_lease(lease)
                return
        self.counters.silences += 1
        lease.tries += 1
        lease.asked_row = lease.taken
        self._ask(batch, lease, now_s, Why.SILENCE)

    def _end_lease(self, lease: _Open) -> None:
        if lease.feeder is not None:
            self._feeders[lease.feeder].leases -= 1
            lease.feeder = None
