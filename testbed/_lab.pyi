# SPDX-License-Identifier: Apache-2.0
"""The native part of simulations, delayed networks and benchmarks (csrc/bindings.cpp)."""

from collections.abc import Sequence
from typing import Any, final

def relay(*, inlet: int, outlet: int, table: int, stop: int, first_port: int, ports_a_plane: int) -> None:
    """Passes packets on, each after its delay (sennit.testbed.topology.relay), until `stop` can be read.

    The others are descriptors, too: two packet sockets and the memory of a RelayTable. A packet for plane p and host h
    leaves by the interface with the index first_port + p * ports_a_plane + h. Raises RuntimeError if a socket fails.
    """

@final
class UdpBare:
    """The bare both-ways UDP transfer that benchmarks compare with."""

    def __init__(self, local_address: str) -> None: ...
    @property
    def port(self) -> int: ...
    def exchange(self, peer_address: str, peer_port: int, size_bytes: int, timeout_s: float) -> float: ...

@final
class FabricSimulation:
    """One simulated run of plans over a Clos fabric (sennit.testbed.simulation)."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Takes every field of a Scenario by name. Raises KeyError for a missing one, ValueError out of range."""

    def add_rank(self, plan: bytes, counts: Sequence[int]) -> None:
        """Adds the next rank's plan in its binary form, and the counts of its post. Raises ValueError."""

    def run(self) -> None:
        """Runs until every plan is done or the deadline has passed. Ctrl-C ends it. Raises ValueError for no plan."""

    def result(self) -> dict[str, Any]: ...
    def traffic(self) -> list[tuple[int, int, int, int]]:
        """Returns (from, to, messages, bytes) for each pair of hosts, as the receivers' mailboxes counted them."""
