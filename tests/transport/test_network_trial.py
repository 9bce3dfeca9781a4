# SPDX-License-Identifier: Apache-2.0
"""The trial of the network, without a network: what a rank waits for, reads from the store, and reports."""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sennit.transport.errors import PeerError, TimeoutError
from sennit.transport.meeting import network_trial
from sennit.transport.meeting.network_trial import Record, try_network
from sennit.transport.meeting.reachability import TriedPath, Verdict, judge

PATHS = 8


def paths(*, told: Sequence[int], heard: Sequence[int], error: int = 0, ipv6: bool = False) -> list[TriedPath]:
    ours, theirs = ("fd00::1", "fd00::2") if ipv6 else ("10.0.0.1", "10.0.0.2")
    return [
        TriedPath(
            address=ours,
            source_port=50_000 + index,
            peer_address=theirs,
            peer_port=4791,
            peer_source_port=60_000 + index,
            port=4791,
            told_bytes=told_bytes,
            heard_bytes=heard_bytes,
            error=error,
        )
        for index, (told_bytes, heard_bytes) in enumerate(zip(told, heard, strict=True))
    ]


def failure(peer_error: int = 0, **of_paths: Any) -> str:
    return judge(
        paths(**of_paths), rank=0, peer=1, payload_bytes=0, payload_max_bytes=1024, peer_error=peer_error
    ).failure


GOOD, NONE = [1024] * PATHS, [0] * PATHS


def test_a_dead_direction_is_named_with_addresses_ports_sizes_and_what_to_do() -> None:
    assert failure(told=GOOD, heard=NONE) == (
        "rank 0 hears nothing from rank 1: UDP 10.0.0.2 -> 10.0.0.1:4791 (source port 60000, 60001, 60002, 60003 and 4 "
        "more), packets of 1,088 to 320 bytes; the other direction works. Open UDP port 4791 in the firewalls between "
        "them, or set SENNIT_PORTS to a range that is open, or SENNIT_INTERFACES to interfaces that reach each other"
    )
    assert failure(told=NONE, heard=GOOD, ipv6=True).startswith(
        "rank 1 hears nothing from rank 0: UDP fd00::1 -> [fd00::2]:4791 (source port 50000, 50001, 50002, 50003 and 4 "
        "more), packets of 1,108 to 340 bytes; the other direction works."
    )
    both = failure(told=NONE, heard=NONE)
    assert both.startswith("ranks 0 and 1 hear nothing from each other: UDP 10.0.0.1 -> 10.0.0.2:4791 (")
    assert " and 10.0.0.2 -> 10.0.0.1:4791 (" in both


def test_what_a_host_or_the_network_said_is_told_for_the_direction_that_fails() -> None:
    rejected = failure(told=NONE, heard=GOOD, error=errno.ECONNREFUSED)
    assert "What rank 0 sent came back as 'port unreachable': a firewall rejects it." in rejected
    kept_in = failure(told=GOOD, heard=NONE, peer_error=errno.EPERM)
    assert "The host of rank 1 does not let its packets out (Operation not permitted)" in kept_in
    assert "Operation" not in failure(told=GOOD, heard=NONE, error=errno.EPERM)  # not an error of sending, which works


def test_a_few_dead_paths_are_warnings_and_smaller_packets_a_note() -> None:
    some = [1024, 0, *[1024] * 6]
    verdict = judge(paths(told=some, heard=GOOD), rank=0, peer=1, payload_bytes=1024, payload_max_bytes=1024)
    assert not verdict.failure
    assert verdict.warnings == (
        "rank 1 hears nothing from rank 0 over 1 of 8 paths, which stay out of use: 10.0.0.1 -> 10.0.0.2:4791 (source "
        "port 50001)",
    )
    assert not verdict.notes
    verdict = judge(
        paths(told=[4096] * PATHS, heard=GOOD, ipv6=True), rank=0, peer=1, payload_bytes=1024, payload_max_bytes=4096
    )
    assert not verdict.failure
    assert not verdict.warnings
    assert (
        "packets between rank 0 and rank 1 have 1,108 bytes: those of 4,180, which the interfaces take"
        in (verdict.notes[0])
    )


def test_ipv4_stands_in_for_ipv6_with_a_note_and_no_warning() -> None:
    def as_used(found: Sequence[TriedPath], is_used: bool) -> list[TriedPath]:
        return [replace(path, is_used=is_used) for path in found]

    ipv6 = paths(told=NONE, heard=GOOD, ipv6=True)
    ipv4 = as_used(paths(told=GOOD, heard=GOOD), True)
    verdict = judge([*as_used(ipv6, False), *ipv4], rank=1, peer=0, payload_bytes=1024, payload_max_bytes=1024)
    assert not verdict.failure
    assert verdict.warnings == ()
    assert verdict.notes == (
        "ranks 0 and 1 use IPv4, because over IPv6 rank 0 hears nothing from rank 1: UDP fd00::1 -> [fd00::2]:4791 "
        "(source port 50000, 50001, 50002, 50003 and 4 more). For IPv6 look at the firewalls and routes between them",
    )
    # IPv6 was slow to answer at first. That IPv4 does not pass is no fault.
    good = as_used(paths(told=GOOD, heard=GOOD, ipv6=True), True)
    dead = as_used(paths(told=NONE, heard=NONE), False)
    assert judge([*good, *dead], rank=1, peer=0, payload_bytes=1024, payload_max_bytes=1024) == Verdict()
    # Nothing passes in one direction, over any family.
    verdict = judge(
        [*as_used(ipv6, True), *paths(told=NONE, heard=NONE)],
        rank=1,
        peer=0,
        payload_bytes=0,
        payload_max_bytes=1024,
    )
    assert verdict.failure.startswith("rank 0 hears nothing from rank 1: UDP fd00::1 -> [fd00::2]:4791 (")
    assert ", 10.0.0.1 -> 10.0.0.2:4791 (" in verdict.failure


def test_a_dead_direction_between_devices_is_named_with_the_device_and_without_advice_for_sockets() -> None:
    dead = [replace(path, device="mlx5_0") for path in paths(told=NONE, heard=GOOD, ipv6=True)]
    failure = judge(dead, rank=0, peer=1, payload_bytes=0, payload_max_bytes=1024).failure
    assert failure.startswith(
        "rank 1 hears nothing from rank 0 (device mlx5_0 of rank 0): UDP fd00::1 -> [fd00::2]:4791 ("
    )
    assert failure.endswith(
        "the other direction works. Open UDP port 4791 in the firewalls between them, or set SENNIT_INTERFACES to "
        "those of devices that reach each other, or SENNIT_TRANSPORT=udp"
    )


class End:
    """A native end that has heard from its one peer, rank 1, over `heard` paths. `learned` settles the trial."""

    def __init__(
        self, *, heard: Sequence[int], settles_after: float = float("inf"), learns: bool = True, error: int = 0
    ) -> None:
        self.error = error
        self.heard, self.told = list(heard), NONE
        self.steps = 0
        self.settles_after, self.learns = settles_after, learns
        self.is_settled = False
        self.learned: list[bytes] = []
        self.gave_up = ""

    def begin_trial(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        assert [kind for kind, _ in routes] == ["self", "udp"]

    def try_network(self, limit_s: float, /) -> bool:
        self.steps += 1
        if self.steps > self.settles_after:
            self.is_settled = True
        return self.is_settled

    def is_tried(self, rank: int, /) -> bool:
        return self.is_settled

    def is_perfect(self, rank: int, /) -> bool:
        return self.is_settled and self.heard == self.told == GOOD

    def trial_message(self, rank: int, /) -> bytes:
        return bytes(value // 256 for value in self.heard)

    def learn_trial(self, rank: int, message: bytes, /) -> None:
        self.learned.append(message)
        if not message:
            self.told, self.heard, self.is_settled = GOOD, GOOD, True
        elif self.learns:
            self.told = [value * 256 for value in message]
            self.is_settled = any(self.told) and any(self.heard)

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]:
        return [
            (path.address, path.source_port, path.peer_address, path.peer_port, path.peer_source_port, path.port,
             path.told_bytes, path.heard_bytes, path.error, path.is_used, path.device)
            for path in paths(told=self.told, heard=self.heard, error=self.error)
        ]  # fmt: skip

    def trial_payload_bytes(self, rank: int, /) -> int:
        return 1024 if self.is_settled else 0

    def trial_payload_max_bytes(self, rank: int, /) -> int:
        return 1024

    def give_up(self, reason: str, /) -> None:
        self.gave_up = reason


class Board:
    """The store, with the record of rank 1."""

    def __init__(self, of_peer: Record | None) -> None:
        self.of_peer = of_peer
        self.left: list[Record] = []
        self.told: list[str] = []

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.told.append(str(error))
            raise

    def leave(self, record: Record, /) -> None:
        self.left.append(record)

    def look(self, peer: int, /) -> Record | None:
        assert peer == 1
        return self.of_peer


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each reading of the clock 0.1 s later than the last."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) / 10)


def record_of(levels: Sequence[int], *, error: int = 0) -> Record:
    message = base64.b64encode(bytes(value // 256 for value in levels)).decode()
    return {"messages": {"0": message}, "errors": {"0": error} if error else {}}


def run(end: End, board: Board, deadline_s: float = 100.0) -> list[str]:
    routes = [("self", b""), ("udp", b"offer")]
    verdicts = try_network(end, routes, board, rank=0, deadline_s=deadline_s)
    return [text for verdict in verdicts for text in (*verdict.warnings, *verdict.notes)]


@pytest.mark.parametrize("settles_after", [0, 1])
def test_where_all_is_well_nobody_looks_into_the_store(settles_after: int) -> None:
    end, board = End(heard=GOOD, settles_after=settles_after), Board(None)
    end.told = GOOD
    board.look = None  # type: ignore[assignment, method-assign]
    assert run(end, board) == []
    assert board.left == [{"messages": {}, "errors": {}}]


def test_a_verdict_that_was_lost_on_the_way_is_found_in_the_store() -> None:
    end, board = End(heard=GOOD), Board({"messages": {}, "errors": {}})
    assert run(end, board) == []
    assert end.learned == [b""]


def test_a_one_way_black_hole_fails_at_both_ends_with_the_same_direction() -> None:
    hearing, deaf = End(heard=GOOD), End(heard=NONE)
    for end, of_peer in ((hearing, NONE), (deaf, GOOD)):
        with pytest.raises(PeerError) as raised:
            run(end, Board(record_of(of_peer, error=errno.EPERM)))
        assert raised.value.rank == 1
        assert end.gave_up == str(raised.value)
        assert "the other direction works" in end.gave_up
    assert hearing.gave_up.startswith("rank 1 hears nothing from rank 0")
    assert deaf.gave_up.startswith("rank 0 hears nothing from rank 1")
    assert "does not let its packets out" in deaf.gave_up  # the peer's own error
    assert "does not let its packets out" not in hearing.gave_up


def test_what_a_rank_leaves_has_what_it_heard() -> None:
    board = Board(record_of(GOOD))
    with pytest.raises(PeerError):
        run(End(heard=NONE), board)
    assert board.left == [{"messages": {"1": base64.b64encode(bytes(PATHS)).decode()}, "errors": {}}]


def test_a_late_peer_is_waited_for_and_what_was_left_is_corrected() -> None:
    steps = int(network_trial.TRIAL_S / 0.1) * 3
    end, board = End(heard=[*[1024] * 7, 0], settles_after=steps), Board(None)
    end.told = GOOD
    assert len(run(end, board)) == 1
    assert len(board.left) == 1  # its first record already had what it knows of the paths
    end = End(heard=GOOD, settles_after=steps)
    end.told = GOOD
    board = Board(None)
    assert run(end, board) == []
    assert board.left[-1] == {"messages": {}, "errors": {}}
    assert len(board.left) == 2


def test_a_peer_that_never_reports_is_named_at_the_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 sent no packet and left no record: dead, stopped or cut off"):
        run(End(heard=NONE), Board(None), deadline_s=30.0)


def test_a_peer_whose_port_is_closed_and_that_leaves_no_record_is_gone_long_before_the_deadline() -> None:
    gone = r"rank 1 is gone: nobody listens at UDP 10.0.0.2:4791 any more"
    with pytest.raises(PeerError, match=gone) as raised:
        run(End(heard=NONE, error=errno.ECONNREFUSED), Board(None), deadline_s=1800.0)
    assert raised.value.rank == 1
    # A firewall that rejects packets. The peer's record comes, and names the direction.
    with pytest.raises(PeerError, match=r"rank 1 hears nothing from rank 0.*a firewall rejects it"):
        run(End(heard=GOOD, error=errno.ECONNREFUSED), Board(record_of(NONE)), deadline_s=1800.0)


@pytest.mark.parametrize(("heard", "record"), [(NONE, record_of(NONE)), (GOOD, None)])
def test_a_peer_that_answers_too_late_is_not_called_dead(heard: Sequence[int], record: Record | None) -> None:
    with pytest.raises(TimeoutError, match=r"^the network trial of rank 0: rank 1 answered too slowly for the group's"):
        run(End(heard=heard), Board(record), deadline_s=0.5)


def test_an_offer_that_cannot_be_read_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_trial(end: End, routes: Sequence[tuple[str, bytes]], /) -> None:
        raise ValueError("the peer's offer is cut short")

    monkeypatch.setattr(End, "begin_trial", begin_trial)
    board = Board(None)
    with pytest.raises(ValueError, match="cut short"):
        run(End(heard=NONE), board)
    assert board.told == ["the peer's offer is cut short"]


def test_what_the_trial_found_stays_for_the_peer_to_read() -> None:
    board = Board(record_of(NONE))
    with pytest.raises(PeerError, match="rank 1 hears nothing from rank 0"):
        run(End(heard=GOOD), board)
    assert board.told == []


def test_few_records_are_looked_for_at_a_time_and_all_have_their_turn() -> None:
    turns = itertools.count()
    for count in (0, 1, 7, 8, 9, 63):
        peers = list(range(count))
        found = [list(network_trial._next(turns, peers)) for _ in range(2 * count)]
        assert all(len(some) == len(set(some)) == min(count, network_trial.LOOK_COUNT) for some in found)
        assert set(itertools.chain(*found)) == set(peers)


def test_watch_may_end_the_wait() -> None:
    def watch() -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        try_network(End(heard=NONE), [("self", b""), ("udp", b"")], Board(None), rank=0, deadline_s=1e9, watch=watch)
