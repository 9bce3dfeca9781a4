# SPDX-License-Identifier: Apache-2.0
"""One rank's end of ingest: accepts feeders, orders records, hands out complete batches.

During training a thread of its own does this. The thread checks the receiver about every millisecond while rows may
come, and sleeps while all slots are full.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from sennit.closing import Closing
from sennit.errors import SennitError
from sennit.offload._native import (
    trace_batch_begun,
    trace_batch_complete,
    trace_batch_released,
    trace_batch_taken,
    trace_batch_wanted,
    trace_rows_requested,
)
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import Batch
from sennit.offload.errors import TargetUnavailable
from sennit.offload.ingest.connection import Connection
from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.leases import LeaseCounters, Leases
from sennit.offload.ingest.protocol import (
    VERSION,
    Apart,
    End,
    FactsOf,
    Hello,
    Message,
    Preparing,
    ProtocolError,
    Reconfigured,
    Terms,
    error,
)
from sennit.offload.sketch import Sketch
from sennit.offload.targets import Receiver
from sennit.thread_names import name_thread

POLL_S: Final = 0.001
IDLE_S: Final = 0.1
OBSERVE_EVERY_S: Final = 0.2
CHECK_S: Final = 0.25
CONNECTIONS_MAX: Final = 256
HELLO_S: Final = 10.0
# How long messages may take to leave when the session ends.
LAST_WORDS_S: Final = 2.0


class IngestError(SennitError):
    """A batch does not arrive. The message names the batch and the feeder that was to send it."""


class Session(Closing):
    """Serves feeders until it is closed. Feeders may come and go at any time."""

    def __init__(
        self,
        listener: socket.socket,
        terms: Terms,
        *,
        timeout_s: float,
        observe: Callable[[dict[str, int | float]], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """The listening socket stays the caller's. The caller may give it to another session after this one.

        `timeout_s`: for a connection to say what it has, and for every wait. `check` is called from time to time in
        every wait, and raises if there is nothing to wait for any more. `observe` is called with the counters several
        times a second, by the session's thread.
        """
        self._listener, self._terms, self._timeout_s = listener, terms, timeout_s
        self._facts: Facts | None = None
        self._heard_s = time.monotonic()
        """When a feeder last said that it prepares, or else when the session began."""

        self._receiver: Receiver | None = None
        self._leases: Leases | None = None
        self._asked = 0
        """How often rows were asked for again when the receiver's counters were last looked at."""

        self._wants_apart = False
        """Whether messages of several packets reach this rank unsegmented."""

        self._connections: dict[int, Connection] = {}
        self._accepted = 0
        self._feeders_seen = 0
        self._departures: list[str] = []
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self._next_batch = 0
        self._batches = 0
        self._observe, self._check = observe, check
        self._observed_s = 0.0
        self._failure: BaseException | None = None
        self._ends = False
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for quiet in (self._wake, self._woken, listener):
            quiet.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="sennit-ingest", daemon=True)
        self._thread.start()

    def wait_for_facts(self, patience_s: float = math.inf) -> Facts | None:
        """The facts of the first feeder that has some. None after this time, if there may be some later.

        Raises IngestError if for the session's timeout no feeder came, and none said that it prepares.
        """
        with self._changed:
            until_s = time.monotonic() + patience_s
            while not self._wait(lambda: self._facts is not None, min(until_s, self._heard_s + self._timeout_s)):
                if time.monotonic() >= self._heard_s + self._timeout_s:
                    raise IngestError(f"no feeder came to {self._place} within {self._timeout_s:g} s{self._departed()}")
                if time.monotonic() >= until_s:
                    break
            return self._facts

    def agree(self, facts: Facts) -> None:
        """Sets the run's facts. Feeders with other facts are refused, those already connected too."""
        with self._changed:
            self._facts = facts
            for connection in list(self._connections.values()):
                if connection.facts is not None:
                    self._check_facts(connection, connection.facts)
            self._wake_up()

    def start(
        self, receiver: Receiver, rows_of: Callable[[int], int], *, first_batch: int, batch_count: int, slots: int
    ) -> None:
        """Starts to order records. The receiver expects `first_batch`; the session closes it."""
        with self._changed:
            now_s = time.monotonic()
            self._receiver = receiver
            self._leases = Leases(
                rows_of, first_batch=first_batch, batch_count=batch_count, slots=slots, now_s=now_s,
                asked=lambda batch, row, why: trace_rows_requested(self._terms.rank, batch, row, why),
            )  # fmt: skip
            for connection in self._connections.values():
                if connection.facts is not None:
                    self._leases.join(connection.number, now_s)
            self._send_orders()
            self._wake_up()

    def take(self, number: int) -> Batch:
        """Waits for the batch. Its columns are valid until it is released."""
        with self._changed:
            receiver, leases = self._started()
            began_s = self._waits_since_s = time.monotonic()
            trace_batch_wanted(self._terms.rank, number)
            while not self._wait(lambda: leases.is_complete(number), self._deadline_s(leases, number, began_s)):
                if time.monotonic() >= self._deadline_s(leases, number, began_s):
                    raise IngestError(self._complaint(leases, receiver, number))
            self._waited_s += time.monotonic() - began_s
            self._waits_since_s = None
            self._batches += 1
            self._next_batch = number + 1
            trace_batch_taken(self._terms.rank, number)
        # Nobody else touches a complete batch.
        return receiver.batch(number)

    def release(self, number: int) -> None:
        """Gives the batch's slot to a later batch."""
        with self._changed:
            receiver, leases = self._started()
            receiver.release(number)
            trace_batch_released(self._terms.rank, number)
            leases.release(number, time.monotonic())
            self._send_orders()
            self._wake_up()

    def counters(self) -> dict[str, int | float]:
        """Counters: datagrams by verdict, records, bytes, repairs, and seconds waited.

        The names are always the same. `feeders_connected` and `batches_ready` are momentary values; all others only
        grow.
        """
        with self._changed:
            came = FeedCounters() if self._receiver is None else self._receiver.counters()
            missed = LeaseCounters() if self._leases is None else self._leases.counters
            complete = () if self._leases is None else self._leases.complete()
            waits_s = 0.0 if self._waits_since_s is None else time.monotonic() - self._waits_since_s
            return {
                **came.as_mapping(),
                **asdict(missed),
                "feeders": self._feeders_seen,
                "feeders_connected": sum(one.facts is not None for one in self._connections.values()),
                "batches": self._batches,
                "batches_ready": sum(batch >= self._next_batch for batch in complete),
                "waited_s": self._waited_s + waits_s,
            }

    def sketch(self) -> Sketch | None:
        """How often ids occurred so far, by column of the plan; None before records are taken or without a sketch."""
        with self._changed:
            return None if self._receiver is None else self._receiver.sketch()

    def program_ns(self) -> int | None:
        """Processor time of the kernel's program so far; None: there is none, or nobody counts."""
        with self._changed:
            return None if self._receiver is None else self._receiver.program_ns()

    def close(self, failure: str | None = None, *, goes_on: bool = False) -> None:
        """Tells the feeders that the run is over, or why it failed, and closes the receiver.

        `goes_on`: the run goes on in another session, where the feeders find it at the same addresses.
        """
        last = Reconfigured() if goes_on else End() if failure is None else error(failure)
        with self._changed:
            if self._ends:
                return
            self._ends = True
            for connection in self._connections.values():
                connection.send(last)
            self._wake_up()
        self._thread.join()
        with self._changed:
            if self._receiver is not None:
                self._receiver.close()

    @property
    def _place(self) -> str:
        host, port = self._terms.endpoints[self._terms.rank]
        return f"{host} port {port}"

    def _started(self) -> tuple[Receiver, Leases]:
        assert self._receiver is not None
        assert self._leases is not None
        return self._receiver, self._leases

    def _deadline_s(self, leases: Leases, number: int, began_s: float) -> float:
        return max(began_s, leases.progress(number)[2]) + self._timeout_s

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Waits for a condition; False after the deadline. Raises whatever ended the thread."""

        def is_over() -> bool:
            return self._failure is not None or condition()

        while not self._changed.wait_for(is_over, min(CHECK_S, max(0.0, deadline_s - time.monotonic()))):
            self._check()
            self._check_receiver()
            if time.monotonic() >= deadline_s:
                break
        if self._failure is not None:
            raise IngestError(f"ingest failed: {self._failure!r}") from self._failure
        return condition()

    def _check_receiver(self) -> None:
        if self._receiver is not None:
            try:
                self._receiver.check()
            except TargetUnavailable as error:
                raise IngestError(str(error)) from error

    def _complaint(self, leases: Leases, receiver: Receiver, number: int) -> str:
        taken, rows, _ = leases.progress(number)
        ready = [connection.title for connection in self._connections.values() if connection.facts is not None]
        refused = {
            name: count
            for name, count in receiver.counters().as_mapping().items()
            if count and name not in ("accepted", "records", "filtered", "body_bytes")
        }
        datagrams = f"; datagrams refused: {', '.join(f'{count} {name}' for name, count in refused.items()) or 'none'}"
        return (
            f"batch {number}, rank {self._terms.rank}: {taken} of {rows} records came, and none more within "
            f"{self._timeout_s:g} s; feeders: {', '.join(ready) or 'none'}{self._departed()}{datagrams}"
        )

    def _departed(self) -> str:
        return f"; gone: {'; '.join(self._departures)}" if self._departures else ""

    # Everything below runs in the session's thread.

    def _run(self) -> None:
        name_thread(self._thread.name)
        try:
            while not self._ends:
                awaits = self._leases is not None and any(True for _ in self._leases.awaited())
                ready = self._selector.select(POLL_S if awaits else IDLE_S)
                with self._changed:
                    for key, events in ready:
                        self._serve(key, events)
                    self._look()
                    self._show()
            self._say_goodbye()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            self._selector.close()
            for end in (self._wake, self._woken):
                end.close()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        elif key.fileobj is self._listener:
            self._accept()
        else:
            connection: Connection = key.data
            if connection.is_closed:  # closed by the other thread after the selector had seen it
                return
            if events & selectors.EVENT_READ:
                self._hear(connection)
            if not connection.is_closed:
                self._flush(connection)

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
        except OSError:  # the peer is gone again, or no descriptors are left: the next connection may succeed
            return
        self._accepted += 1
        deadline_s = time.monotonic() + min(HELLO_S, self._timeout_s)
        try:
            connection = Connection(self._accepted, accepted, peer, deadline_s=deadline_s)
            if len(self._connections) >= CONNECTIONS_MAX:
                connection.send(error(f"too many connections; allowed: {CONNECTIONS_MAX}"))
                connection.flush()
                raise ConnectionError("one too many")
        except OSError:
            accepted.close()
            return
        self._connections[connection.number] = connection
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _hear(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._answer(connection, message)
                if connection.is_closed:
                    return
        except ProtocolError as refusal:
            self._refuse(connection, str(refusal))
        except ConnectionError as lost:
            self._drop(connection, str(lost))

    def _answer(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Hello) and not connection.feeder:
            if message.version != VERSION:
                raise ProtocolError(f"version {message.version}; this trainer speaks {VERSION}")
            connection.feeder = message.feeder
            connection.deadline_s = time.monotonic() + self._timeout_s
            connection.send(self._terms)
        elif isinstance(message, Preparing) and connection.feeder and connection.facts is None:
            self._heard_s = time.monotonic()
            connection.deadline_s = self._heard_s + self._timeout_s
        elif isinstance(message, FactsOf) and connection.feeder and connection.facts is None:
            self._check_facts(connection, Facts.from_json(message.facts))
        elif message.kind == "error":
            self._drop(connection, f"it says: {getattr(message, 'text', '')}")
        else:
            raise ProtocolError(f"{message.kind} out of turn")

    def _check_facts(self, connection: Connection, facts: Facts) -> None:
        is_new = connection.facts is None
        if self._facts is not None and (difference := facts.difference(self._facts)) is not None:
            self._refuse(connection, f"this feeder has {difference} as the run")
            return
        connection.facts = facts
        if self._terms.rank == 0 and self._facts is None:
            self._facts = facts
            self._changed.notify_all()
        if is_new:
            self._feeders_seen += 1
            if self._wants_apart:
                connection.send(Apart())
            if self._leases is not None:
                self._leases.join(connection.number, time.monotonic())

    def _look(self) -> None:
        """Handles rows that arrived and timeouts."""
        now_s = time.monotonic()
        if self._receiver is not None and self._leases is not None:
            for batch in list(self._leases.awaited()):
                taken, ahead = self._receiver.rows_taken(batch), self._receiver.row_ahead(batch)
                if taken and not self._leases.progress(batch)[0]:
                    trace_batch_begun(self._terms.rank, batch)
                self._leases.observe(batch, taken, ahead, now_s)
                if self._leases.is_complete(batch):
                    trace_batch_complete(self._terms.rank, batch, taken)
                    self._changed.notify_all()
            self._leases.advance(now_s)
            self._look_at_sizes(self._receiver, self._leases.counters)
            self._send_orders()
        for connection in list(self._connections.values()):
            if connection.facts is None and now_s > connection.deadline_s:
                self._refuse(connection, f"no {'facts' if connection.feeder else 'hello'} in time")

    def _look_at_sizes(self, receiver: Receiver, missed: LeaseCounters) -> None:
        """Asks feeders to send packets one by one, if the receiver found some too large. An XDP program that the driver
        does not run sees a message of a sender on this machine before it is segmented, and never takes its rows.
        """
        asked = missed.gaps + missed.silences
        if self._wants_apart or asked == self._asked:
            return
        self._asked = asked
        if receiver.counters().datagrams[Verdict.OVERSIZED]:
            self._wants_apart = True
            for connection in self._connections.values():
                if connection.facts is not None:
                    connection.send(Apart())

    def _show(self) -> None:
        if self._observe is not None and time.monotonic() >= self._observed_s + OBSERVE_EVERY_S:
            self._observed_s = time.monotonic()
            self._observe(self.counters())

    def _send_orders(self) -> None:
        if self._leases is None:
            return
        told = set()
        for number, message in self._leases.drain():
            self._connections[number].send(message)
            told.add(number)
        for number in told:
            if (connection := self._connections.get(number)) is not None:
                self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            all_sent = connection.flush()
        except ConnectionError as lost:
            self._drop(connection, str(lost))
            return
        wanted = selectors.EVENT_READ if all_sent else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _refuse(self, connection: Connection, text: str) -> None:
        connection.send(error(text))
        with contextlib.suppress(ConnectionError):
            connection.flush()
        self._drop(connection, f"refused: {text}")

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.is_closed:
            return
        connection.is_closed = True
        del self._connections[connection.number]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._departures = [*self._departures[-7:], f"{connection.title} ({reason})"]
        if self._leases is not None:
            self._leases.leave(connection.number, time.monotonic())
            self._send_orders()

    def _say_goodbye(self) -> None:
        """Waits a short time until the last messages have left."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        with self._changed:
            for connection in list(self._connections.values()):
                connection.socket.settimeout(max(0.01, deadline_s - time.monotonic()))
                with contextlib.suppress(OSError):
                    connection.socket.sendall(connection.unsent)
                    connection.socket.shutdown(socket.SHUT_WR)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"w")
