# SPDX-License-Identifier: Apache-2.0
"""A host loses power in a barrier: its links go down and its process stops. The others name its rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.testbed.topology import Impairer, Planes
from sennit.testbed.topology.switch import NEEDS
from sennit.transport.meeting.store import FileStore

WORKER = Path(__file__).parents[1] / "transport" / "silent_worker.py"
HOSTS = 3
VICTIM = HOSTS - 1
DEADLINE_S = 90.0


@pytest.mark.root
@pytest.mark.needs(*NEEDS[Impairer.BPF])
@pytest.mark.timeout(180)
def test_every_survivor_names_the_rank_of_a_host_without_power(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")

    def wait_for(word: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not store.check([f"test/{word}"]):
            assert time.monotonic() < deadline_s, f"no {word}"
            time.sleep(0.01)

    with Planes(hosts=HOSTS, planes=2) as planes:
        processes = []
        for rank in range(HOSTS):
            command = [sys.executable, str(WORKER), "frozen", str(rank), str(HOSTS)]
            process = planes.popen(
                rank,
                [*command, str(tmp_path / "store"), str(tmp_path / f"report-{rank}")],
                # With the default peer timeout.
                env={**os.environ, **planes.environment(rank)},
            )
            processes.append(process)
        wait_for("ready")
        planes.unplug(VICTIM)
        # nsenter becomes the program that it starts, so this is the rank's pid.
        os.kill(processes[VICTIM].pid, signal.SIGSTOP)
        for rank in range(VICTIM):
            wait_for(f"done-{rank}")
            outcome = json.loads((tmp_path / f"report-{rank}").read_text())
            assert (outcome["kind"], outcome["lost"]) == ("PeerError", [VICTIM]), outcome
            assert "barrier (operation 2 of the group)" in outcome["text"]
            assert f"rank {VICTIM} gave no sign of life for " in outcome["text"]
            assert "times, in the end over all 16 paths" in outcome["text"]
            assert "16 paths (16 good" in outcome["text"]
