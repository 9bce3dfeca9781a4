# SPDX-License-Identifier: Apache-2.0
"""The trial of the network when a group is made: every path both ways, before the first collective.

As long as packets pass, the packets alone inform both ranks (`csrc/ports/trial.hpp`). Each rank then leaves what it
knows in the store. Only a rank whose trial does not end reads the store: the peer's record says which direction fails.
"""

from __future__ import annotations

import base64
import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from sennit.transport.errors import PeerError, TimeoutError

if TYPE_CHECKING:
    from sennit.transport.meeting.endpoint import Route, TriedEndpoint
    from sennit.transport.meeting.reachability import TriedPath, Verdict

Record = dict[str, Any]

# The kinds of routes that are tried.
NETWORKS: Final = ("udp", "verbs")
# A rank that has not heard from a peer for this long looks in the store.
TRIAL_S: Final = 2.0
# The pause between two looks at the store.
SLICE_S: Final = 0.1
# Before this time nobody looks there: peers that fail at once are rare, and the store serves all ranks.
FIRST_LOOK_S: Final = 0.5
# How many peers' records a rank looks for at a time: the store serves all ranks.
LOOK_COUNT: Final = 8
# The wait when both ends have told what they know and packets may still be on the way.
LAST_CHANCE_S: Final = 0.3
# A peer that leaves no record for this long and whose port is closed has ended. A firewall that rejects packets looks
# the same at first, but then the peer's record arrives.
GONE_S: Final = 10.0


class Board(Protocol):
    """Where ranks leave records for each other: the rounds of rendezvous, over the store."""

    def telling(self) -> AbstractContextManager[None]:
        """If this rank fails in the block, leaves the reason in place of its record."""
        ...

    def leave(self, record: Record, /) -> None: ...

    def look(self, peer: int, /) -> Record | None:
        """Returns the peer's record, or None if the peer has not left one yet."""
        ...


def try_network(
    endpoint: TriedEndpoint,
    routes: Sequence[Route],
    board: Board,
    *,
    rank: int,
    deadline_s: float,
    watch: Callable[[], None] | None = None,
) -> list[Verdict]:
    """Sends packets over every path to the peers on a network, and waits until both ends know which packets arrive.

    Returns a verdict for each peer with something to report. Raises PeerError where no packet passes in one direction,
    and TimeoutError where a peer does not report until `deadline_s` (of `time.monotonic`).
    """
    peers = [peer for peer, (kind, _) in enumerate(routes) if kind in NETWORKS]
    with board.telling():
        errors = _find_out(endpoint, routes, peers, board, rank, deadline_s, watch)
    verdicts = [_verdict(endpoint, rank, peer, errors.get(peer, 0)) for peer in peers if not endpoint.is_perfect(peer)]
    failures = [verdict.failure for verdict in verdicts if verdict.failure]
    if failures:
        reason = ". ".join(failures)
        endpoint.give_up(reason)
        failed = _open(endpoint, peers)
        raise PeerError(reason, rank=failed[0] if len(failed) == 1 else None)
    return verdicts


def _find_out(
    endpoint: TriedEndpoint,
    routes: Sequence[Route],
    peers: Sequence[int],
    board: Board,
    rank: int,
    deadline_s: float,
    watch: Callable[[], None] | None,
) -> dict[int, int]:
    """Returns errno of the failed sends of peers, by rank, as far as their records say."""
    endpoint.begin_trial(routes)
    turns = itertools.count()
    begun_s = time.monotonic()
    patience_s = min(begun_s + TRIAL_S, deadline_s)
    is_over = endpoint.try_network(SLICE_S)
    while not is_over and time.monotonic() < patience_s:
        if watch is not None:
            watch()
        if time.monotonic() >= begun_s + FIRST_LOOK_S:
            for peer in _next(turns, _open(endpoint, peers)):
                _learn(endpoint, board, rank, peer)
        is_over = endpoint.try_network(SLICE_S)
    told = _record(endpoint, peers)
    board.leave(told)
    errors: dict[int, int] = {}
    last_chances_s: dict[int, float] = {}
    while not is_over:
        if watch is not None:
            watch()
        now_s = time.monotonic()
        still_open = _open(endpoint, peers)
        for peer in _next(turns, still_open):
            record = _learn(endpoint, board, rank, peer)
            if record is not None:
                errors[peer] = int(record.get("errors", {}).get(str(rank), 0))
                last_chances_s.setdefault(peer, now_s + LAST_CHANCE_S)
        # Where packets pass both ways, the end that decides needs a moment more.
        if all(
            last_chances_s.get(peer, now_s + 1) <= now_s and _verdict(endpoint, rank, peer, errors[peer]).failure
            for peer in still_open
        ):
            break
        silent = [peer for peer in still_open if peer not in last_chances_s]
        if now_s >= begun_s + GONE_S:
            for peer in silent:
                if all(path.error == errno.ECONNREFUSED for path in _paths(endpoint, peer)):
                    from sennit.transport.meeting.reachability import refusal

                    raise PeerError(f"rank {peer} is gone: {refusal(_paths(endpoint, peer))}", rank=peer)
        if now_s >= deadline_s:
            raise _too_late(endpoint, rank, still_open, silent)
        is_over = endpoint.try_network(SLICE_S)
    # What this rank left in the store may be out of date now.
    if (now_told := _record(endpoint, peers)) != told:
        board.leave(now_told)
    return errors


def _too_late(endpoint: TriedEndpoint, rank: int, still_open: Sequence[int], silent: Sequence[int]) -> TimeoutError:
    dead = [peer for peer in silent if not any(path.heard_bytes for path in _paths(endpoint, peer))]
    slow = [peer for peer in still_open if peer not in dead]
    reasons = {
        "sent no packet and left no record: dead, stopped or cut off": dead,
        "answered too slowly for the group's deadline (SENNIT_TIMEOUT_S)": slow,
    }
    return TimeoutError(
        f"the network trial of rank {rank}: "
        + "; ".join(
            f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))} {reason}"
            for reason, who in reasons.items()
            if who
        )
    )


def _open(endpoint: TriedEndpoint, peers: Iterable[int]) -> list[int]:
    return [peer for peer in peers if not endpoint.is_tried(peer)]


def _next(turns: Iterator[int], peers: Sequence[int]) -> Sequence[int]:
    """Returns a few peers. All have their turn."""
    first = next(turns) * LOOK_COUNT % max(1, len(peers))
    return [*peers[first:], *peers[:first]][:LOOK_COUNT]


def _record(endpoint: TriedEndpoint, peers: Iterable[int]) -> Record:
    """Returns the failures and warnings to leave in the store. Peers without an entry found every path good."""
    messages: dict[str, str] = {}
    errors: dict[str, int] = {}
    for peer in peers:
        if endpoint.is_perfect(peer):
            continue
        messages[str(peer)] = base64.b64encode(endpoint.trial_message(peer)).decode()
        if error := next((path.error for path in _paths(endpoint, peer) if path.error), 0):
            errors[str(peer)] = error
    return {"messages": messages, "errors": errors}


def _learn(endpoint: TriedEndpoint, board: Board, rank: int, peer: int) -> Record | None:
    record = board.look(peer)
    if record is not None:
        endpoint.learn_trial(peer, base64.b64decode(record["messages"].get(str(rank), "")))
    return record


def _paths(endpoint: TriedEndpoint, peer: int) -> list[TriedPath]:
    from sennit.transport.meeting.reachability import TriedPath

    return [TriedPath(*path) for path in endpoint.tried_paths(peer)]


def _verdict(endpoint: TriedEndpoint, rank: int, peer: int, peer_error: int) -> Verdict:
    from sennit.transport.meeting.reachability import judge

    return judge(
        _paths(endpoint, peer),
        rank=rank,
        peer=peer,
        payload_bytes=endpoint.trial_payload_bytes(peer),
        payload_max_bytes=endpoint.trial_payload_max_bytes(peer),
        peer_error=peer_error,
    )
