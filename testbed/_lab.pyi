# SPDX-License-Identifier: Apache-2.0
"""The native part of simulations and benchmarks (csrc/bindings.cpp)."""

from typing import Any, final

@final
class UdpBare:
    """The bare both-ways UDP transfer that benchmarks compare with."""

    def __init__(self, local_address: str) -> None: ...
    @property
    def port(self) -> int: ...
    def exchange(self, peer_address: str, peer_port: int, size_bytes: int, timeout_s: float) -> float: ...

@final
class FabricSimulation:
    """One simulated run of flows over a Clos fabric (sennit.testbed.simulation)."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Takes every field of a Scenario by name. Raises KeyError for a missing one, ValueError out of range."""

    def run(self) -> None:
        """Runs until everything has arrived or the deadline has passed. Ctrl-C ends it."""

    def result(self) -> dict[str, Any]: ...
