# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or fall silent: every survivor's error names them, and the survivors continue as a smaller group."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sennit.transport.meeting.store import FileStore
from tests.transport import forked

pytest.importorskip("sennit.transport._core", reason="the native core is not built")
pytestmark = pytest.mark.timeout(150)

WORKER = Path(__file__).with_name("survivor_worker.py")
DEADLINE_S = 120.0
# Pretended hosts: all ranks on one, each on its own, and pairs that mix shared memory with udp.
HOSTS = {"shm": "aaaa", "udp": "abcd", "mixed": "aabb"}


@dataclass
class Group:
    """The processes of a test, by rank; -1 is a newcomer."""

    processes: dict[int, BaseProcess]
    folder: Path

    def finish(self, dead: Sequence[int] = ()) -> dict[int, list[dict[str, Any]]]:
        """Returns each rank's reports once all have ended: the `dead` by a signal, the others normally."""
        deadline_s = time.monotonic() + DEADLINE_S
        for rank, process in self.processes.items():
            process.join(max(deadline_s - time.monotonic(), 0.1))
            code = process.exitcode
            expected = -signal.SIGKILL if rank in dead else 0
            log = (self.folder / f"log-{rank}").read_text()
            assert code == expected, f"rank {rank} {'hangs' if code is None else f'exited with {code}'}:\n{log[-3000:]}"
        return {rank: self.reports(rank) for rank in self.processes}

    def reports(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"report-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def store(self) -> FileStore:
        return FileStore(self.folder / "store")

    def wait_for(self, word: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.store().check([f"test/{word}"]):
            assert time.monotonic() < deadline_s, f"no {word}"
            time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    groups: list[Group] = []

    def start(scenario: str, hosts: str, newcomers: Sequence[int] = (), **arguments: Any) -> Group:
        group = Group({}, tmp_path)
        groups.append(group)
        for rank in [*range(len(hosts)), *newcomers]:
            transport = "udp" if len(set(hosts)) == len(hosts) else "auto"
            environment = {
                **os.environ,
                "SENNIT_TRANSPORT": transport,
                "SENNIT_INTERFACES": "lo",
                "SENNIT_HOST_ID": hosts[rank],
            }
            given = [
                scenario, rank, len(hosts), tmp_path / "store", tmp_path / f"report-{rank}", json.dumps(arguments),
            ]  # fmt: skip
            group.processes[rank] = forked.start(WORKER, given, environment, tmp_path / f"log-{rank}")
        return group

    yield start
    for group in groups:
        for process in group.processes.values():
            # Also ends a stopped process.
            process.kill()
            process.join()


@pytest.mark.parametrize("when", ["in a call", "others compute", "in a transfer", "behind others"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_every_survivor_names_the_dead_rank_and_goes_on(launch: Any, hosts: str, when: str) -> None:
    victim = 0 if when == "behind others" else 2
    group = launch("killed", HOSTS[hosts], victims=[victim], when=when)
    reports = group.finish(dead=[victim])
    died_s = float(group.store().get(f"test/died-{victim}"))
    survivors = [rank for rank in range(4) if rank != victim]
    for new_rank, rank in enumerate(survivors):
        failure, after = reports[rank]
        assert failure["lost"] == [victim], failure
        assert f"rank {victim} " in failure["text"].split(" (reported by")[0], failure["text"]
        assert failure["error"] == "PeerError"
        assert {name: after[name] for name in ("rank", "world", "epoch")} == {"rank": new_rank, "world": 3, "epoch": 1}
        # Printed, not asserted, because a busy machine is no failure.
        print(f"rank {rank} noticed after {failure['when_s'] - died_s:.3f} s, went on after {after['elapsed_s']:.3f} s")


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_two_deaths_at_once(launch: Any, hosts: str) -> None:
    reports = launch("killed", HOSTS[hosts], victims=[0, 2], when="in a call").finish(dead=[0, 2])
    for new_rank, rank in enumerate([1, 3]):
        failure, after = reports[rank]
        assert set(failure["lost"]) <= {0, 2}
        assert failure["lost"]
        assert (after["rank"], after["world"]) == (new_rank, 2)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_one_rank_is_left(launch: Any, hosts: str) -> None:
    reports = launch("killed", HOSTS[hosts], victims=[0, 1, 2], when="in a call").finish(dead=[0, 1, 2])
    assert (reports[3][1]["rank"], reports[3][1]["world"]) == (0, 1)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_death_while_the_next_epoch_is_connected(launch: Any, hosts: str) -> None:
    reports = launch("dies_while_reconfiguring", HOSTS[hosts]).finish(dead=[0, 1])
    for new_rank, rank in enumerate([2, 3]):
        (after,) = reports[rank]
        assert (after["rank"], after["world"], after["epoch"]) == (new_rank, 2, 2)


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_slow_survivor_is_waited_for(launch: Any, hosts: str) -> None:
    reports = launch("slow_survivor", HOSTS[hosts][:3]).finish(dead=[0])
    assert [reports[rank][0]["world"] for rank in (1, 2)] == [2, 2]


@pytest.mark.parametrize("hosts", ["shm", "udp"])
def test_newcomer_joins_and_dies(launch: Any, hosts: str) -> None:
    reports = launch("grows", HOSTS[hosts][:2], newcomers=[-1]).finish(dead=[-1])
    assert reports[-1] == [{"rank": 2, "world": 3, "epoch": 1}]
    for rank in (0, 1):
        grown, failure, after = reports[rank]
        assert grown == {"rank": rank, "world": 3, "epoch": 1}
        assert failure["lost"] == [2]
        assert (after["rank"], after["world"], after["epoch"]) == (rank, 2, 2)


@pytest.mark.parametrize("hosts", ["shm", "udp", "mixed"])
def test_stopped_rank_is_named_at_the_deadline_and_fails_by_itself_later(launch: Any, hosts: str) -> None:
    victim = 1
    group = launch("stopped", HOSTS[hosts], victim=victim, timeout_s=1.5)
    group.wait_for("stop me")
    process = group.processes[victim]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    survivors = [0, 2, 3]
    for rank in survivors:
        group.wait_for(f"done-{rank}")
    os.kill(process.pid, signal.SIGCONT)
    reports = group.finish()
    for new_rank, rank in enumerate(survivors):
        failure, after = reports[rank]
        assert failure["lost"] == [victim], failure
        assert f"rank {victim}" in failure["text"]
        assert "no sign of life" in failure["text"]
        assert (after["rank"], after["world"]) == (new_rank, 3)
    late = reports[victim][1]
    assert late["untouched"]
    assert "rank" in late["text"]
    assert "the others went on without this rank (1 of 4)" in late["refused"]
