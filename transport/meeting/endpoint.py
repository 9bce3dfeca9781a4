# SPDX-License-Identifier: Apache-2.0
"""What rendezvous and the trial of the network call of the native communicator (`_core.Communicator`).

For type checkers alone: a group that starts does not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Route: TypeAlias = tuple[str, bytes]
"""The way to a peer ("self", "shm", "udp" or "verbs"), and for a network what the peer has told of itself."""


class TriedEndpoint(Protocol):
    """The native communicator's part in the trial."""

    def begin_trial(self, routes: Sequence[Route], /) -> None: ...

    def try_network(self, limit_s: float, /) -> bool: ...

    def is_tried(self, rank: int, /) -> bool: ...

    def is_perfect(self, rank: int, /) -> bool: ...

    def trial_message(self, rank: int, /) -> bytes: ...

    def learn_trial(self, rank: int, message: bytes, /) -> None: ...

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]: ...

    def trial_payload_bytes(self, rank: int, /) -> int: ...

    def trial_payload_max_bytes(self, rank: int, /) -> int: ...

    def give_up(self, reason: str, /) -> None: ...


class Endpoint(TriedEndpoint, Protocol):
    """The native communicator's part in rendezvous."""

    def shm_offer(self, ranks_here: list[int], /) -> bytes: ...

    def shm_accept(self, rank: int, offer: bytes, /) -> str: ...

    def udp_open(
        self,
        rails: list[tuple[str, str]],
        /,
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        ports: tuple[int, int],
    ) -> bytes: ...

    def verbs_open(
        self,
        addresses: list[str],
        /,
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        service: str,
    ) -> bytes: ...

    def aggregator_open(self, address: str, port: int, /, *, key: int, limit_s: float) -> str: ...

    def aggregator_drop(self) -> None: ...

    def offer_for(self, rank: int, /) -> bytes: ...

    def connect(self, routes: Sequence[Route], /) -> None: ...

    def abort(self, reason: str, /) -> None: ...
