# SPDX-License-Identifier: Apache-2.0
"""Rounds of rendezvous: every rank leaves a record in the store, and learns everybody's.

Records travel up a tree of ranks: a rank with children reads what they left, and leaves one block. Rank 0 leaves the
block of all, which everybody reads. So a rank reads a few dozen keys and O(world) bytes, in O(log world) steps.

Keys hold the name of the group and, from the second round on, the number of the run: a store may hold the records of
an earlier one. Records go when all have read them. A rank deletes its own at the end of the round, and rank 0 the block
of all at the end of the next. The last rank that is connected deletes the rest (`finish`).

On a busy machine each request waits for two turns: of the store's process, and of the rank. So requests are few.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Final

from sennit.transport import descriptors
from sennit.transport.errors import MismatchError, PeerError, SennitError, TimeoutError
from sennit.transport.meeting.host import Process
from sennit.transport.meeting.rank_records import (
    FAN_IN,
    Record,
    children_of,
    pack,
    pack_parcels,
    subtree,
    unpack,
    unpack_parcels,
)
from sennit.transport.meeting.store import CheckedStore, Store
from sennit.transport.meeting.version import Versions

# Stores count in milliseconds or use another clock. A store that gives up this little early has timed out, not failed.
STORE_CLOCK_SLACK_S: Final = 0.05
# The first pause between two looks at the store. The pause then grows up to WATCH_POLL_S.
POLL_FIRST_S: Final = 0.0005
WATCH_POLL_S: Final = 0.01
# How often the first round's records are read again, and for how long one that fits no run may be of an earlier run.
REREAD_S: Final = 0.1
OLD_RECORD_S: Final = 10.0
# How long another process with our rank may live on, as one does that is just being killed.
DYING_S: Final = 1.0
# How long rank 0 stays when it fails, for the others to read why: its process often holds the store.
LINGER_S: Final = 2.0
STORE_ADVICE: Final = "; the process that holds it may have ended, often rank 0's: see what that said"
# What rank 0 leaves for those who wait for a run that it gave up.
AGAIN: Final = "again"


class Exchanges:
    """Exchanges one record of every rank at a time. One deadline holds for all exchanges."""

    def __init__(
        self, store: Store, *, name: str, rank: int, world: int, timeout_s: float, watch: Callable[[], None] | None
    ) -> None:
        self._store = CheckedStore(store, purpose=f"rendezvous of {name}", advice=STORE_ADVICE)
        self._name = name
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._watch = watch
        self._versions = Versions.ours()
        self._nonce = os.urandom(6).hex()
        self._process = Process.ours()
        self._run = ""
        self._listed: list[Record] = []  # the first round's records of the run
        self._children = children_of(rank, world)
        self._heard: set[str] = set()
        self._strange_run = ""
        self._has_failed = False
        self._in_our_place: Process | None = None  # in that run
        self._deadline_s = time.monotonic() + timeout_s
        # The round that came last, whose block of all is there, and whether ranks of several hosts have met.
        self._last_round = ""
        self._has_swapped = False

    @property
    def deadline_s(self) -> float:
        """The deadline on the clock `time.monotonic`."""
        return self._deadline_s

    def exchange(self, round_name: str, make: Callable[[], Record]) -> list[Record]:
        """Publishes the record that `make` returns, and waits for everybody's. If `make` raises, the others get the
        reason.

        Every record must have the fields of `make`'s record, with the same types.
        """
        awaited_of_us = [self._awaited_of_us(round_name)]
        with self._telling(awaited_of_us):
            own = make()
            self._publish(self._key(round_name, self._rank), own)
            authors = self._authors(round_name)
            records = self._with_children(own, self._await(round_name, authors))
        self._pass_up(round_name, records)
        if self._rank != 0:
            (data,) = self._await(round_name, {self._key(round_name, "all"): 0})
            records = self._decode_block(data, range(self._world))
        self._end(round_name)
        return records

    def swap(self, round_name: str, make: Callable[[], Mapping[int, bytes]]) -> list[bytes]:
        """Gives each rank its parcel of those that `make` returns, at most 65,535 bytes each. Returns those for this
        rank, by sender. If `make` raises, the others get the reason.

        The ranks are a square of sqrt(world) rows. A rank leaves one value for each row. The ranks of a row share the
        work to sort by receiver what the row has left. So everybody handles about 4 sqrt(world) values, each read once.
        """
        side = math.isqrt(self._world - 1) + 1
        rows = [range(first, min(first + side, self._world)) for first in range(0, self._world, side)]
        own = self._rank // side

        def left(sender: int, row: int) -> str:
            return self._key(round_name, f"{sender}/for/{row}")

        def sorted_by(row: int, receiver: int) -> str:
            return self._key(round_name, f"{row}/to/{receiver}")

        def sorter(row: int, receivers: int) -> int:
            return rows[row][receivers % len(rows[row])]

        to_sort = [number for number in range(len(rows)) if sorter(own, number) == self._rank]
        awaited_of_us = [left(self._rank, number) for number in range(len(rows))]
        awaited_of_us += [sorted_by(own, peer) for number in to_sort for peer in rows[number]]
        # The others may have what they need of this rank. Then they wait for it in the trial.
        with self._telling([*awaited_of_us, self._key("trial", self._rank)]):
            parcels = make()
            self._has_swapped = True
            mine = {
                left(self._rank, number): pack_parcels([parcels.get(peer, b"") for peer in row])
                for number, row in enumerate(rows)
            }
            self._store.multi_set({**mine, self._key(round_name, self._rank): ""})
            for number in to_sort:
                senders = {left(sender, number): sender for sender in rows[own]}
                values = self._await(round_name, senders)
                self._store.delete(list(senders))
                row = rows[number]
                table = [self._decode_parcels(value, row, at) for value, at in zip(values, rows[own], strict=True)]
                self._store.multi_set(
                    {
                        sorted_by(own, peer): pack_parcels([sent[column] for sent in table])
                        for column, peer in enumerate(row)
                    }
                )
            authors = {sorted_by(number, self._rank): sorter(number, own) for number in range(len(rows))}
            values = self._await(round_name, authors)
            self._store.delete(list(authors))
            return [
                parcel
                for value, row, author in zip(values, rows, authors.values(), strict=True)
                for parcel in self._decode_parcels(value, row, author)
            ]

    def meet(
        self, greet: Callable[[], Record], offer: Callable[[Sequence[Record]], Record]
    ) -> tuple[list[Record], list[Record]]:
        """Runs the first two rounds, "hello" and "offer", and makes sure that all ranks are in one run. Returns the
        records of that run.

        Rank 0 lists the records that it read, under the number of a run. A rank that finds itself in the list calls
        `offer` with it, and leaves what that returns. When all have done so, rank 0 leaves the block of all, and the
        run stands. An earlier run may have left records and lists. So ranks with children read again until then, and
        rank 0 lists again if anything has changed. Then `offer` is called again, for another run.

        Refuses a record of another world, unless an earlier run left it; and another process with this rank, where it
        can be seen that it lives, or where it came later.
        """
        own_key = self._key("hello", self._rank)
        authors = {self._key("hello", 0): 0} if self._rank else {}
        authors |= {self._key_of_child("hello", child): child for child in self._children}
        awaited_of_us = [self._key_of_child("hello", self._rank)] if self._rank else [own_key, self._listing_key()]
        with self._telling(awaited_of_us):
            own = {"nonce": self._nonce, "world": self._world, "process": self._process.as_record(), **greet()}
            self._claim(own_key, own)
            self._wait("hello", authors)
            old_until_s = min(time.monotonic() + OLD_RECORD_S, self._deadline_s - 2 * REREAD_S)
            offers = self._settle(own, offer, list(authors), awaited_of_us, old_until_s)
        self._end("offer")
        return self._listed, offers

    def telling(self) -> AbstractContextManager[None]:
        """If this rank fails in the block, leaves the reason in place of its record of the network trial."""
        return self._telling([self._key("trial", self._rank)])

    def leave(self, record: Record, /) -> None:
        """Publishes this rank's record of the network trial. A later record replaces it."""
        self._publish(self._key("trial", self._rank), record)

    def look(self, peer: int, /) -> Record | None:
        """Returns the peer's record of the network trial, if it has left one."""
        key = self._key("trial", peer)
        if not self._store.check([key]):
            return None
        return self._decode(self._store.get(key), peer, {"messages": {}, "errors": {}})

    def finish(self, *, keeps_greeting: bool) -> None:
        """Counts this rank as connected: it reads no record any more. The last one to come deletes what is left.

        With `keeps_greeting` the first round's records stay. They show a process that comes too late that another one
        has its rank.
        """
        with suppress(SennitError):
            if not keeps_greeting:
                self._store.delete({self._key("hello", self._rank), self._key_of_child("hello", self._rank)})
            if self._store.add(self._key("done", "count"), 1) != self._world:
                return
            keys = [self._key(self._last_round, "all"), self._key("done", "count")]
            if self._has_swapped:
                keys += [self._key(name, rank) for name in ("pairs", "trial") for rank in range(self._world)]
            self._store.delete(keys if keeps_greeting else [*keys, self._listing_key()])

    def _end(self, round_name: str) -> None:
        """Deletes what all have read, now that this rank has the records of all."""
        own = {self._key(round_name, self._rank), self._key_of_child(round_name, self._rank)}
        if self._rank == 0:
            # Nobody waits for it: its own record is in the block of all.
            own = {self._key(round_name, 0)} | ({self._key(self._last_round, "all")} if self._last_round else set())
        self._store.delete(own)
        self._last_round = round_name

    def _settle(
        self,
        own: Record,
        offer: Callable[[Sequence[Record]], Record],
        keys: list[str],
        awaited_of_us: list[str],
        old_until_s: float,
    ) -> list[Record]:
        """Returns the offers of the run. `awaited_of_us`: where others wait for this rank, changed with the run."""
        known: list[Record] = []
        offered: Record = {}
        of_run = ""  # the run that `offered` is for
        is_passed_up = False
        while True:
            is_early = time.monotonic() < old_until_s
            if known or self._strange_run:
                self._refuse_successor()
            read = self._read_hello(keys, own, is_early=is_early)
            if read and read != known:
                known = read
                self._pass_on(known)
            if self._rank != 0 and not self._run:
                self._find_run(is_early=is_early)
            if not self._run:
                self._listen("hello", [], REREAD_S)
                continue
            if of_run != self._run:
                awaited_of_us[:] = [self._awaited_of_us("offer")]
                offered, of_run, is_passed_up = offer(self._listed), self._run, not self._children
                self._publish(self._key("offer", self._rank), offered)
            everybody, authors = self._key("offer", "all"), self._authors("offer")
            if not is_passed_up and self._listen("offer", list(authors), REREAD_S):
                offers = self._with_children(offered, self._store.multi_get(list(authors)))
                self._pass_up("offer", offers)
                if self._rank == 0:
                    return offers
                is_passed_up = True
            if self._rank == 0:
                continue
            # Rank 0 ends this wait also when it begins another run. Who has children reads again meanwhile.
            if not self._children:
                self._wait("offer", {everybody: 0})
            elif not self._listen("offer", [everybody], REREAD_S if is_passed_up else 0.0):
                continue
            data = self._store.get(everybody)
            if data != AGAIN.encode():
                return self._decode_block(data, range(self._world))
            self._run = ""

    def _read_hello(self, keys: list[str], own: Record, *, is_early: bool) -> list[Record]:
        """Returns the first round's records of this rank's block. Returns none while some may be of an earlier run."""
        values = self._store.multi_get(keys)
        worlds: dict[int, int] = {}
        failure: SennitError | None = None
        records = [own]
        if self._rank != 0:
            of_first = values.pop(0)
            is_failure = b'"failed"' in of_first and not self._is_for_us(of_first)
            if is_failure and (is_early or self._is_mended(of_first)):
                return []
            worlds[0] = self._decode(of_first, 0, own)["world"]
        for child, value in zip(self._children, values, strict=True):
            try:
                block = self._decode_child(value, child, own)
            except (MismatchError, PeerError) as error:
                # An earlier run may have left the block.
                if is_early and len(subtree(child, self._world)) > 1 and not self._is_for_us(value):
                    return []
                failure = failure or error
                continue
            worlds |= {record_rank: record["world"] for record_rank, record in enumerate(block, child)}
            records += block
        # All are read first: a failure lists the ranks that it is for.
        if failure is not None:
            raise failure
        for peer, world in worlds.items():
            if world != self._world:
                if is_early:
                    return []
                raise MismatchError(
                    f"rank {peer} is in a world of {world} ranks, rank {self._rank} in one of {self._world}"
                )
        return records

    def _is_mended(self, data: bytes) -> bool:
        """Whether the rank that left this failure in place of rank 0 has greeted since. Then it is an earlier run's."""
        by = json.loads(data).get("by")
        if by is None:
            return False
        keys = [self._key("hello", by), self._key_of_child("hello", by)]
        return not any(b'"failed"' in (left or b"") for left in self._store.get_those_there(keys))

    def _pass_on(self, hello: list[Record]) -> None:
        if self._rank != 0:
            self._pass_up("hello", hello)
            return
        before = self._read_listing() if self._store.check([self._listing_key()]) else None
        self._run, self._listed = os.urandom(8).hex(), hello
        self._publish(self._listing_key(), {"run": self._run, "ranks": pack(hello)})
        if before is not None and "run" in before:
            self._store.set(f"sennit/{self._name}/{before['run']}/offer/all", AGAIN)

    def _find_run(self, *, is_early: bool) -> None:
        """Joins the newest run if it lists this process."""
        if not self._children and not self._strange_run:
            # This rank has nothing to read again.
            self._wait("hello", {self._listing_key(): 0})
        elif not self._listen("hello", [self._listing_key()], REREAD_S):
            return
        listing = self._read_listing()
        if listing is None:
            return
        if "failed" in listing:
            if is_early and self._nonce not in listing.get("nonces", []):
                return
            raise self._failure(listing, 0)
        run = str(listing["run"])
        if run == self._strange_run:
            return
        records = self._unpack(listing["ranks"].encode(), 0)
        if len(records) == self._world and records[self._rank].get("nonce") == self._nonce:
            self._heard |= {str(record.get("nonce")) for record in records}
            self._run, self._listed = run, records
            return
        self._strange_run = run
        if len(records) == self._world:
            other = Process.of_record(records[self._rank].get("process"))
            self._refuse_if_alive(other)
            if other is not None and not other.is_near(self._process):
                self._in_our_place = other

    def _claim(self, key: str, own: Record) -> None:
        """Leaves this rank's first record. Two processes with one rank cannot both think that they were first."""
        value, before = self._as_value(own), ""
        while (found := self._store.compare_or_set(key, before, value)) != value.encode():
            try:
                before, record = found.decode(), json.loads(found)
            except ValueError:  # no rank of ours wrote it
                self._store.set(key, value)
                return
            if isinstance(record, dict):
                self._heard.add(str(record.get("nonce")))
                self._refuse_if_alive(Process.of_record(record.get("process")))

    def _refuse_if_alive(self, other: Process | None) -> None:
        """Raises MismatchError if that is another process, and it lives. One of an earlier run may be just dying."""
        until_s = min(time.monotonic() + DYING_S, self._deadline_s)
        while other is not None and other.lives_beside(self._process):
            if time.monotonic() >= until_s:
                raise self._used_twice(other)
            time.sleep(WATCH_POLL_S)

    def _refuse_successor(self) -> None:
        """Raises MismatchError if another process has taken this rank's place."""
        data = self._store.get(self._key("hello", self._rank))
        try:
            record = json.loads(data)
            other = Process.of_record(record.get("process"))
        except (ValueError, AttributeError):
            return
        if other not in (None, self._process):
            self._heard.add(str(record.get("nonce")))
            raise self._used_twice(other)

    def _used_twice(self, other: Process) -> MismatchError:
        return MismatchError(
            f"two processes say that they are rank {self._rank} of {self._world}: {other}, and {self._process}; see "
            "what gives each its rank (RANK, or --node-rank of torchrun)"
        )

    def _read_listing(self) -> Record | None:
        """Rank 0's list of the newest run, which is there, or its failure. None: just deleted."""
        data = self._store.get(self._listing_key())
        if not data:
            return None
        try:
            record: Record = json.loads(data)
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(0, data) from error
        if mismatch is not None:
            raise MismatchError(f"rank 0 {mismatch}")
        if "failed" not in record and not all(isinstance(record.get(name), str) for name in ("run", "ranks")):
            raise self._foreign(0, data)
        return record

    @contextmanager
    def _telling(self, keys: Sequence[str]) -> Iterator[None]:
        """If this rank fails, leaves the reason where others wait for it. The deadline is theirs as well."""
        try:
            yield
        except TimeoutError:
            raise
        except Exception as raised:
            told = error = descriptors.explained(raised, world=self._world)
            if not isinstance(error, (MismatchError, PeerError)):
                reason = f"rank {self._rank} could not join {self._name}: {type(error).__name__}: {error}"
                told = PeerError(reason, rank=self._rank)
            failure = {
                "failed": str(told),
                "kind": "mismatch" if isinstance(told, MismatchError) else "peer",
                "rank": getattr(told, "rank", None),
                "nonces": sorted(self._heard),
            }
            # The store may be what failed. Then there is nobody to tell.
            with suppress(SennitError):
                for key in keys:
                    self._publish(key, failure)
                if self._rank != 0 and not self._run:
                    self._tell_in_place_of_first(failure)
                self._linger()
            if error is raised:
                raise
            raise error from raised

    def _tell_in_place_of_first(self, failure: Record) -> None:
        """Leaves a failure where all wait for rank 0, if that is not there: nobody else reads what this rank leaves.

        When rank 0 comes, it puts its own record there, and finds the failure by itself.
        """
        heard = set(failure["nonces"])
        for data in self._greetings().values():
            with suppress(ValueError, KeyError, TypeError):
                heard.add(str(json.loads(data)["nonce"]))
        self._store.compare_or_set(
            self._key("hello", 0), "", self._as_value({**failure, "nonces": sorted(heard), "by": self._rank})
        )

    def _greetings(self) -> dict[str, bytes]:
        """What ranks have left in the first round, by its key: their records, or why they could not join."""
        ranks = range(self._world)
        keys = list(dict.fromkeys(key("hello", rank) for key in (self._key, self._key_of_child) for rank in ranks))
        found = zip(keys, self._store.get_those_there(keys), strict=True)
        return {key: data for key, data in found if data is not None}

    def _linger(self) -> None:
        """Rank 0 waits until all others that it has heard of know of the failure."""
        self._count_as_failed()
        until_s = min(time.monotonic() + LINGER_S, self._deadline_s)
        others = min(len(self._heard - {self._nonce}), self._world - 1)
        while self._rank == 0 and time.monotonic() < until_s:
            if self._store.add(self._key("failed", "count"), 0) > others:
                return
            time.sleep(WATCH_POLL_S)

    def _count_as_failed(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._store.add(self._key("failed", "count"), 1)

    def _failure(self, record: Record, peer: int) -> SennitError:
        text = str(record["failed"])
        with suppress(SennitError):
            self._count_as_failed()
        self._heard |= set(map(str, record.get("nonces", [])))
        if record.get("kind") == "mismatch":
            return MismatchError(text)
        blamed = record.get("rank", peer)
        return PeerError(text, rank=blamed if isinstance(blamed, int) else None)

    def _awaited_of_us(self, round_name: str) -> str:
        """Where others find what this rank leaves in a round."""
        return self._key_of_child(round_name, self._rank) if self._rank else self._key(round_name, "all")

    def _authors(self, round_name: str) -> dict[str, int]:
        """Where this rank finds what its children leave in a round."""
        return {self._key_of_child(round_name, child): child for child in self._children}

    def _with_children(self, own: Record, blocks: Sequence[bytes]) -> list[Record]:
        """This rank's record, and behind it those that its children have left."""
        records = [own]
        for child, data in zip(self._children, blocks, strict=True):
            records += self._decode_child(data, child, own)
        return records

    def _pass_up(self, round_name: str, records: Sequence[Record]) -> None:
        """Leaves the block of this rank and those below it. Who has no children has left its record already."""
        if self._children:
            self._store.set(self._awaited_of_us(round_name), pack(records))

    def _listen(self, what: str, keys: list[str], limit_s: float) -> bool:
        """Looks whether all keys are there, for `limit_s` at most. Without keys it is a pause.

        (A TCPStore warns on the terminal where a `wait` takes too long.)
        """
        until_s, pause_s = time.monotonic() + limit_s, POLL_FIRST_S
        while not keys or not self._store.check(keys):
            now_s = time.monotonic()
            if now_s >= self._deadline_s:
                raise self._too_late(what, {self._key(what, "all"): 0})
            if now_s >= until_s:
                return False
            if self._watch is not None:
                self._watch()
            time.sleep(min(pause_s, until_s - now_s))
            pause_s = min(2 * pause_s, WATCH_POLL_S)
        return True

    def _await(self, what: str, authors: Mapping[str, int]) -> list[bytes]:
        """Waits for values, which the ranks `authors` leave under these keys, and reads them."""
        self._wait(what, authors)
        return self._store.multi_get(list(authors))

    def _wait(self, what: str, authors: Mapping[str, int]) -> None:
        keys = list(authors)
        if not keys:
            return
        if self._watch is not None:
            pause_s = POLL_FIRST_S
            while not self._store.check(keys):
                if time.monotonic() >= self._deadline_s:
                    raise self._too_late(what, authors)
                self._watch()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, WATCH_POLL_S)
            return
        left_s = self._deadline_s - time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=max(left_s, 0.001)))
        except TimeoutError as error:
            raise self._too_late(what, authors) from error
        except SennitError:
            raise
        except Exception as error:
            if time.monotonic() < self._deadline_s - STORE_CLOCK_SLACK_S:
                raise PeerError(f"rendezvous of {self._name}: the store failed: {error}{STORE_ADVICE}") from error
            raise self._too_late(what, authors) from error

    def _too_late(self, what: str, authors: Mapping[str, int]) -> TimeoutError:
        """Names the ranks that have left nothing, else the authors of what is not there."""
        own_keys = {self._key(what, rank): rank for rank in range(self._world)}
        missing = self._absent(own_keys) or self._absent(authors) or sorted(set(authors.values()))
        who = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        text = (
            f"rendezvous of {self._name}, round {what}: no word from {who} of {self._world} after {self._timeout_s:g} s"
        )
        if self._in_our_place is not None and not self._run:
            text += (
                f". Rank 0 has begun a run with {self._in_our_place} as rank {self._rank}, not with {self._process}: "
                "does another process have this rank number?"
            )
        if not self._run:
            text += "".join(f". In the store is: {reason}" for reason in self._reasons())
        return TimeoutError(text)

    def _reasons(self) -> list[str]:
        """Why ranks could not join, as they have left it where this rank does not read."""
        found: list[str] = []
        with suppress(SennitError):
            for data in self._greetings().values():
                with suppress(ValueError, KeyError, TypeError):
                    found.append(str(json.loads(data)["failed"]))
        return list(dict.fromkeys(found))

    def _absent(self, authors: Mapping[str, int]) -> list[int]:
        keys = list(authors)
        absent: list[int] = []
        for first in range(0, len(keys), FAN_IN):
            some = keys[first : first + FAN_IN]
            if not self._are_there(some):
                absent += [authors[key] for key in some if not self._are_there([key])]
        return sorted(set(absent))

    def _are_there(self, keys: list[str]) -> bool:
        try:
            return self._store.check(keys)
        except SennitError:
            # The store is gone as well, so no rank is there.
            return False

    def _publish(self, key: str, record: Record) -> None:
        self._store.set(key, self._as_value(record))

    def _as_value(self, record: Record) -> str:
        return json.dumps({**self._versions.as_record(), **record})

    def _decode_child(self, data: bytes, child: int, like: Record) -> list[Record]:
        ranks = subtree(child, self._world)
        return [self._decode(data, child, like)] if len(ranks) == 1 else self._decode_block(data, ranks)

    def _unpack(self, data: bytes, author: int) -> list[Record]:
        try:
            return unpack(data)
        except ValueError as error:
            raise self._foreign(author, data) from error

    def _decode_block(self, data: bytes, ranks: range) -> list[Record]:
        self._refuse_failure(data, ranks.start)
        records = self._unpack(data, ranks.start)
        if len(records) != len(ranks):
            raise MismatchError(
                f"rank {ranks.start} left {len(records)} records; expected: those of {len(ranks)} ranks"
            )
        self._heard |= {str(record["nonce"]) for record in records if "nonce" in record}
        return records

    def _decode_parcels(self, data: bytes, ranks: range, peer: int) -> list[bytes]:
        self._refuse_failure(data, peer)
        try:
            return unpack_parcels(data, len(ranks))
        except ValueError as error:
            raise self._foreign(peer, data) from error

    def _refuse_failure(self, data: bytes, peer: int) -> None:
        if data.startswith(b'{"'):  # not base85
            self._decode(data, peer, {})

    def _decode(self, data: bytes, peer: int, like: Record) -> Record:
        try:
            record: Record = json.loads(data)
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(peer, data) from error
        if mismatch is not None:
            raise MismatchError(f"rank {peer} {mismatch}")
        if "failed" in record:
            raise self._failure(record, peer)
        strange = [name for name, value in like.items() if type(record.get(name)) is not type(value)]
        if strange:
            raise MismatchError(
                f"rank {peer} published a record that sennit did not write: no valid {', '.join(strange)}"
            )
        if "nonce" in record:
            self._heard.add(record["nonce"])
        # Only what this round is about goes on: the versions are compared.
        return {name: record[name] for name in like} if like else record

    def _foreign(self, peer: int, data: bytes) -> MismatchError:
        return MismatchError(f"rank {peer} published a record that sennit did not write: {data[:80]!r}")

    def _is_for_us(self, data: bytes) -> bool:
        return self._nonce.encode() in data

    def _listing_key(self) -> str:
        return f"sennit/{self._name}/run"

    def _key_of_child(self, round_name: str, child: int) -> str:
        """Where a rank's parent finds its block, or its record if it has no children."""
        return self._key(round_name, child if len(subtree(child, self._world)) == 1 else f"{child}/block")

    def _key(self, round_name: str, what: int | str) -> str:
        run = "" if round_name == "hello" else f"{self._run}/"
        return f"sennit/{self._name}/{run}{round_name}/{what}"
