# SPDX-License-Identifier: Apache-2.0
"""A host loses power in a barrier: its links go down and its process stops. The others name its rank."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.testbed.topology import Impairer, Planes
from sennit.testbed.topology.switch import NEEDS
from sennit.transport.meeting.store import FileStore
from tests.ranks import command
from tests.transport.processes import act, wait_for_words
from tests.transport.silence_scenarios import two_barriers, wait_for_the_end

HOSTS = 3
VICTIM = HOSTS - 1
DEADLINE_S = 90.0


@pytest.mark.root
@pytest.mark.needs(*NEEDS[Impairer.BPF])
@pytest.mark.timeout(180)
def test_every_survivor_names_the_rank_of_a_host_without_power(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    with Planes(hosts=HOSTS, planes=2) as planes:
        processes = []
        for rank in range(HOSTS):
            process = planes.popen(
                rank,
                command(partial(act, partial(two_barriers, victim=wait_for_the_end), rank, HOSTS, tmp_path)),
                # With the default peer timeout.
                env={**os.environ, **planes.environment(rank)},
            )
            processes.append(process)
        wait_for_words(store, ["ready"], DEADLINE_S)
        planes.unplug(VICTIM)
        # nsenter becomes the program that it starts, so this is the rank's pid.
        os.kill(processes[VICTIM].pid, signal.SIGSTOP)
        for rank in range(VICTIM):
            wait_for_words(store, [f"done-{rank}"], DEADLINE_S)
            outcome = json.loads((tmp_path / f"report-{rank}").read_text())
            assert (outcome["kind"], outcome["lost"]) == ("PeerError", [VICTIM]), outcome
            assert "barrier (operation 2 of the group)" in outcome["text"]
            assert f"rank {VICTIM} gave no sign of life for " in outcome["text"]
            assert "times, in the end over all 16 paths" in outcome["text"]
            assert "16 paths (16 good" in outcome["text"]
