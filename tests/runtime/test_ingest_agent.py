# SPDX-License-Identifier: Apache-2.0
"""`sennit train --ingest xdp://…` of a user without rights, through an agent: the weights are those of root's run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.testbed.topology import Planes

pytestmark = [
    pytest.mark.root,
    pytest.mark.long,
    pytest.mark.needs("bpf", "arena", "native-xdp", "tc-bpf"),
    pytest.mark.timeout(400),
]
FEEDER_HOST, TRAINER_HOST, MTU = 0, 1, 3500
USER, PORT, RANKS = 65_534, 4800, 2
DEADLINE_S = 120.0
DATA = ["--data", "synthetic", "--samples", "3000", "--row-limit", "200"]
RUN = ["--batch-size", "64", "--dim", "4", "--bottom", "8", "--top", "8", "--steps", "24", "--timeout", "60"]
WITHOUT_RIGHTS = ["setpriv", f"--reuid={USER}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Returns a folder of the user's."""
    with tempfile.TemporaryDirectory(prefix="sennit-test-") as name:
        os.chown(name, USER, -1)
        yield Path(name)


def test_both_ranks_have_programs_of_the_agent_and_the_weights_of_root(folder: Path) -> None:
    sennit = [sys.executable, "-m", "sennit"]
    with Planes(hosts=2, planes=1, mtu=MTU, per_packet=True) as planes:
        (interface,), (address,) = planes.interfaces(TRAINER_HOST), planes.addresses(TRAINER_HOST)
        file, path = folder / "agent.toml", folder / "agent.sock"
        file.write_text(f"[[allow]]\nusers = [{USER}]\ninterfaces = [{interface!r}]\nports = [{PORT}, {PORT + 1}]\n")
        agent = planes.popen(
            TRAINER_HOST,
            [*sennit, "agent", "--config", str(file), "--socket", str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("ready: ")

        def run(name: str, prefix: list[str], socket: str) -> str:
            report = folder / f"{name}.json"
            told = {**os.environ, "SENNIT_AGENT": socket, "HOME": str(folder)}
            options = [f"--ingest=xdp://{interface}:{PORT}", "--ranks", str(RANKS), *RUN, "--json", str(report)]
            command = [*prefix, *sennit, "train", *options]
            to = ["--to", f"[{address}]:{PORT}", "--timeout", "60"]
            trainer = planes.popen(
                TRAINER_HOST, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=told
            )
            feeder = planes.popen(
                FEEDER_HOST, [*sennit, "feed", *DATA, *to], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for process in (trainer, feeder):
                said, _ = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0, said
            content = json.loads(report.read_text())
            assert content["ingest"]["target"].startswith("xdp://")
            return str(content["weights_sha256"])

        assert run("agent", WITHOUT_RIGHTS, str(path)) == run("root", [], "")
        agent.terminate()
        lines, _ = agent.communicate(timeout=DEADLINE_S)
        assert lines.count(": attached") == lines.count(": detached: the trainer closed it") == RANKS, lines
