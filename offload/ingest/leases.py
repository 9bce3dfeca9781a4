# SPDX-License-Identifier: Apache-2.0
"""Which feeder sends which batch of one rank, from which row, and when it is told again.

Sans-IO: no clock, socket or thread. Times come in, messages go out. A *lease* is a batch whose slot is open, with the
feeder that was told to send it. It ends when all rows have come, when the feeder goes, or when nothing comes of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sennit.offload.ingest.protocol import Message, Send, Taken

# How long a silence may be before rows are asked for again: RFC 6298 section 2, over how long the feeder took before.
ASK_FIRST_S: Final = 0.5
ASK_MIN_S: Final = 0.01
ASK_MAX_S: Final = 1.0
_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
# A feeder of which nothing comes for so long loses the batch, if there is another one.
STALL_S: Final = 3.0


class Why(enum.IntEnum):
    """Rows are asked for; an argument of the tracepoint `rows_requested`."""

    OPENED = 0
    """Nobody was asked for the batch before."""
    GAP = 1
    SILENCE = 2
    MOVED = 3
    """From a feeder that went, or of which nothing came."""


class WaitEstimate:
    """How long something may take, by how long it took before."""

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
    """From an order to the first row that comes of it: with a queue in between much longer than a pause."""

    pause: WaitEstimate = field(default_factory=WaitEstimate)
    """From rows to rows while it sends."""

    leases: int = 0
    turn: int = 0
    """When it was given its last lease; among equals the one that waited longest is next."""

    is_stalled: bool = False
    """Nothing came of a lease, and nothing has since. The others come first."""


@dataclass
class _Open:
    """A batch whose slot is open."""

    rows: int
    progress_s: float
    """When its last row came, or else when it opened."""

    lease_s: float = 0.0
    """When its last row came, or else when its lease began."""

    taken: int = 0
    feeder: int | None = None
    told: set[int] = field(default_factory=set)
    """Every feeder that was ever told to send it, and is to be told that it is complete."""

    was_given: bool = False
    """To any feeder, who may have left."""

    stalled_feeder: int | None = None
    """Of which nothing came for so long that another one was to send it."""

    ask_at_s: float = 0.0
    unanswered_s: float | None = None
    """When the first order went out of those of which no row has come yet."""

    asked_row: int | None = None
    """Where it was when it was told to send again: until then, rows ahead may be of those sent before."""

    tries: int = 0

    @property
    def is_complete(self) -> bool:
        return self.taken == self.rows


@dataclass(kw_only=True, slots=True)
class LeaseCounters:
    """What was done about what did not come."""

    gaps: int = 0
    """Orders to send again because a later row had come."""

    silences: int = 0
    """The same because nothing came."""

    moved: int = 0
    """Batches given to another feeder before they were complete."""

    feeders_lost: int = 0
    """That had leases when they went."""


class Leases:
    """The batches of one rank from `first_batch` to the end. Feeders go by numbers that the caller gives them."""

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
        """`rows_of(batch)`: how many records it has; `batch_count`: where numbers end. `asked(batch, row, why)` hears
        of every order to a feeder.
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
        """It has died, or was sent away: its batches are sent by others, from where it was."""
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
        """The batches of which rows may come."""
        return (batch for batch, lease in self._open.items() if lease.told and not lease.is_complete)

    def observe(self, batch: int, taken: int, row_ahead: int, now_s: float) -> None:
        """What the receiver says of a batch: the rows taken, and whether a later one came before its turn."""
        lease = self._open[batch]
        feeder = None if lease.feeder is None else self._feeders[lease.feeder]
        if taken > lease.taken:
            if feeder is not None:
                if lease.unanswered_s is None:
                    feeder.pause.add(now_s - lease.lease_s)
                else:
                    # Of several orders it is not known which one is answered (Karn). The first one makes the estimate
                    # too long at worst; to leave it out, as RFC 6298 does, would never learn of a slow link.
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
        """Gives out batches that nobody sends, and asks again for what does not come."""
        for batch, lease in self._open.items():
            if lease.is_complete:
                continue
            if lease.feeder is not None and now_s >= lease.ask_at_s:
                self._ask_after_silence(batch, lease, now_s)
            if lease.feeder is None and self._feeders:
                self._give(batch, lease, now_s)

    def release(self, batch: int, now_s: float) -> None:
        """The receiver has opened the batch's slot for the one that is `slots` later."""
        del self._open[batch]
        self._open_slot(batch + self._slots, now_s)
        self.advance(now_s)

    def complete(self) -> Iterator[int]:
        """The batches of which all rows are there and that were not released."""
        return (batch for batch, lease in self._open.items() if lease.is_complete)

    def is_complete(self, batch: int) -> bool:
        return self._open[batch].is_complete

    def progress(self, batch: int) -> tuple[int, int, float]:
        """(rows taken, rows in all, time since which none has come) of an open batch."""
        lease = self._open[batch]
        return lease.taken, lease.rows, lease.progress_s

    def drain(self) -> list[tuple[int, Message]]:
        """The messages to send, with the feeder that each is for. Those to feeders that have left are dropped."""
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
        # Twice as long after each try (section 5.5).
        wait_s = self._feeders[lease.feeder].answer.bound_s() * 2.0 ** min(lease.tries, 16)
        lease.ask_at_s = now_s + min(ASK_MAX_S, wait_s)
        self._outbox.append((lease.feeder, Send(batch=batch, row=lease.taken)))

    def _ask_after_silence(self, batch: int, lease: _Open, now_s: float) -> None:
        assert lease.feeder is not None
        feeder = self._feeders[lease.feeder]
        if now_s - lease.lease_s >= STALL_S:
            feeder.is_stalled = True
            # Also to one that had stalled: it may have been the network, and only rows can show that it is back.
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
