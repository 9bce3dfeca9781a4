# SPDX-License-Identifier: Apache-2.0
"""Rounds of rendezvous: every rank leaves a record in the store, and learns everybody's.

Records travel up a tree of ranks: a rank with children reads what they left, and leaves one block. Rank 0 leaves the
block of all, which everybody reads. So a rank reads a few dozen keys and O(world) bytes, in O(log world) steps.

Keys hold the name of the group and, from the second round on, the number of the run: a store may hold the records of
an earlier one. Records go when all have read them: at the end of a round each rank deletes what it left for earlier
ones, and the last rank that is connected deletes the rest (`finish`).
"""

from __future__ import annotations

import base64
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
        self._listed = b""  # the records of the run, as rank 0 left them
        self._children = children_of(rank, world)
        self._heard: set[str] = set()
        self._strange_run = ""
        self._has_failed = False
        self._in_our_place: Process | None = None  # in that run
        self._deadline_s = time.monotonic() + timeout_s
        # What this rank left and nobody has deleted, and the round that came last.
        self._left: list[str] = []
        self._last_round = ""

    @property
    def deadline_s(self) -> float:
        """The deadline on the clock `time.monotonic`."""
        return self._deadline_s

    def exchange(self, round_name: str, make: Callable[[], Record]) -> list[Record]:
        """Publishes the record that `make` returns, and waits for everybody's. If `make` raises, the others get the
        reason.

        Every record must have the fields of `make`'s record, with the same types.
        """
        everybody = self._key(round_name, "all")
        # Whoever takes part in this round has read all of those before.
        read, self._last_round = list(self._left), round_name
        with self._telling([self._key_of_child(round_name, self._rank) if self._rank else everybody]):
            own = make()
            self._left.append(self._key(round_name, self._rank))
            self._publish(self._key(round_name, self._rank), own)
            authors = {self._key_of_child(round_name, child): child for child in self._children}
            records = [own]
            for child, data in zip(self._children, self._await(round_name, authors), strict=True):
                records += self._decode_child(data, child, own)
        if self._rank == 0:
            self._write(everybody, pack(records))
            self._delete(read)
            return records
        if self._children:
            self._write(self._key_of_child(round_name, self._rank), pack(records))
        (data,) = self._await(round_name, {everybody: 0})
        self._delete(read)
        return self._decode_block(data, range(self._world))

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

    def meet(self, make: Callable[[], Record]) -> list[Record]:
        """Runs the first round, and makes sure that all ranks are in one run. Returns the records of that run.

        Rank 0 lists the records that it read, under the number of a run. A rank that finds itself in the list counts
        itself. When all are counted, rank 0 says go. An earlier run may have left records and lists. So ranks with
        children read again until then, and rank 0 lists again if anything has changed.

        Refuses a record of another world, unless an earlier run left it; and another process with this rank, where it
        can be seen that it lives, or where it came later.
        """
        own_key = self._key("hello", self._rank)
        authors = {self._key("hello", 0): 0} if self._rank else {}
        authors |= {self._key_of_child("hello", child): child for child in self._children}
        awaited_of_us = [self._key_of_child("hello", self._rank)] if self._rank else [own_key, self._listing_key()]
        with self._telling(awaited_of_us):
            own = {"nonce": self._nonce, "world": self._world, "process": self._process.as_record(), **make()}
            self._claim(own_key, own)
            self._wait("hello", authors)
            old_until_s = min(time.monotonic() + OLD_RECORD_S, self._deadline_s - 2 * REREAD_S)
            return self._settle(own, list(authors), old_until_s)

    def put(self, what: str, data: bytes, /) -> None:
        """Leaves something that few ranks read, before this rank's record of a round. They read it before the next."""
        self._write(self._key(what, self._rank), base64.b64encode(data).decode())

    def get(self, what: str, peers: list[int], /) -> list[bytes]:
        """Reads what these ranks have put. After that round."""
        found: list[bytes] = []
        for first in range(0, len(peers), FAN_IN):
            found += self._store.multi_get([self._key(what, peer) for peer in peers[first : first + FAN_IN]])
        return [base64.b64decode(data) for data in found]

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
            if self._store.add(self._key("done", "count"), 1) != self._world:
                return
            of_tree = [self._last_round, *([] if keeps_greeting else ["hello"])]
            ranks = range(self._world)
            keys = [self._key(name, rank) for name in (*of_tree, "pairs", "trial") for rank in ranks]
            keys += [self._key_of_child(name, rank) for name in of_tree for rank in ranks]
            keys += [self._key(self._last_round, "all"), self._key("done", "count")]
            if not keeps_greeting:
                # The listing goes before what it lists.
                keys += [self._listing_key(), self._key("run", "all")]
            self._store.delete(set(keys))

    def _write(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._left.append(key)

    def _delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)
        self._left = [key for key in self._left if key not in keys]

    def _settle(self, own: Record, keys: list[str], old_until_s: float) -> list[Record]:
        known: list[Record] = []
        reread_s, pause_s = 0.0, POLL_FIRST_S
        while True:
            now_s = time.monotonic()
            if now_s >= reread_s:
                if reread_s:
                    self._refuse_successor()
                reread_s = now_s + REREAD_S
                read = self._read_hello(keys, own, is_early=now_s < old_until_s)
                if read and read != known:
                    known = read
                    self._pass_on(known)
            if self._rank != 0 and not self._run:
                self._find_run(is_early=now_s < old_until_s)
            if self._run:
                awaited = {self._key("here", "full" if self._rank == 0 else "go"): 0}
                if not self._children:
                    # This rank has nothing to read again. Rank 0 ends this wait also when it begins another run.
                    self._wait("here", awaited)
                if not self._children or self._store.check(list(awaited)):
                    if self._rank == 0:
                        self._write(self._key("here", "go"), "")
                        self._left += [self._key("here", "count"), self._key("here", "full")]
                        return known
                    if self._store.get(self._key("here", "go")) != AGAIN.encode():
                        return self._decode_block(self._listed, range(self._world))
                    self._run = ""
            if self._watch is not None:
                self._watch()
            if time.monotonic() >= self._deadline_s:
                what = "here" if self._run else "hello"
                raise self._too_late(what, {self._key(what, "go"): 0})
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, WATCH_POLL_S)

    def _read_hello(self, keys: list[str], own: Record, *, is_early: bool) -> list[Record]:
        """Returns the first round's records of this rank's block. Returns none while some may be of an earlier run."""
        values = self._store.multi_get(keys)
        worlds: dict[int, int] = {}
        failure: SennitError | None = None
        records = [own]
        if self._rank != 0:
            of_first = values.pop(0)
            if is_early and b'"failed"' in of_first and not self._is_for_us(of_first):
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

    def _pass_on(self, hello: list[Record]) -> None:
        if self._rank != 0:
            if self._children:
                self._store.set(self._key_of_child("hello", self._rank), pack(hello))
            return
        before = self._read_listing()
        self._run = os.urandom(8).hex()
        self._store.set(self._key("run", "all"), pack(hello))
        self._publish(self._listing_key(), {"run": self._run})
        if before is not None and "run" in before:
            self._store.set(f"sennit/{self._name}/{before['run']}/here/go", AGAIN)
        self._count()

    def _find_run(self, *, is_early: bool) -> None:
        """Joins the newest run if it lists this process."""
        is_first = not self._children and not self._strange_run
        if is_first:
            self._wait("hello", {self._listing_key(): 0})
        listing = self._read_listing(is_there=is_first)
        if listing is None:
            return
        if "failed" in listing:
            if is_early and self._nonce not in listing.get("nonces", []):
                return
            raise self._failure(listing, 0)
        run = str(listing["run"])
        if run == self._strange_run:
            return
        listed = f"sennit/{self._name}/{run}/run/all"
        if not self._store.check([listed]):
            return  # of a group that is connected
        self._listed = self._store.get(listed)
        records = unpack(self._listed)
        if len(records) == self._world and records[self._rank].get("nonce") == self._nonce:
            self._run = run
            self._count()
        else:
            self._strange_run = run
            if len(records) == self._world:
                other = Process.of_record(records[self._rank].get("process"))
                self._refuse_if_alive(other)
                if other is not None and not other.is_near(self._process):
                    self._in_our_place = other

    def _claim(self, key: str, own: Record) -> None:
        """Leaves this rank's first record. Two processes with one rank cannot both think that they were first."""
        value, before = self._as_value(own), ""
        while (found := self._store.compare_set(key, before, value)) != value.encode():
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

    def _count(self) -> None:
        self._write(self._key("here", self._rank), "")
        if self._store.add(self._key("here", "count"), 1) == self._world:
            self._store.set(self._key("here", "full"), "")

    def _read_listing(self, *, is_there: bool = False) -> Record | None:
        key = self._listing_key()
        if not is_there and not self._store.check([key]):
            return None
        data = self._store.get(key)
        try:
            record: Record = json.loads(data)
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(0, data) from error
        if mismatch is not None:
            raise MismatchError(f"rank 0 {mismatch}")
        if "failed" not in record and not isinstance(record.get("run"), str):
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
                self._linger()
            if error is raised:
                raise
            raise error from raised

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
        return TimeoutError(text)

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

    def _decode_block(self, data: bytes, ranks: range) -> list[Record]:
        self._refuse_failure(data, ranks.start)
        try:
            records = unpack(data)
        except ValueError as error:
            raise self._foreign(ranks.start, data) from error
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
