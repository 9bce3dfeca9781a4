# SPDX-License-Identifier: Apache-2.0
"""The upper bound of the udp port, in a benchmark worker: the bytes of the case both ways, and nothing else.

No ICRC, no acknowledgements, no order: only datagrams of the same size through the same system calls. Two ranks.
"""

import statistics
from datetime import timedelta

from sennit.testbed._lab import UdpBare
from sennit.testbed.bench.cases import Case, Collective
from sennit.transport.meeting.store import FileStore

ADDRESS = "::1"
TIMEOUT_S = 30.0


class UdpBareLibrary:
    """One of the two ends."""

    def __init__(self, rank: str, world: str, store_path: str) -> None:
        if int(world) != 2:
            raise ValueError(f"udp-bare: {world} ranks; allowed: 2")
        self.rank = int(rank)
        self._store = FileStore(store_path)
        self._socket = UdpBare(ADDRESS)
        self._peer_port = 0

    def join(self, peer: str) -> None:
        self._store.set(f"port {self.rank}", str(self._socket.port))
        theirs = f"port {1 - self.rank}"
        self._store.wait([theirs], timedelta(seconds=TIMEOUT_S))
        self._peer_port = int(self._store.get(theirs))

    def allocate(self, case: Case) -> None:
        """Does nothing: the native exchange has its own buffers."""

    def run(self, peer: str, case: Case, iterations: int) -> float:
        # The least that each of two ranks must send: half of its data, and twice that to reduce everywhere.
        sent_bytes = case.size_bytes if case.collective is Collective.ALLREDUCE else case.size_bytes // 2
        return statistics.fmean(
            self._socket.exchange(ADDRESS, self._peer_port, sent_bytes, TIMEOUT_S) for _ in range(iterations)
        )

    def verify(self, peer: str, case: Case) -> None:
        """Does nothing: a lost datagram ends the run."""

    def stop(self) -> None:
        """The sockets close with the process."""
