# SPDX-License-Identifier: Apache-2.0
"""`sennit train` that loses a rank, and takes one in from another host over a network that loses packets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from sennit.testbed.topology import Impairment, Planes
from tests.runtime.whole_run import train

pytestmark = [pytest.mark.root, pytest.mark.needs("backend", "tc-bpf", "nsenter"), pytest.mark.timeout(240)]

PROGRAM = Path(__file__).parents[1] / "runtime" / "mortal_trainer.py"
TINY = [
    "--data", "synthetic", "--samples", "700", "--row-limit", "200", "--batch-size", "60", "--dim", "4",
    "--bottom", "8", "--top", "8", "--epochs", "1", "--row-shards", "4",
]  # fmt: skip
DEADLINE_S = 100.0
LOOK_S = 0.02


def test_a_death_a_join_and_loss_change_no_bit(tmp_path: Path, seed: int) -> None:
    """Two ranks of host 0, of which one dies; two of host 1 join. Their weights are those of one rank left alone."""
    alone = train(tmp_path / "alone.json", *TINY, "--ranks", "1")
    halted, report = tmp_path / "halted", tmp_path / "report.json"
    plan = {"DEATHS": json.dumps([[1, 3, str(tmp_path / "died")]]), "HALTS": json.dumps([[1, 5, str(halted), 2]])}
    elastic = [*TINY, "--elastic", "--timeout", f"{DEADLINE_S:.0f}", "--sharding", "row_wise"]
    with Planes(hosts=2, planes=2) as planes, contextlib.ExitStack() as stack:
        planes.impair(Impairment(loss_fraction=0.01, reorder_fraction=0.05, reorder_depth=16, seed=seed))

        def start(host: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
            process: subprocess.Popen[str] = planes.popen(
                host,
                [sys.executable, str(PROGRAM), *elastic, *arguments],
                env={**os.environ, **planes.environment(host), **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            return process

        run = start(0, "--ranks", "2", "--json", str(report), **plan)
        assert run.stdout is not None
        # A warning of torch may come first: nobody knows names of hosts here.
        address = next(line.rpartition("--join ")[2].strip() for line in run.stdout if "--join " in line)
        deadline_s = time.monotonic() + DEADLINE_S
        while not halted.exists():
            assert run.poll() is None, run.stdout.read()
            assert time.monotonic() < deadline_s
            time.sleep(LOOK_S)
        newcomers = start(1, "--ranks", "2", "--join", address)
        told, _ = run.communicate(timeout=DEADLINE_S)
        joined, _ = newcomers.communicate(timeout=DEADLINE_S)
        assert (run.returncode, newcomers.returncode) == (0, 0), told + joined
        switches = [planes.counters(host, plane) for host in range(2) for plane in range(2)]
        assert sum(switch.dropped for switch in switches) > 0
    found = json.loads(report.read_text())
    assert found["world_size"] == 3
    assert found["changes"][0]["lost"] == [1]
    for what in ("weights_sha256", "quality"):
        assert found[what] == alone[what]
