# SPDX-License-Identifier: Apache-2.0
"""What simulations and benchmarks run natively (csrc/bindings.cpp)."""

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
        """Every field of a Scenario by name. KeyError for a missing one, ValueError for one out of range."""

    def run(self) -> None:
        """Until everything has arrived or the deadline has passed; Ctrl-C ends it."""

    def result(self) -> dict[str, Any]: ...
