# SPDX-License-Identifier: Apache-2.0
"""Membership: the processes of a group agree through its store on the group's next members.

A group's life is a chain of *epochs*. Epoch 0 is the group as it was made. A process that wants to be in the next epoch
announces itself there and beats. The first member to come is the *speaker*: it alone reads everybody's record. Once it
sees everybody it expects (or knows why not), it proposes the list of those present. The others read only the speaker's
record, so the work of a beat does not grow with the group. If the speaker stops, the next one speaks. The store's
compare-and-set turns one proposal into the decision, which nobody can change. docs/reference/membership.md has the
protocol, its timers and limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from sennit.transport.errors import ArgumentError, MismatchError, PeerError, SennitError, TimeoutError
from sennit.transport.meeting.store import CheckedStore, Store
from sennit.transport.meeting.version import Versions

# A candidate rewrites its record this often. If the decision takes longer than BEATS_FAST, less often.
BEAT_S: Final = 0.05
BEATS_FAST: Final = 20
BEAT_SLOW_S: Final = 0.2
# A candidate whose beats stop for this long is dead or has given up.
STALE_S: Final = 1.0
# How many missing ranks the speaker's record names, for the others' errors.
MISSING_NAMED: Final = 16
# How long to wait for a silent rank that is not known to be dead.
SUSPECT_S: Final = 0.5
# The time for one attempt to connect a decided epoch. After it, the next epoch is tried.
CONNECT_S: Final = 15.0

# The fields of a candidate's record, besides the versions.
_FIELDS: Final = frozenset(("token", "beat", "may_propose", "here", "missing", "gone", "suspects", "exclude"))

Connected = TypeVar("Connected")
Watch = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class View:
    """A decided epoch, as one of its members sees it."""

    epoch: int
    members: tuple[str, ...]
    """Tokens in rank order: survivors in their old order, then newcomers in order of arrival."""

    rank: int
    """This process's token."""

    previous_ranks: tuple[int | None, ...]
    """By new rank: the rank in this process's previous group; None for ranks that were not in it."""

    @property
    def world(self) -> int:
        return len(self.members)


class Evidence(Protocol):
    """What the old communicator knows about its ranks. Each call may give a new answer."""

    def find_gone(self) -> Collection[int]:
        """Ranks whose processes, or whose ends of the group, are gone."""

    def suspects(self) -> Collection[int]:
        """Ranks that a failure blames."""


class NoEvidence:
    """The witness of a newcomer, who knows nothing."""

    def find_gone(self) -> Collection[int]:
        return ()

    def suspects(self) -> Collection[int]:
        return ()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A member's requirements for the next epoch."""

    timeout_s: float = 60.0
    """Deadline for everything: agreement, connection, further attempts."""

    wait_s: float = 10.0
    """How long to wait for absent ranks that are not known to be gone, and for `expect`."""

    min_world: int = 1
    """With fewer ranks there is an error instead of an epoch."""

    expect: int | None = None
    """Wait for this many ranks, newcomers included (at most `wait_s`)."""

    exclude: tuple[int, ...] = ()
    """Old ranks to leave out, alive or not. They need not call.

    Checked against the group's size by `reform`: 0 to world - 1, without the own rank.
    """

    def __post_init__(self) -> None:
        for name, value in (("timeout_s", self.timeout_s), ("wait_s", self.wait_s)):
            if not 0 <= value < float("inf"):
                raise ArgumentError(f"{name} {value}; allowed: 0 or more seconds")
        if self.min_world < 1:
            raise ArgumentError(f"min_world {self.min_world}; allowed: 1 or more")
        if self.expect is not None and self.expect < self.min_world:
            raise ArgumentError(f"expect {self.expect}; allowed: min_world ({self.min_world}) or more")


@dataclass
class _Candidate:
    ticket: int
    record: dict[str, Any]
    changed_s: float
    is_confirmed: bool = False
    """Whether it has beaten since we first saw it."""


@dataclass
class _Speaker:
    """The first candidate that may propose, as far as this process knows."""

    changed_s: float
    ticket: int = 1
    record: dict[str, Any] | None = None
    """The speaker's record as last read. None: it has taken a ticket and has left no record yet."""


class Membership:
    """This process's place in the chain of epochs of one group. Not thread-safe."""

    def __init__(self, store: Store, *, name: str, token: str, members: tuple[str, ...], versions: Versions) -> None:
        self._store = CheckedStore(
            store,
            purpose=name,
            advice="; a new epoch needs a store that outlives the ranks, so no rank that may die should serve it",
        )
        self._base = f"sennit/{name}/membership"
        self._name = name
        self._token = token
        self._members = members
        self._versions = versions
        self._epoch = 0

    @classmethod
    def of_founder(cls, store: Store, *, name: str, rank: int, world: int) -> Membership:
        """Returns the membership of a rank that is in the group from the beginning."""
        members = tuple(f"rank-{founder}" for founder in range(world))
        return cls(store, name=name, token=members[rank], members=members, versions=Versions.ours())

    @classmethod
    def of_newcomer(cls, store: Store, *, name: str) -> Membership:
        """Returns the membership of a process that is not yet in the group."""
        number = store.add(f"sennit/{name}/membership/newcomers", 1)
        return cls(store, name=name, token=f"newcomer-{number}", members=(), versions=Versions.ours())

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def is_newcomer(self) -> bool:
        return not self._members

    def waiting_count(self) -> int:
        """Returns how many processes have announced themselves for the next epoch so far."""
        return self._store.add(self._key(self._epoch + 1, "tickets"), 0)

    def reform(
        self, terms: Terms, evidence: Evidence, connect: Callable[[View, Watch, float], Connected]
    ) -> tuple[View, Connected]:
        """Agrees on an epoch and connects it. Tries further epochs until the deadline.

        `connect(view, watch, timeout_s)` joins the ranks of `view`. While it waits it calls `watch`, which raises when
        the attempt can no longer succeed.
        """
        self._check_excluded(terms)
        deadline_s = time.monotonic() + terms.timeout_s
        epoch = self._epoch
        failure = ""
        tried: tuple[str, ...] = ()
        while True:
            view = self._agree(epoch + 1, terms, evidence, deadline_s, tried, failure)
            epoch = view.epoch
            left_s = max(deadline_s - time.monotonic(), 0.001)
            try:
                connected = connect(view, self._watch_of(view, evidence), min(CONNECT_S, left_s))
            except Exception as error:
                self._store.set(self._key(epoch, "abandoned"), f"{type(error).__name__}: {error}")
                # Another attempt helps only if another rank caused the failure.
                is_theirs = isinstance(error, (PeerError, TimeoutError)) or not isinstance(error, SennitError)
                if not isinstance(error, RuntimeError) or not is_theirs:
                    raise
                tried, failure = view.members, f"; epoch {epoch} was not connected: {error}"
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(
                        f"{self._name}: no new epoch within {terms.timeout_s:g} s{failure}; end ranks that hang, or "
                        "allow longer (timeout_s)"
                    ) from error
                continue
            self._members, self._epoch = view.members, epoch
            return view, connected

    def _check_excluded(self, terms: Terms) -> None:
        if self.is_newcomer and terms.exclude:
            raise ArgumentError(f"a newcomer excludes {terms.exclude}; allowed: nothing, because it knows no ranks")
        own = self._members.index(self._token) if self._members else None
        for rank in terms.exclude:
            if not 0 <= rank < len(self._members) or rank == own:
                raise ArgumentError(
                    f"rank {own} excludes rank {rank}; allowed: other ranks of the group before, "
                    f"0..{len(self._members) - 1}"
                )

    def _agree(
        self, epoch: int, terms: Terms, evidence: Evidence, deadline_s: float, tried: tuple[str, ...], failure: str
    ) -> View:
        """Returns the first decision from `epoch` on that includes this process.

        A member accepts only `epoch` itself. `tried` are the members of the epoch before, if it was not connected.
        """
        while True:
            members = self._decide(epoch, terms, evidence, deadline_s, tried, failure)
            if self._token in members:
                old = {token: rank for rank, token in enumerate(self._members)}
                return View(
                    epoch=epoch,
                    members=members,
                    rank=members.index(self._token),
                    previous_ranks=tuple(old.get(token) for token in members),
                )
            if not self.is_newcomer:
                raise PeerError(
                    f"{self._name}: the others went on without this rank ({self._members.index(self._token)} of "
                    f"{len(self._members)}): epoch {epoch} has {len(members)} ranks without it; it may "
                    "join as a newcomer"
                )
            epoch += 1

    def _decide(
        self, epoch: int, terms: Terms, evidence: Evidence, deadline_s: float, tried: tuple[str, ...], failure: str
    ) -> tuple[str, ...]:
        """Takes part in `epoch` until it is decided, by this process or another."""
        key = self._key(epoch, "decision")
        if (decided := self._read_decision(epoch)) is not None:
            return decided
        ticket = self._store.add(self._key(epoch, "tickets"), 1)
        seen: dict[str, _Candidate] = {}
        silent: dict[int, float] = {}
        started_s = time.monotonic()
        speaker = _Speaker(changed_s=started_s)
        here, missing = 0, list[str]()
        beat = 0
        while True:
            beat += 1
            gone = {self._members[rank] for rank in evidence.find_gone()}
            mine = {
                "token": self._token,
                "beat": beat,
                "may_propose": not self.is_newcomer,
                "here": here,
                "missing": missing[:MISSING_NAMED],
                "gone": sorted(gone),
                "suspects": sorted(self._members[rank] for rank in evidence.suspects()),
                "exclude": sorted(self._members[rank] for rank in terms.exclude),
                **self._versions.as_record(),
            }
            self._store.set(self._key(epoch, f"candidate/{ticket}"), json.dumps(mine))
            if (decided := self._read_decision(epoch)) is not None:
                return decided
            now_s = time.monotonic()
            if self._speaks(epoch, ticket, speaker, now_s):
                self._look_at_candidates(epoch, seen, silent, now_s)
                # Whoever has a ticket is about to leave a record. Its packet may be late. And who was in an epoch that
                # was not connected comes to this one, once it has heard of that.
                is_quiet = all(now_s - since_s >= STALE_S for since_s in silent.values())
                is_quiet &= seen.keys() >= set(tried) or now_s - started_s >= STALE_S
                present, absent, is_settled = self._judge(seen, terms, now_s, now_s - started_s)
                here, missing = len(present), [token for token in self._members if token in absent]
                if is_settled and is_quiet and here >= terms.min_world:
                    chosen = self._store.compare_set(key, "", json.dumps(self._in_order(epoch, present, seen)))
                    return self._decode_decision(epoch, chosen)
            elif speaker.record is not None:
                here, missing = int(speaker.record["here"]), list(speaker.record["missing"])
            if now_s >= deadline_s:
                raise TimeoutError(self._complaint(epoch, terms, here, missing) + failure)
            pause_s = BEAT_S if beat < BEATS_FAST else BEAT_SLOW_S
            time.sleep(min(pause_s, max(deadline_s - now_s, 0.001)))

    def _speaks(self, epoch: int, ticket: int, speaker: _Speaker, now_s: float) -> bool:
        """Checks whether all candidates before this one are gone or may not propose. Reads the first of the others.

        A newcomer never speaks. It looks beyond its own ticket, for a member that speaks.
        """
        while self.is_newcomer or speaker.ticket < ticket:
            key = self._key(epoch, f"candidate/{speaker.ticket}")
            data = self._store.get(key) if self._store.check([key]) else None
            if data is None and self.is_newcomer:
                return False
            record = None if data is None else self._decode_candidate(data)
            if data is None or (record is not None and record["may_propose"]):
                before = None if speaker.record is None else speaker.record["beat"]
                if record is not None and record["beat"] != before:
                    speaker.record, speaker.changed_s = record, now_s
                if now_s - speaker.changed_s < STALE_S:
                    return False
            speaker.ticket, speaker.record, speaker.changed_s = speaker.ticket + 1, None, now_s
        return True

    def _decode_candidate(self, data: bytes) -> dict[str, Any] | None:
        """Returns a candidate's record, or None if it is not one of this version.

        Members ignore a process of another version. That process learns the reason from their records, and fails here.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            token = str(record["token"])
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError):
            return None
        if mismatch is not None:
            if self.is_newcomer:
                raise MismatchError(f"{self._name}: {token} {mismatch}")
            return None
        return record if record.keys() >= _FIELDS else None

    def _look_at_candidates(
        self, epoch: int, seen: dict[str, _Candidate], silent: dict[int, float], now_s: float
    ) -> None:
        """Brings `seen` (by token) up to date, and `silent`: since when tickets without a record were seen."""
        tickets = range(1, self._store.add(self._key(epoch, "tickets"), 0) + 1)
        found = self._store.get_those_there([self._key(epoch, f"candidate/{ticket}") for ticket in tickets])
        for ticket, data in zip(tickets, found, strict=True):
            if data is None:
                silent.setdefault(ticket, now_s)
                continue
            silent.pop(ticket, None)
            record = self._decode_candidate(data)
            if record is None:
                continue
            token = str(record["token"])
            known = seen.get(token)
            if known is None or known.ticket < ticket:
                seen[token] = _Candidate(ticket, record, now_s, is_confirmed=token == self._token)
            elif known.record["beat"] != record["beat"]:
                known.record, known.changed_s, known.is_confirmed = record, now_s, True

    def _judge(
        self, seen: dict[str, _Candidate], terms: Terms, now_s: float, waited_s: float
    ) -> tuple[set[str], set[str], bool]:
        """Returns (ranks that are here, ranks we wait for, whether all others are not worth waiting for)."""
        fresh = {token: one for token, one in seen.items() if now_s - one.changed_s < STALE_S}

        def told(field: str) -> set[str]:
            return {token for one in fresh.values() if one.is_confirmed for token in one.record[field]}

        excluded = told("exclude")
        present = {token for token, one in fresh.items() if one.is_confirmed and token not in excluded}
        unclear = {token for token, one in fresh.items() if not one.is_confirmed and token not in excluded}
        # A process that announced itself is alive, whatever others report.
        missing = set(self._members) - fresh.keys() - excluded - told("gone")
        if waited_s >= SUSPECT_S:
            missing -= told("suspects")
        is_settled = not unclear and not missing and (terms.expect is None or len(present) >= terms.expect)
        return present, missing, is_settled or (waited_s >= terms.wait_s and not unclear)

    def _in_order(self, epoch: int, present: set[str], seen: dict[str, _Candidate]) -> list[str]:
        before = self._members if epoch == 1 else self._read_decision(epoch - 1) or self._members
        survivors = [token for token in before if token in present]
        newcomers = sorted(present - set(survivors), key=lambda token: seen[token].ticket)
        return survivors + newcomers

    def _watch_of(self, view: View, evidence: Evidence) -> Watch:
        abandoned = self._key(view.epoch, "abandoned")

        def watch() -> None:
            for rank in evidence.find_gone():
                if self._members[rank] in view.members:
                    raise PeerError(f"old rank {rank} died while epoch {view.epoch} was being connected", rank)
            if self._store.check([abandoned]):
                reason = self._store.get(abandoned).decode(errors="replace")
                raise PeerError(f"another rank gave up epoch {view.epoch}: {reason}")

        return watch

    def _complaint(self, epoch: int, terms: Terms, here: int, missing: Collection[str]) -> str:
        text = f"{self._name}: epoch {epoch} was not agreed upon within {terms.timeout_s:g} s: "
        if self.is_newcomer:
            return text + "no member of the group reconfigures it"
        text += f"{here} ranks are here"
        if here < terms.min_world:
            text += f", at least {terms.min_world} are wanted"
        if terms.expect is not None and here < terms.expect:
            text += f", {terms.expect} are expected"
        ranks = [str(rank) for rank, token in enumerate(self._members) if token in missing]
        return text + (f"; no word from old rank {', '.join(ranks)}" if ranks else "")

    def _read_decision(self, epoch: int) -> tuple[str, ...] | None:
        key = self._key(epoch, "decision")
        return self._decode_decision(epoch, self._store.get(key)) if self._store.check([key]) else None

    def _decode_decision(self, epoch: int, data: bytes) -> tuple[str, ...]:
        try:
            members = json.loads(data)
        except ValueError:
            members = None
        if not isinstance(members, list) or not all(isinstance(token, str) for token in members):
            raise MismatchError(f"{self._name}: the decision on epoch {epoch} was not written by sennit: {data[:80]!r}")
        return tuple(members)

    def _key(self, epoch: int, what: str) -> str:
        return f"{self._base}/{epoch}/{what}"
