# SPDX-License-Identifier: Apache-2.0
"""The cases of docs/lab/simulation.md: workloads and failures, each with several ways to use the paths."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sennit.testbed.simulation.scenario import Scenario

# Way to use the paths -> fields of the scenario that it changes.
WAYS: dict[str, dict[str, Any]] = {
    "reps": {"path_policy": "reps"},
    "round robin": {"path_policy": "round_robin"},
    "static ECMP": {"spread": "per_message"},
    "single path": {"path_count": 1},
}
PERMUTATION_MESSAGES = 16

QUICK = Scenario(hosts=64, hosts_per_leaf=8, spines=8, size_bytes=32 << 10, message_max_bytes=32 << 10)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scenario and its place in the table."""

    group: str
    """Workload and failure: a block of the table."""

    way: str
    """One of WAYS."""

    scenario: Scenario

    @property
    def name(self) -> str:
        return f"{self.group}-{self.way}".replace(" ", "_").replace(",", "").replace("%", "pc")


def cases(*, quick: bool, seed: int) -> list[Case]:
    """Returns all cases. `quick`: 64 hosts and small blocks, seconds in all."""
    base = (QUICK if quick else Scenario()).with_(seed=seed)
    mid_us = 100 if quick else 1000
    failed = {"failed_fraction": 0.02 if quick else 0.01}
    percent = f"{100 * failed['failed_fraction']:.0f} %"
    dying = {**failed, "fail_at_us": mid_us, "convergence_us": 10 * mid_us}
    vector_bytes = base.hosts * (base.size_bytes // 4)
    found: list[Case] = []
    # A host sends one message to each other host, so static ECMP uses a single path. Most of the message is sent
    # before an entropy could return, so reps is nearly round robin.
    ways = ("reps", "static ECMP")
    found += _group(f"alltoall, {percent} links failed", base.with_(**failed), ways)
    found += _group("alltoall", base, ways)
    found += _group(f"alltoall, {percent} links die in the middle", base.with_(**dying), ways)
    found += _group("allreduce direct", base.with_(kind="allreduce_direct", size_bytes=vector_bytes), ways)
    # A step's block leaves at once only while the window has room for the unacknowledged blocks before it.
    ahead = base.with_(peers_at_a_time=24)
    ring = ahead.with_(kind="allreduce_ring", size_bytes=vector_bytes, window_bytes=128 << 10)
    found += _group("allreduce ring", ring, ways)
    block_bytes = 64 * base.size_bytes
    permutation = ahead.with_(
        kind="permutation",
        size_bytes=block_bytes,
        message_max_bytes=block_bytes // PERMUTATION_MESSAGES,
        window_bytes=512 << 10,
    )
    found += _group("permutation", permutation, tuple(WAYS))
    return found


def _group(group: str, scenario: Scenario, ways: tuple[str, ...]) -> Iterator[Case]:
    for way in ways:
        yield Case(group=group, way=way, scenario=scenario.with_(**WAYS[way]))
