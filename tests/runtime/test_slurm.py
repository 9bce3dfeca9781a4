# SPDX-License-Identifier: Apache-2.0
"""The batch file for Slurm, run by a controller and two nodes of Slurm on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.free_ports import free_ports
from tests.runtime.slurm_nodes import SlurmNodes

pytestmark = [pytest.mark.root, pytest.mark.needs("slurm"), pytest.mark.timeout(240)]

BATCH_FILE = Path(__file__).resolve().parents[2] / "examples/cluster/slurm.sbatch"
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "SENNIT_TRANSPORT": "udp",
    "SENNIT_INTERFACES": "lo",
}
# At its first start rank 1 ends with status 3, while rank 0 waits. No rank needs torch, only the launchers do.
PROGRAM = """
import os, pathlib, signal, sys
placed = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
started = pathlib.Path(__file__).with_name(f"started-{placed[0]}")
print("placed", *placed, "again" if started.exists() else "first", *sys.argv[1:], flush=True)
if not started.exists():
    started.touch()
    sys.exit(3) if placed[0] == "1" else signal.pause()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[SlurmNodes]:
    with SlurmNodes(2) as made:
        yield made


@pytest.mark.long
def test_a_job_trains_on_two_nodes(nodes: SlurmNodes, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status, said = nodes.submit(
        str(BATCH_FILE), "-m", "sennit.runtime.training", "--data=synthetic", "--samples=600", "--row-limit=200",
        "--batch-size=64", "--dim=4", "--bottom=8", "--top=8", "--epochs=1",
        "--sharding=table_wise", f"--json={report}",
        environment=ENVIRONMENT,
    )  # fmt: skip
    assert status == 0, said
    found = json.loads(report.read_text())
    assert found["world_size"] == 2
    assert found["steps"] == {"first": 0, "last": 8}
    assert found["bytes_moved"]["data_bytes_sent"] > 0
    assert found["weights_sha256"] in said


@pytest.mark.slow
def test_the_launchers_start_a_program_again_on_all_nodes(nodes: SlurmNodes, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (port,) = free_ports(1)
    variables = {**ENVIRONMENT, "MAX_RESTARTS": "1", "RENDEZVOUS_PORT": str(port)}
    status, said = nodes.submit(str(BATCH_FILE), str(program), "--of-the-user", environment=variables)
    assert status == 0, said
    starts = [f"placed {rank} 2 1 127.0.0.1 {when} --of-the-user" for when in ("first", "again") for rank in (0, 1)]
    assert sorted(line for line in said.splitlines() if line.startswith("placed")) == sorted(starts), said


def test_a_job_without_a_program_says_how_to_submit_one(nodes: SlurmNodes) -> None:
    status, said = nodes.submit(str(BATCH_FILE), environment=ENVIRONMENT)
    assert status == 2
    assert "usage: sbatch" in said
