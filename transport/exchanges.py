# SPDX-License-Identifier: Apache-2.0
"""Rounds of rendezvous: every rank leaves a record in the store, and reads everybody's.

Keys hold the name of the group and, from the second round on, the number of the run: a store may hold the records of
an earlier one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from sennit.transport.errors import MismatchError, PeerError, SennitError, TimeoutError
from sennit.transport.store import CheckedStore, Store
from sennit.transport.version import Versions

# Stores count in milliseconds or use another clock. A store that gives up this little early has timed out, not failed.
STORE_CLOCK_SLACK_S: Final = 0.05
# The first pause between two looks at the store. The pause then grows up to WATCH_POLL_S.
POLL_FIRST_S: Final = 0.0005
# How often old records are read again, and for how long a record that fits no run may belong to an earlier run.
REREAD_S: Final = 0.1
OLD_RECORD_S: Final = 10.0
WATCH_POLL_S: Final = 0.01

Record: TypeAlias = dict[str, Any]


class Exchanges:
    """Exchanges one record of every rank at a time. One deadline holds for all exchanges."""

    def __init__(
        self, store: Store, *, name: str, rank: int, world: int, timeout_s: float, watch: Callable[[], None] | None
    ) -> None:
        self._store = CheckedStore(store, purpose=f"rendezvous of {name}")
        self._name = name
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._watch = watch
        self._versions = Versions.ours()
        self._nonce = secrets.token_hex(8)
        self._run = ""
        self._reread_s = 0.0
        self._deadline_s = time.monotonic() + timeout_s

    def exchange(self, round_name: str, make: Callable[[], Record]) -> list[Record]:
        """Publishes the record that `make` returns, and waits for everybody's. If `make` raises, the others get the
        reason.

        Every record must have the fields of `make`'s record, with the same types.
        """
        key = self._key(round_name, self._rank)
        try:
            record = make()
        except Exception as error:
            self._publish(key, {"failed": f"{type(error).__name__}: {error}"})
            raise
        self._publish(key, record)
        return [self._collect(round_name, peer, record) for peer in range(self._world)]

    def meet(self, make: Callable[[], Record]) -> list[Record]:
        """Runs the first round. Refuses a record of another world, unless an earlier run left it."""
        hello = self.exchange("hello", make)
        wait_until_s = min(time.monotonic() + OLD_RECORD_S, self._deadline_s)
        while strange := [peer for peer, record in enumerate(hello) if record["world"] != self._world]:
            if time.monotonic() >= wait_until_s:
                raise MismatchError(
                    f"rank {strange[0]} is in a world of {hello[strange[0]]['world']} ranks, rank {self._rank} in one "
                    f"of {self._world}"
                )
            if self._watch is not None:
                self._watch()
            time.sleep(REREAD_S)
            hello = [self._collect("hello", peer, record) for peer, record in enumerate(hello)]
        return hello

    def settle(self, hello: list[Record]) -> list[Record]:
        """Makes sure that all ranks are in one run.

        Returns `hello` without the records that an earlier run left in the store.
        """
        while True:
            if self._rank == 0:
                self._run = secrets.token_hex(8)
                nonces = [record["nonce"] for record in hello]
                self._publish(self._run_key(), {"run": self._run, "nonces": nonces})
            else:
                self._poll("run", self._is_listed)
            self._publish(self._key("here", self._rank), {})
            everybody = [self._key("here", peer) for peer in range(self._world)]
            # A rank that is not here yet may have left an old record. So rank 0 reads again, and lists again.
            self._poll("here", partial(self._are_here_or_gone_on, everybody, hello))
            if self._store.check(everybody):
                return [self._collect_of_run(peer, hello[peer]) for peer in range(self._world)]
            hello = [self._collect("hello", peer, record) for peer, record in enumerate(hello)]

    def own_nonce(self) -> str:
        """Returns the number that tells this process from an earlier one of the same rank."""
        return self._nonce

    @property
    def deadline_s(self) -> float:
        """The deadline on the clock `time.monotonic`."""
        return self._deadline_s

    def leave(self, record: Record, /) -> None:
        """Publishes this rank's record of the network trial. A later record replaces it."""
        self._publish(self._key("trial", self._rank), record)

    def look(self, peer: int, /) -> Record | None:
        """Returns the peer's record of the network trial, if it has left one."""
        key = self._key("trial", peer)
        if not self._store.check([key]):
            return None
        return self._decode(self._store.get(key), peer, {"messages": {}, "errors": {}})

    def _is_listed(self) -> bool:
        """Checks whether the newest run lists this process. If so, this process takes part in that run."""
        listed = self._read_run()
        if listed is None or listed["nonces"][self._rank : self._rank + 1] != [self._nonce]:
            return False
        self._run = str(listed["run"])
        return True

    def _are_here_or_gone_on(self, keys: list[str], hello: Sequence[Record]) -> bool:
        if self._store.check(keys):
            return True
        if time.monotonic() < self._reread_s:
            return False
        self._reread_s = time.monotonic() + REREAD_S
        return self._has_moved_on(hello)

    def _has_moved_on(self, hello: Sequence[Record]) -> bool:
        if self._rank != 0:
            listed = self._read_run()
            return listed is not None and listed["run"] != self._run
        return any(
            self._collect("hello", peer, record)["nonce"] != record["nonce"] for peer, record in enumerate(hello)
        )

    def _read_run(self) -> Record | None:
        if not self._store.check([self._run_key()]):
            return None
        return self._decode(self._store.get(self._run_key()), 0, {"run": "", "nonces": []})

    def _collect_of_run(self, peer: int, hello: Record) -> Record:
        listed = self._read_run()
        if listed is None or listed["run"] != self._run:
            raise PeerError(f"rendezvous of {self._name}: rank 0 was started again", rank=0)
        if hello["nonce"] == listed["nonces"][peer]:
            return hello
        return self._collect("hello", peer, hello)

    def _poll(self, what: str, is_done: Callable[[], bool]) -> None:
        pause_s = POLL_FIRST_S
        while not is_done():
            if self._watch is not None:
                self._watch()
            if time.monotonic() >= self._deadline_s:
                who = "rank 0" if what == "run" else self._missing(what, 0)
                raise TimeoutError(
                    f"rendezvous of {self._name}, {what}: no word from {who} of {self._world} after "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, WATCH_POLL_S)

    def _publish(self, key: str, record: Record) -> None:
        self._store.set(key, json.dumps({**self._versions.as_record(), **record}))

    def _collect(self, round_name: str, peer: int, like: Record) -> Record:
        key = self._key(round_name, peer)
        left_s = max(self._deadline_s - time.monotonic(), 0.001)
        try:
            if self._watch is not None:
                self._wait_watching(key, self._watch)
                left_s = STORE_CLOCK_SLACK_S
            self._store.wait([key], timedelta(seconds=left_s))
            data = self._store.get(key)
        except SennitError:
            raise
        except Exception as error:
            if time.monotonic() < self._deadline_s - STORE_CLOCK_SLACK_S:
                raise PeerError(f"rendezvous of {self._name}: the store failed: {error}") from error
            raise TimeoutError(
                f"rendezvous of {self._name}, round {round_name}: no word from {self._missing(round_name, peer)} "
                f"of {self._world} after {self._timeout_s:g} s"
            ) from error
        return self._decode(data, peer, like)

    def _wait_watching(self, key: str, watch: Callable[[], None]) -> None:
        while not self._store.check([key]) and time.monotonic() < self._deadline_s:
            watch()
            time.sleep(WATCH_POLL_S)

    def _decode(self, data: bytes, peer: int, like: Record) -> Record:
        try:
            record = json.loads(data)
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError) as error:
            raise MismatchError(f"rank {peer} published a record that sennit did not write: {data[:80]!r}") from error
        if mismatch is not None:
            raise MismatchError(f"rank {peer} {mismatch}")
        if "failed" in record:
            raise PeerError(f"rank {peer} could not join {self._name}: {record['failed']}", rank=peer)
        fields: Record = record
        strange = [name for name, value in like.items() if type(fields.get(name)) is not type(value)]
        if strange:
            raise MismatchError(
                f"rank {peer} published a record that sennit did not write: no valid {', '.join(strange)}"
            )
        return fields

    def _missing(self, round_name: str, first: int) -> str:
        missing = [peer for peer in range(first, self._world) if not self._is_there(self._key(round_name, peer))]
        ranks = ", ".join(map(str, missing or [first]))
        return f"rank {ranks}" if len(missing) < 2 else f"ranks {ranks}"

    def _is_there(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except SennitError:
            # The store is gone as well, so no rank is there.
            return False

    def _run_key(self) -> str:
        return f"sennit/{self._name}/run"

    def _key(self, round_name: str, rank: int) -> str:
        run = "" if round_name == "hello" else f"{self._run}/"
        return f"sennit/{self._name}/{run}{round_name}/{rank}"
