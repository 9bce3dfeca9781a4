# SPDX-License-Identifier: Apache-2.0
"""A small run of `sennit bench rdma` from end to end. No timing is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.testbed.vm import links

pytestmark = pytest.mark.rdma

DEADLINE_S = 100.0


def test_every_peer_is_measured_under_every_setting_and_the_link_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "sennit", "bench", "rdma", "--rounds", "1", "--in-flight", "2", "--no-cpu"]
    command += ["--netem", "", "--netem", "loss 1%", "--against", "kernel-rc", "--force", "--json", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    rows = [(row["in_flight"], row["netem"]) for row in report["rows"]]
    assert rows == [(2, ""), (2, "loss 1%")]
    for row in report["rows"]:
        assert set(row["samples_s"]) == {"verbs", "kernel-rc"}
        assert all(len(samples) == 1 and samples[0] > 0 for samples in row["samples_s"].values())
    assert "loss 1%" in done.stdout
    shown = subprocess.run(
        ["tc", "qdisc", "show", "dev", links.netdev(0)], check=True, capture_output=True, text=True, timeout=30
    )
    assert "netem" not in shown.stdout
