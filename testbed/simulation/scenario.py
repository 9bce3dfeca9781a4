# SPDX-License-Identifier: Apache-2.0
"""One simulated run as data."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fabric, its failures, a transport and a workload. The native core checks the ranges."""

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

    spread: str = "sprayed"
    """sprayed: packet by packet. per_message: static ECMP, which hashes every message to one of the entropies."""

    congestion: str = "swift"
    """fixed or swift."""

    payload_bytes: int = 4096

    window_bytes: int = 32 << 10
    """Half of a block: what a pair may have in flight. More would overflow the queues of leaves that lost uplinks."""

    ack_every_packets: int = 16

    ack_delay_us: int = 200

    target_queue_us: int = 25

    batch_packets: int = 1
    """Packets sent back to back on one path: 1 as a NIC does, 15 as a GSO send does."""

    ticks_per_us: int = 5
    """Divides the floors of the flow's timers, which are meant for busy hosts, down to a NIC's."""

    kind: str = "alltoall"
    """alltoall, allreduce_direct, allreduce_ring, permutation or incast."""

    size_bytes: int = 64 << 10
    """alltoall: bytes from each host to each other; allreduce: the vector; otherwise bytes from each host."""

    message_max_bytes: int = 64 << 10
    """Longer blocks are cut into several messages."""

    peers_at_a_time: int = 16
    """Peers for which a host has posted receives."""

    is_shuffled: bool = True
    """Visits peers in a seeded order of distances instead of 1, 2, 3, ..."""

    seed: int = 1

    deadline_us: int = 10_000_000
    """Virtual time after which the run ends."""

    sample_us: int = 100
    """Resolution of the goodput over time."""

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
