# SPDX-License-Identifier: Apache-2.0
"""The benchmark of making groups: it counts bytes and memory, and a rank that fails is named. No timing is asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from sennit.runtime.training.launch import RankFailure
from sennit.testbed.bench.transport import group, group_rank

pytestmark = pytest.mark.needs("backend", "shm")


def test_a_small_group_is_made_with_each_peer_in_turn() -> None:
    report = group.run(group.Settings(world=3, rounds=2, transport="udp", warm=True))
    assert list(report.results) == ["sennit", "gloo"]
    for result in report.results.values():
        assert len(result.seconds) == 2
        assert min(result.seconds) > 0
        assert result.read_bytes_a_peer > 0
    # With 2 peers: queue pairs, sockets and flows of 8 paths each.
    assert 0 < report.results["sennit"].memory_bytes < 64 << 20
    console = Console(record=True, width=160)
    group.render(report, console)
    assert f"{report.ratio('gloo'):.2f}" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["results"]["gloo"]["ratio"] == report.ratio("gloo")


def test_wrong_settings_are_refused_and_a_rank_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="peer 'mpi': known are sennit, gloo"):
        group.Settings(against=("mpi",))
    with pytest.raises(RankFailure, match=r"rank \d: SENNIT_TRANSPORT"):
        group.run(group.Settings(world=2, rounds=1, transport="pigeon", warm=True))


def test_each_round_has_fresh_processes_that_import_torch_alone() -> None:
    report = group.run(group.Settings(world=2, rounds=1, against=()))
    (result,) = report.results.values()
    assert len(result.seconds) == 1
    assert result.processor_s[0] > 0
    assert result.read_bytes_a_peer > 0
    # What a backend imports for a group is measured. torch itself imports the file of torch's versions.
    imported = re.findall(r"^from (sennit\S*) import", Path(group_rank.__file__).read_text(), re.MULTILINE)
    assert imported == ["sennit.runtime.backend.torch_versions"]


@pytest.mark.long
def test_a_fresh_rank_that_fails_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank \d: .*SENNIT_TRANSPORT"):
        group.run(group.Settings(world=2, rounds=1, transport="pigeon"))
