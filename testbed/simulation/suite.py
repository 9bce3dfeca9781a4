# SPDX-License-Identifier: Apache-2.0
"""The cases of docs/lab/simulation.md: workloads and failures, each with several ways to use the paths."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sennit.testbed.simulation.scenario import Pattern, Scenario

# Way to use the paths -> fields of the scenario that it changes.
WAYS: dict[str, dict[str, Any]] = {
    "reps": {"path_policy": "reps"},
    "reps, control first": {"path_policy": "reps", "control_first": True},
    "round robin": {"path_policy": "round_robin"},
    "static ECMP": {"path_count": 1},
}
PERMUTATION_MESSAGES = 16

QUICK = Scenario(hosts=64, hosts_per_leaf=8, spines=8, size_bytes=32 << 10)


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
    mid_us = 25 if quick else 400
    failed = {"failed_fraction": 0.02 if quick else 0.01}
    percent = f"{100 * failed['failed_fraction']:.0f} %"
    dying = {**failed, "fail_at_us": mid_us, "convergence_us": 10 * mid_us}
    found: list[Case] = []
    # First what takes longest, so that several processes end at about the same time.
    found += _group(f"alltoall, {percent} links failed", base.with_(**failed), ("reps", "reps, control first"))
    # A quarter of the bytes: each pair finds the dead paths itself, and that takes most of the time.
    shorter = base.with_(**dying, size_bytes=base.size_bytes // 4)
    found += _group(f"alltoall, {percent} links die in the middle", shorter, ("reps",))
    # Few flows at a time: each needs a window for the whole path.
    ahead = base.with_(window_bytes=128 << 10)
    large = ahead.with_(pattern=Pattern.ALLREDUCE, size_bytes=base.hosts * 16 << 10)
    found += _group(f"allreduce {large.size_bytes >> 20} MiB", large, ("reps",))
    small = ahead.with_(pattern=Pattern.ALLREDUCE, size_bytes=8 << 10)
    found += _group("allreduce 8 KiB", small, ("reps",))
    block_bytes = 64 * base.size_bytes
    permutation = base.with_(
        pattern=Pattern.PERMUTATION,
        size_bytes=block_bytes,
        message_max_bytes=block_bytes // PERMUTATION_MESSAGES,
        window_bytes=512 << 10,
    )
    found += _group("permutation", permutation, ("reps", "round robin", "static ECMP"))
    return found


def _group(group: str, scenario: Scenario, ways: tuple[str, ...]) -> Iterator[Case]:
    for way in ways:
        yield Case(group=group, way=way, scenario=scenario.with_(**WAYS[way]))
