# SPDX-License-Identifier: Apache-2.0
"""The error names a rank that gives no sign of life while others wait in a barrier, but not one that computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from tests.extent import briefly
from tests.transport.processes import Group
from tests.transport.silence_scenarios import compute_in_python, hold_the_gil, two_barriers, wait_for_the_end

pytestmark = pytest.mark.timeout(150)

WORLD = 3
VICTIM = WORLD - 1
# Pretended hosts: all ranks on one, each on its own, and the victim apart from the two others.
HOSTS = {"shm": "aaa", "udp": "abc", "mixed": "aab"}


@pytest.fixture
def begin(launch: Callable[..., Group]) -> Callable[..., Group]:
    def begin(victim: Callable[[float], None], hosts: str, *, peer_timeout_s: float) -> Group:
        variables = [{"SENNIT_PEER_TIMEOUT_S": f"{peer_timeout_s}"}]
        return launch(partial(two_barriers, victim=victim), HOSTS[hosts], variables=variables)

    return begin


def outcome(group: Group, rank: int) -> dict[str, Any]:
    """Waits for the rank's report and returns it."""
    group.wait_for(f"done-{rank}")
    (report,) = group.reports(rank)
    return report


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_stopped_rank_is_named_in_a_barrier(begin: Callable[..., Group], hosts: str) -> None:
    group = begin(wait_for_the_end, hosts, peer_timeout_s=2.0)
    group.wait_for("ready")
    group.stop(VICTIM)
    for rank in range(VICTIM):
        found = outcome(group, rank)
        assert found["kind"] == "PeerError", found
        assert found["lost"] == [VICTIM]
        assert "barrier (operation 2 of the group)" in found["text"]
        assert f"rank {VICTIM} gave no sign of life for " in found["text"]
        assert "SENNIT_PEER_TIMEOUT_S" in found["text"]
        if hosts == "udp":
            assert "times, in the end over its only path" in found["text"]
            assert "1 path (1 good" in found["text"]


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_killed_rank_is_named_in_a_barrier(begin: Callable[..., Group], hosts: str) -> None:
    group = begin(wait_for_the_end, hosts, peer_timeout_s=60.0)
    group.wait_for("ready")
    group.processes[VICTIM].kill()
    for rank in range(VICTIM):
        found = outcome(group, rank)
        assert (found["kind"], found["lost"]) == ("PeerError", [VICTIM]), found


@pytest.mark.parametrize(
    ("hosts", "victim"),
    briefly(product(HOSTS, (compute_in_python, hold_the_gil)), [("udp", hold_the_gil)]),
)
def test_a_rank_that_computes_for_longer_than_the_peer_timeout_is_not_given_up(
    begin: Callable[..., Group], hosts: str, victim: Callable[[float], None]
) -> None:
    group = begin(victim, hosts, peer_timeout_s=1.0)
    for rank in range(WORLD):
        assert outcome(group, rank) == {"passed": True}
