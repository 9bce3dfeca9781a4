# SPDX-License-Identifier: Apache-2.0
"""The simulator from Python: a small run from end to end, its report, and refused scenarios."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sennit.cli import app
from sennit.testbed.simulation import report, runner, suite
from sennit.testbed.simulation.outcome import Outcome
from sennit.testbed.simulation.scenario import Scenario

SMALL = Scenario(hosts=32, hosts_per_leaf=8, spines=8, size_bytes=16 << 10)


def test_small_run_moves_every_byte(seed: int) -> None:
    outcome = runner.run(SMALL.with_(seed=seed, failed_fraction=0.03))
    assert outcome.is_complete
    assert outcome.failure == ""
    count = outcome.counters
    assert count["message_bytes"] == sum(outcome.arrived_bytes) == 32 * 31 * (16 << 10)
    assert count["messages"] == 32 * 31
    accounted = ("delivered_packets", "queue_dropped_packets", "black_holed_packets", "in_flight_packets")
    assert count["sent_packets"] == sum(count[name] for name in accounted)
    assert outcome.tiers["leaf_up"].links == 31
    assert 0 < outcome.tiers["leaf_up"].least <= outcome.tiers["leaf_up"].most < 1
    assert outcome.message_us == sorted(outcome.message_us)
    # A host's own link sends 31 blocks of 16 KiB at 100 Gb/s, and four hops take 4 us.
    assert outcome.ideal_us == pytest.approx(31 * (16 << 10) / 12_500 + 4)
    assert outcome.ratio > 1


def test_run_is_a_pure_function_of_its_seed(seed: int) -> None:
    first, second = (runner.run(SMALL.with_(seed=seed)) for _ in range(2))
    assert first.trace_hash == second.trace_hash
    assert first.trace_hash != runner.run(SMALL.with_(seed=seed + 1)).trace_hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 1}, "hosts is 1; allowed: 2..65536"),
        ({"spines": 0}, "spines is 0"),
        ({"kind": "gather"}, "kind is gather; allowed: alltoall, allreduce_direct"),
        ({"spread": "flowlet"}, "spread is flowlet; allowed: sprayed, per_message"),
        ({"path_policy": "random"}, "random"),
        ({"failed_fraction": 2.0}, "allowed: 0 to 1"),
        ({"kind": "allreduce_ring", "size_bytes": 1001}, "a multiple of hosts"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(SMALL.with_(**changes))


def test_missing_field_is_named() -> None:
    from sennit.testbed._lab import FabricSimulation

    with pytest.raises(KeyError, match="hosts"):
        FabricSimulation({})


def test_case_names_are_distinct_and_name_files() -> None:
    for quick in (False, True):
        names = [case.name for case in suite.cases(quick=quick, seed=1)]
        assert len(names) == len(set(names))
        assert all(name.replace("_", "").replace("-", "").isalnum() for name in names)


def test_command_writes_table_figure_and_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    options = ["testbed", "simulate", "--quick", "--only", "permutation-reps", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*options, "--page", str(page)])
    assert result.exit_code == 0, result.output
    outcome = Outcome.from_json(json.loads((tmp_path / "out" / "permutation-reps.json").read_text()))
    assert outcome.is_complete
    assert outcome.trace_hash in result.output
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| permutation | reps |" in text
    assert f"{outcome.ratio:.2f}" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    # The outcome exists, so nothing runs again.
    again = CliRunner().invoke(app, [*options, "--page", str(tmp_path / "none.md")])
    assert again.exit_code == 2
    assert "none.md" in again.output
    assert Outcome.from_json(json.loads((tmp_path / "out" / "permutation-reps.json").read_text())) == outcome


def test_outcome_of_another_core_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suite.Case(group="small", way="reps", scenario=SMALL)

    def run_case() -> Outcome:
        return runner.run_cases([case], tmp_path, jobs=1, done=lambda case, outcome: None)[case.name]

    first = run_case()
    assert first.fingerprint == runner.fingerprint()
    stored = tmp_path / f"{case.name}.json"
    stored.write_text(json.dumps(first.as_json() | {"wall_s": 1234.5}))
    assert run_case().wall_s == 1234.5
    monkeypatch.setattr(runner, "fingerprint", lambda: "another core")
    assert run_case().wall_s != 1234.5


def test_unknown_case_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["testbed", "simulate", "--only", "sorting", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "sorting" in result.output
