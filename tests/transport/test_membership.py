# SPDX-License-Identifier: Apache-2.0
"""The agreement on the next epoch: candidates as threads over one folder, with simulated connections."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sennit.transport import errors
from sennit.transport.errors import ArgumentError, ConfigError, MismatchError, PeerError
from sennit.transport.meeting import membership
from sennit.transport.meeting.membership import Membership, NoEvidence, Terms, View
from sennit.transport.meeting.store import FileStore

NAME = "group"
# Longer than any wait in these tests: a test that really waits fails by its own timeout.
PATIENT = Terms(timeout_s=600, wait_s=600)
DEADLINE_S = 60.0


class Evidence:
    """An old communicator with this knowledge about its ranks."""

    def __init__(self, gone: Collection[int] = (), suspects: Collection[int] = ()) -> None:
        self._gone, self._suspects = gone, suspects

    def find_gone(self) -> Collection[int]:
        return self._gone

    def suspects(self) -> Collection[int]:
        return self._suspects


class Candidate:
    """A rank (or a newcomer, with rank None) that takes part in the agreement from its own thread."""

    def __init__(
        self,
        folder: Path,
        rank: int | None,
        world: int = 0,
        *,
        terms: Terms = PATIENT,
        evidence: membership.Evidence | None = None,
        fail_at: int = 0,
        error: type[Exception] = PeerError,
    ) -> None:
        """The connection of epoch `fail_at` fails with `error`."""
        store = FileStore(folder)
        self.own = (
            Membership.of_newcomer(store, name=NAME)
            if rank is None
            else Membership.of_founder(store, name=NAME, rank=rank, world=world)
        )
        self.terms, self.evidence = terms, evidence or NoEvidence()
        self._fail_at, self._error = fail_at, error
        self._last_epoch = 0
        self.tried: list[int] = []
        """Epochs that it tried to connect."""

    def connect(self, view: View, watch: membership.Watch, timeout_s: float) -> str:
        self.tried.append(view.epoch)
        if view.epoch == self._fail_at:
            raise self._error(f"epoch {view.epoch} cannot be connected here")
        # Only the watch tells a candidate that its attempt is in vain.
        deadline_s = time.monotonic() + DEADLINE_S
        while view.epoch < self._last_epoch:
            watch()
            assert time.monotonic() < deadline_s, f"epoch {view.epoch} goes on"
            time.sleep(0.001)
        return f"epoch-{view.epoch}"

    def reform(self, last_epoch: int = 0) -> Any:
        """Returns the view, or the raised error. Stays in epochs before `last_epoch` until the watch ends them."""
        self._last_epoch = last_epoch
        try:
            view, connected = self.own.reform(self.terms, self.evidence, self.connect)
        except Exception as error:
            return error
        assert connected == f"epoch-{view.epoch}"
        assert self.own.epoch == view.epoch
        return view


def meet(candidates: Sequence[Candidate], last_epoch: int = 0) -> list[Any]:
    with ThreadPoolExecutor(len(candidates)) as pool:
        return list(pool.map(lambda candidate: candidate.reform(last_epoch), candidates))


def previous(views: Sequence[View]) -> list[tuple[int, tuple[int | None, ...]]]:
    return [(view.rank, view.previous_ranks) for view in views]


def test_all_who_are_there_keep_their_order(tmp_path: Path) -> None:
    candidates = [Candidate(tmp_path, rank, 3) for rank in range(3)]
    views = meet(candidates)
    assert previous(views) == [(rank, (0, 1, 2)) for rank in range(3)]
    assert {view.epoch for view in views} == {1}
    # The new group can agree again.
    assert previous(meet(candidates)) == [(rank, (0, 1, 2)) for rank in range(3)]
    assert [candidate.own.epoch for candidate in candidates] == [2, 2, 2]


def test_what_one_knows_of_the_dead_all_use(tmp_path: Path) -> None:
    knows = Candidate(tmp_path, 0, 4, evidence=Evidence(gone=[1]))
    views = meet([knows, Candidate(tmp_path, 2, 4), Candidate(tmp_path, 3, 4)])
    assert previous(views) == [(rank, (0, 2, 3)) for rank in range(3)]


def test_a_silent_rank_is_given_up_after_a_while_and_one_that_comes_is_not(tmp_path: Path) -> None:
    suspicious = [Candidate(tmp_path, rank, 3, evidence=Evidence(suspects=[1, 2])) for rank in (0, 1)]
    assert previous(meet(suspicious)) == [(0, (0, 1)), (1, (0, 1))]


def test_nobody_is_waited_for_longer_than_said(tmp_path: Path) -> None:
    (view,) = meet([Candidate(tmp_path, 1, 2, terms=Terms(timeout_s=600, wait_s=0.2))])
    assert previous([view]) == [(0, (1,))]


def test_the_excluded_are_left_out_although_they_come(tmp_path: Path) -> None:
    terms = Terms(timeout_s=600, wait_s=600, exclude=(1,))
    views = meet([Candidate(tmp_path, 0, 3, terms=terms), Candidate(tmp_path, 1, 3), Candidate(tmp_path, 2, 3)])
    assert previous([views[0], views[2]]) == [(0, (0, 2)), (1, (0, 2))]
    assert isinstance(views[1], PeerError)
    assert "the others went on without this rank (1 of 3): epoch 1 has 2 ranks" in str(views[1])


@pytest.mark.parametrize(
    ("rank", "exclude", "complaint"),
    [
        (0, (2,), r"rank 0 excludes rank 2; allowed: other ranks of the group before, 0\.\.1"),
        (0, (-1,), "rank 0 excludes rank -1"),
        (1, (1,), "other ranks of the group before"),
        (None, (0,), "a newcomer excludes .*; allowed: nothing"),
    ],
)
def test_impossible_exclusions_are_refused(
    tmp_path: Path, rank: int | None, exclude: tuple[int, ...], complaint: str
) -> None:
    refused = Candidate(tmp_path, rank, 2, terms=Terms(exclude=exclude)).reform()
    assert isinstance(refused, ArgumentError)
    with pytest.raises(ArgumentError, match=complaint):
        raise refused


def test_one_that_comes_too_late_is_told(tmp_path: Path) -> None:
    late = Candidate(tmp_path, 1, 2)
    assert previous(meet([Candidate(tmp_path, 0, 2, evidence=Evidence(gone=[1]))])) == [(0, (0,))]
    refused = late.reform()
    assert isinstance(refused, PeerError)
    assert "it may join as a newcomer" in str(refused)
    assert late.tried == []


def test_newcomers_come_last_in_the_order_of_their_tickets(tmp_path: Path) -> None:
    terms = Terms(timeout_s=600, wait_s=600, expect=4)
    second, first = (
        Candidate(tmp_path, None) for _ in range(2)
    )  # in neither the order of their tokens nor that of threads
    with ThreadPoolExecutor(4) as pool:
        came_first = pool.submit(first.reform)
        deadline_s = time.monotonic() + DEADLINE_S
        while first.own.waiting_count() < 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        founders = [pool.submit(Candidate(tmp_path, rank, 2, terms=terms).reform) for rank in range(2)]
        came_second = pool.submit(second.reform).result()
        views = [future.result() for future in (*founders, came_first)]
    assert previous(views[:2]) == [(0, (0, 1, None, None)), (1, (0, 1, None, None))]
    assert previous([views[2], came_second]) == [(2, (None,) * 4), (3, (None,) * 4)]
    assert {view.members for view in views} == {came_second.members}


def test_a_newcomer_decides_nothing_by_itself(tmp_path: Path) -> None:
    refused = Candidate(tmp_path, None, terms=Terms(timeout_s=0.3, wait_s=0)).reform()
    assert isinstance(refused, errors.TimeoutError)
    assert "no member of the group reconfigures it" in str(refused)


def test_too_few_are_no_group(tmp_path: Path) -> None:
    refused = Candidate(tmp_path, 0, 3, terms=Terms(timeout_s=0.3, wait_s=0, min_world=2)).reform()
    assert isinstance(refused, errors.TimeoutError)
    assert "1 ranks are here, at least 2 are wanted; no word from old rank 1, 2" in str(refused)


def test_who_is_expected_is_waited_for(tmp_path: Path) -> None:
    terms = Terms(timeout_s=0.5, wait_s=600, expect=3)
    for refused in meet([Candidate(tmp_path, rank, 2, terms=terms) for rank in range(2)]):
        assert isinstance(refused, errors.TimeoutError)
        assert "2 ranks are here, 3 are expected" in str(refused)


def test_an_attempt_that_fails_for_one_is_over_for_all_and_the_next_epoch_comes(tmp_path: Path) -> None:
    candidates = [Candidate(tmp_path, 0, 2), Candidate(tmp_path, 1, 2, fail_at=1)]
    views = meet(candidates, last_epoch=2)
    assert [view.epoch for view in views] == [2, 2]
    assert previous(views) == [(0, (0, 1)), (1, (0, 1))]
    assert [candidate.tried for candidate in candidates] == [[1, 2], [1, 2]]


def test_a_mistake_of_ones_own_is_not_tried_again_and_the_others_hear_of_it(tmp_path: Path) -> None:
    patient = Candidate(tmp_path, 0, 2, terms=Terms(timeout_s=1.0, wait_s=600))
    mistaken = Candidate(tmp_path, 1, 2, fail_at=1, error=ConfigError)
    waited, raised = meet([patient, mistaken], last_epoch=2)
    assert isinstance(raised, ConfigError)
    assert mistaken.tried == [1]
    assert isinstance(waited, errors.TimeoutError)
    assert "another rank gave up epoch 1: ConfigError: epoch 1 cannot be connected here" in str(waited)


def test_death_while_connecting_ends_the_attempt(tmp_path: Path) -> None:
    class Dies(Evidence):
        """Rank 1 is found dead as soon as the next epoch includes it."""

        def find_gone(self) -> Collection[int]:
            return [1] if survivor.tried else []

    survivor = Candidate(tmp_path, 0, 2, evidence=Dies())
    with ThreadPoolExecutor(2) as pool:
        going_on = pool.submit(survivor.reform, 2)
        victim = pool.submit(Candidate(tmp_path, 1, 2).reform).result()
        assert victim.epoch == 1
        assert previous([going_on.result()]) == [(0, (0,))]
    assert survivor.tried == [1, 2]


def announce(folder: Path, **record: Any) -> None:
    """Writes a candidate's record in epoch 1, which nobody rewrites."""
    store = FileStore(folder)
    ticket = store.add(f"sennit/{NAME}/membership/1/tickets", 1)
    store.set(f"sennit/{NAME}/membership/1/candidate/{ticket}", json.dumps(record))


def test_a_candidate_that_does_not_beat_is_none(tmp_path: Path) -> None:
    versions = Membership.of_founder(FileStore(tmp_path), name=NAME, rank=0, world=2)._versions
    lists = {"gone": ["rank-0"], "suspects": [], "exclude": ["rank-0"], "missing": []}
    announce(tmp_path, token="rank-1", beat=1, may_propose=True, here=0, **lists, **versions.as_record())
    (view,) = meet([Candidate(tmp_path, 0, 2, terms=Terms(timeout_s=600, wait_s=0.1))])
    assert previous([view]) == [(0, (0,))]


class Late(FileStore):
    """The store of a newcomer whose record travels until the member has looked for candidates several times."""

    def __init__(self, folder: Path, member: Looking) -> None:
        super().__init__(folder)
        self._member = member

    def set(self, key: str, value: str, /) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while "/candidate/" in key and self._member.looks < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        super().set(key, value)


class Looking(FileStore):
    """Counts how often the number of tickets is read."""

    looks = 0

    def add(self, key: str, amount: int, /) -> int:
        self.looks += key.endswith("/tickets") and amount == 0
        return super().add(key, amount)


def test_a_newcomer_with_a_ticket_is_waited_for_until_its_record_comes(tmp_path: Path) -> None:
    member, newcomer = Candidate(tmp_path, 0, 1), Candidate(tmp_path, None)
    looking = Looking(tmp_path)
    member.own = Membership.of_founder(looking, name=NAME, rank=0, world=1)
    newcomer.own = Membership.of_newcomer(Late(tmp_path, looking), name=NAME)
    with ThreadPoolExecutor(2) as pool:
        came = pool.submit(newcomer.reform)
        deadline_s = time.monotonic() + DEADLINE_S
        while member.own.waiting_count() < 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        looking.looks = 0
        assert previous([member.reform(), came.result()]) == [(0, (0, None)), (1, (None, None))]


class Reading(FileStore):
    """Remembers which candidates' records are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: set[str] = set()

    def get(self, key: str, /) -> bytes:
        if "/candidate/" in key:
            self.read.add(key)
        return super().get(key)


def test_all_but_the_speaker_read_one_record(tmp_path: Path) -> None:
    world = 12
    candidates = [Candidate(tmp_path, rank, world) for rank in range(world)]
    stores = [Reading(tmp_path) for _ in candidates]
    for candidate, store in zip(candidates, stores, strict=True):
        candidate.own = Membership.of_founder(store, name=NAME, rank=stores.index(store), world=world)
    assert {view.members for view in meet(candidates)} == {tuple(f"rank-{rank}" for rank in range(world))}
    read = sorted(len(store.read) for store in stores)
    assert read[-1] == world  # the speaker
    assert all(count <= 1 for count in read[:-1])


def test_the_next_one_speaks_if_the_first_falls_silent(tmp_path: Path) -> None:
    versions = Membership.of_founder(FileStore(tmp_path), name=NAME, rank=0, world=3)._versions
    lists: dict[str, Any] = {"gone": [], "suspects": [], "exclude": [], "missing": []}
    announce(tmp_path, token="rank-0", beat=7, may_propose=True, here=0, **lists, **versions.as_record())
    terms = Terms(timeout_s=600, wait_s=0.1)
    assert previous(meet([Candidate(tmp_path, rank, 3, terms=terms) for rank in (1, 2)])) == [(0, (1, 2)), (1, (1, 2))]


def test_another_version_cannot_join_and_disturbs_nobody(tmp_path: Path) -> None:
    announce(tmp_path, token="newcomer-9", beat=1, version=99, wire=1, package="9.9")
    announce(tmp_path, rubbish=True)
    assert previous(meet([Candidate(tmp_path, 0, 1)])) == [(0, (0,))]
    announce(tmp_path / "other", token="rank-0", beat=1, version=99, wire=1, package="9.9")
    refused = Candidate(tmp_path / "other", None).reform()
    assert isinstance(refused, MismatchError)
    assert "rank-0 speaks protocol version 99" in str(refused)


@pytest.mark.parametrize("operation", ["compare_set", "set"])
def test_a_store_that_fails_is_named(tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate(tmp_path, 0, 1, fail_at=1)

    original: Any = getattr(FileStore, operation)

    def refuse(self: FileStore, key: str, *values: str) -> Any:
        # `set` works until a candidate has to abandon the epoch.
        if operation == "compare_set" or key.endswith("abandoned"):
            raise ConnectionResetError("server gone")
        return original(self, key, *values)

    monkeypatch.setattr(FileStore, operation, refuse)
    refused = candidate.reform()
    assert isinstance(refused, PeerError)
    assert "the store failed: server gone; a new epoch needs a store that outlives the ranks" in str(refused)


@pytest.mark.parametrize("decision", ["", "{}", "[1]", "rubbish"])
def test_a_foreign_decision_is_refused(tmp_path: Path, decision: str) -> None:
    FileStore(tmp_path).set(f"sennit/{NAME}/membership/1/decision", decision)
    refused = Candidate(tmp_path, 0, 1).reform()
    assert isinstance(refused, MismatchError)
    assert "the decision on epoch 1 was not written by sennit" in str(refused)


@pytest.mark.parametrize(
    ("terms", "complaint"),
    [
        ({"timeout_s": -1.0}, "timeout_s -1.0; allowed: 0 or more seconds"),
        ({"wait_s": float("nan")}, "wait_s nan"),
        ({"min_world": 0}, "min_world 0; allowed: 1 or more"),
        ({"min_world": 3, "expect": 2}, r"expect 2; allowed: min_world \(3\) or more"),
    ],
)
def test_impossible_terms_are_refused(terms: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        Terms(**terms)
