# SPDX-License-Identifier: Apache-2.0
"""One simulated run as data."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self


class Pattern(StrEnum):
    """What the ranks do, one on each host."""

    ALLTOALL = "alltoall"
    ALLREDUCE = "allreduce"
    PERMUTATION = "permutation"
    """Host r sends to host r + n / 2: no two pairs need to share a link."""
    INCAST = "incast"
    """All hosts send to host 0."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fabric, its failures, a transport, and what the ranks do. The native core checks the ranges."""

    hosts: int = 1024

    hosts_per_leaf: int = 32

    spines: int = 32
    """Spines of the fabric. With three tiers, spines of each pod."""

    leaves_per_pod: int = 0
    """0 means two tiers."""

    cores_per_spine: int = 0
    """For three tiers only."""

    rate_gbps: int = 100
    """Rate of every link."""

    delay_ns: int = 1000
    """Delay of a hop: cable and switch pipeline."""

    queue_limit_bytes: int = 1 << 20
    """Queue of a switch port. A packet that does not fit is dropped."""

    mark_min_bytes: int = 128 << 10
    """A packet that finds fewer bytes than this in the queue is not marked (ECN)."""

    mark_max_bytes: int = 512 << 10
    """A packet that finds more bytes is always marked. In between the chance grows linearly."""

    failed_fraction: float = 0.0
    """Share of the cables between switches that fail."""

    fail_at_us: int = 0

    convergence_us: int = 0
    """Time from the failure until switches stop hashing packets onto dead links."""

    path_count: int = 16
    """Entropies (UDP source ports) of a flow."""

    path_policy: str = "reps"
    """How a flow chooses among them: round_robin or reps."""

    congestion: str = "swift"
    """fixed or swift."""

    payload_bytes: int = 4096

    window_bytes: int = 64 << 10
    """What a pair may have in flight."""

    ack_every_packets: int = 16

    ack_delay_us: int = 200

    target_queue_us: int = 25

    batch_packets: int = 1
    """Packets sent back to back on one path: 1 as a NIC does, 15 as a GSO send does."""

    turn_packets: int = 16
    """Packets that a NIC takes from one of its flows before the next one's turn."""

    control_first: bool = False
    """Acknowledgements and adverts overtake data in queues, as in a traffic class of their own."""

    ticks_per_us: int = 5
    """Divides the floors of the flow's timers, which are meant for busy hosts, down to a NIC's."""

    receive_budget_bytes: int = 0
    """The most that all senders together may have in flight to a host (flow/receive_budget.hpp). 0: no limit."""

    pattern: Pattern = Pattern.ALLTOALL

    algorithm: str | None = None
    """None: the one that the cost model chooses for this fabric."""

    size_bytes: int = 64 << 10
    """alltoall: bytes from each host to each other; allreduce: the vector; otherwise bytes from each host."""

    peers_at_a_time: int = 32
    """alltoall: peers for which a host has posted receives."""

    message_max_bytes: int = 64 << 10
    """permutation, incast: longer blocks are cut into several messages."""

    seed: int = 1

    deadline_us: int = 10_000_000
    """Virtual time after which the run ends."""

    sample_us: int = 100
    """Resolution of the goodput over time."""

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
