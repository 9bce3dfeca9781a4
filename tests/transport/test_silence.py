# SPDX-License-Identifier: Apache-2.0
"""The error names a rank that gives no sign of life while others wait in a barrier, but not one that computes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sennit.transport.meeting.store import FileStore
from tests.transport import forked

pytest.importorskip("sennit.transport._core", reason="the native core is not built")
pytestmark = pytest.mark.timeout(150)

WORKER = Path(__file__).with_name("silent_worker.py")
DEADLINE_S = 120.0
WORLD = 3
VICTIM = WORLD - 1
# Pretended hosts: all ranks on one, each on its own, and the victim apart from the two others.
HOSTS = {"shm": "aaa", "udp": "abc", "mixed": "aab"}


@dataclass
class Group:
    processes: list[BaseProcess]
    folder: Path

    def wait_for(self, word: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not FileStore(self.folder / "store").check([f"test/{word}"]):
            assert time.monotonic() < deadline_s, f"no {word}: {self.logs()}"
            time.sleep(0.01)

    def outcome(self, rank: int) -> Mapping[str, Any]:
        """Waits for the rank's report and returns it."""
        self.wait_for(f"done-{rank}")
        outcome: Mapping[str, Any] = json.loads((self.folder / f"report-{rank}").read_text())
        return outcome

    def logs(self) -> str:
        return "\n".join((self.folder / f"log-{rank}").read_text()[-2000:] for rank in range(WORLD))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    groups: list[Group] = []

    def start(what: str, hosts: str, peer_timeout_s: float) -> Group:
        group = Group([], tmp_path)
        groups.append(group)
        for rank in range(WORLD):
            environment = {
                **os.environ,
                "SENNIT_TRANSPORT": "auto",
                "SENNIT_INTERFACES": "lo",
                "SENNIT_HOST_ID": HOSTS[hosts][rank],
                "SENNIT_PEER_TIMEOUT_S": f"{peer_timeout_s}",
            }
            given = [what, rank, WORLD, tmp_path / "store", tmp_path / f"report-{rank}"]
            group.processes.append(forked.start(WORKER, given, environment, tmp_path / f"log-{rank}"))
        return group

    yield start
    for group in groups:
        for process in group.processes:
            process.kill()  # Also ends a stopped process.
            process.join()


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_stopped_rank_is_named_in_a_barrier(launch: Any, hosts: str) -> None:
    group = launch("frozen", hosts, peer_timeout_s=2.0)
    group.wait_for("ready")
    frozen = group.processes[VICTIM].pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    for rank in range(WORLD):
        if rank == VICTIM:
            continue
        outcome = group.outcome(rank)
        assert outcome["kind"] == "PeerError", outcome
        assert outcome["lost"] == [VICTIM]
        assert "barrier (operation 2 of the group)" in outcome["text"]
        assert f"rank {VICTIM} gave no sign of life for " in outcome["text"]
        assert "SENNIT_PEER_TIMEOUT_S" in outcome["text"]
        if hosts == "udp":
            assert "times, in the end over its only path" in outcome["text"]
            assert "1 path (1 good" in outcome["text"]


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_killed_rank_is_named_in_a_barrier(launch: Any, hosts: str) -> None:
    group = launch("killed", hosts, peer_timeout_s=60.0)
    group.wait_for("ready")
    group.processes[VICTIM].kill()
    for rank in range(WORLD):
        if rank != VICTIM:
            outcome = group.outcome(rank)
            assert (outcome["kind"], outcome["lost"]) == ("PeerError", [VICTIM]), outcome


@pytest.mark.parametrize("what", ["busy", "holding"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_computes_for_longer_than_the_peer_timeout_is_not_given_up(
    launch: Any, hosts: str, what: str
) -> None:
    group = launch(what, hosts, peer_timeout_s=1.0)
    for rank in range(WORLD):
        assert group.outcome(rank) == {"passed": True}
