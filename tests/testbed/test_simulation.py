# SPDX-License-Identifier: Apache-2.0
"""The simulator from Python: a small run from end to end, its report, and refused scenarios."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.testbed.simulation import report, runner, suite
from sennit.testbed.simulation.outcome import Outcome
from sennit.testbed.simulation.plans import Program, program
from sennit.testbed.simulation.scenario import Pattern, Scenario
from sennit.transport.config import Algorithm
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.plan import Plan, Recv, Send
from sennit.transport.plans.plan_codec import encode

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
        ({"peers_at_a_time": 0}, "peers_at_a_time is 0; allowed: 1 or more"),
        ({"algorithm": "gossip"}, "gossip"),
        ({"path_policy": "random"}, "random"),
        ({"failed_fraction": 2.0}, "allowed: 0 to 1"),
        ({"pattern": Pattern.ALLREDUCE, "size_bytes": 1001}, "size_bytes is 1001; allowed for an allreduce"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(SMALL.with_(**changes))


PLANS = [
    (8, Pattern.ALLREDUCE, 1 << 20, None),
    (12, Pattern.ALLREDUCE, 40_000, Algorithm.HALVING),
    (16, Pattern.ALLREDUCE, 600, Algorithm.DISSEMINATION),
    (16, Pattern.ALLREDUCE, 8 << 10, Algorithm.ONE_SHOT),
    (24, Pattern.ALLTOALL, 20_000, None),
    (8, Pattern.ALLTOALL, 512, Algorithm.BRUCK),
    (8, Pattern.PERMUTATION, 100_000, None),
]


@pytest.mark.parametrize(("hosts", "pattern", "size_bytes", "algorithm"), PLANS)
def test_messages_are_those_of_the_plans(
    hosts: int, pattern: Pattern, size_bytes: int, algorithm: Algorithm | None
) -> None:
    """Between each pair of ranks, as the mailboxes saw it; also where links die and packets are sent again."""
    scenario = Scenario(
        hosts=hosts,
        hosts_per_leaf=4,
        spines=4,
        pattern=pattern,
        size_bytes=size_bytes,
        algorithm=algorithm,
        peers_at_a_time=5,
        failed_fraction=0.1,
        fail_at_us=8,
        convergence_us=2_000,
    )
    expected: Counter[tuple[int, int]] = Counter()
    expected_bytes: Counter[tuple[int, int]] = Counter()
    of_all = program(scenario)
    assert algorithm in (None, of_all.algorithm)
    for plan in of_all.plans(hosts):
        for step in (with_counts(plan, of_all.counts) if of_all.counts else plan).steps:
            if isinstance(step, Send):
                expected[plan.rank, step.peer] += 1
                expected_bytes[plan.rank, step.peer] += step.size_bytes
    simulation = runner.simulation_of(scenario)
    simulation.run()
    assert simulation.result()["is_complete"]
    traffic = simulation.traffic()
    assert {(sender, receiver): messages for sender, receiver, messages, _ in traffic} == expected
    assert {(sender, receiver): size for sender, receiver, _, size in traffic} == expected_bytes


def test_alltoall_meets_each_peer_once_in_both_directions() -> None:
    """So a pair's two messages use one connection, and a large fabric makes half as many."""
    plan = program(SMALL).compile_plan(5)
    sends = [step.peer for step in plan.steps if isinstance(step, Send)]
    receives = [step.peer for step in plan.steps if isinstance(step, Recv)]
    assert sorted(sends) == sorted(receives) == [rank for rank in range(32) if rank != 5]
    for number, peer in enumerate(receives):
        assert peer in sends[max(number - 1, 0) : number + 2]


def test_large_allreduce_sends_the_least_that_any_can() -> None:
    """So its ideal, which is computed from the plans, is that of every algorithm (Patarasu and Yuan, 2009)."""
    scenario = SMALL.with_(pattern=Pattern.ALLREDUCE, size_bytes=1 << 20)
    outcome = runner.run(scenario)
    assert outcome.counters["message_bytes"] == 2 * 31 * (1 << 20)
    assert outcome.ideal_us == pytest.approx(2 * 31 * (1 << 15) / 12_500 + 4)


def test_allreduce_by_halving_keeps_links_busy() -> None:
    """A rank sends first what its peer passes on first. In order of addresses it took 1.4 times the ideal."""
    scenario = SMALL.with_(pattern=Pattern.ALLREDUCE, size_bytes=16 << 20, algorithm=Algorithm.HALVING)
    assert runner.run(scenario.with_(window_bytes=128 << 10)).ratio < 1.15


def test_small_allreduce_takes_few_round_trips() -> None:
    """Virtual time. A round trip between leaves takes eight hops."""
    outcome = runner.run(SMALL.with_(pattern=Pattern.ALLREDUCE, size_bytes=8 << 10, algorithm=Algorithm.HALVING))
    assert outcome.is_complete
    assert outcome.completion_us < 2.5 * 5 * 8


@pytest.mark.parametrize(
    ("ranks", "message"),
    [([1], "the plan is for rank 1 of 8; allowed: 0 of 8"), ([0, 1], "2 plans for 8 hosts; allowed: one for each")],
)
def test_plans_that_do_not_fit_the_hosts_are_refused(ranks: list[int], message: str) -> None:
    from sennit.testbed._lab import FabricSimulation

    scenario = Scenario(hosts=8, hosts_per_leaf=4, spines=4)
    of_all = program(scenario)
    simulation = FabricSimulation(scenario.as_dict())

    def add_and_run() -> None:
        for rank in ranks:
            simulation.add_rank(encode(of_all.compile_plan(rank)), of_all.counts)
        simulation.run()

    with pytest.raises(ValueError, match=message):
        add_and_run()


def test_broken_plan_is_refused() -> None:
    from sennit.testbed._lab import FabricSimulation

    simulation = FabricSimulation(Scenario(hosts=8, hosts_per_leaf=4, spines=4).as_dict())
    with pytest.raises(ValueError, match="plan"):
        simulation.add_rank(b"SNP1", [])


def test_ranks_that_run_different_operations_end_the_run() -> None:
    """The mailbox finds it out, as in a group."""
    from sennit.testbed._lab import FabricSimulation

    scenario = Scenario(hosts=8, hosts_per_leaf=4, spines=4, pattern=Pattern.ALLREDUCE, size_bytes=1 << 10)
    simulation = FabricSimulation(scenario.as_dict())
    for rank in range(8):
        size_bytes = 1 << 10 if rank != 3 else 2 << 10
        simulation.add_rank(encode(program(scenario.with_(size_bytes=size_bytes)).compile_plan(rank)), [])
    simulation.run()
    result = simulation.result()
    assert not result["is_complete"]
    assert "runs allreduce" in result["failure"]


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
    assert "| permutation | permutation | reps |" in text
    assert f"{outcome.ratio:.2f}" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    # The outcome exists, so nothing runs again.
    again = CliRunner().invoke(app, [*options, "--page", str(tmp_path / "none.md")])
    assert again.exit_code == 2
    assert "none.md" in again.output
    assert Outcome.from_json(json.loads((tmp_path / "out" / "permutation-reps.json").read_text())) == outcome


def test_outcome_of_another_core_or_of_other_plans_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = suite.Case(group="sum", way="reps", scenario=SMALL.with_(pattern=Pattern.ALLREDUCE, size_bytes=8 << 10))
    stored = tmp_path / f"{case.name}.json"

    def run_case() -> Outcome:
        return runner.run_cases([case], tmp_path, jobs=1, done=lambda case, outcome: None)[case.name]

    kept = json.dumps(run_case().as_json() | {"wall_s": 1234.5})
    stored.write_text(kept)
    assert run_case().wall_s == 1234.5
    with monkeypatch.context() as patched:
        patched.setattr(runner, "fingerprint", lambda: "another core")
        assert run_case().wall_s != 1234.5
    stored.write_text(kept)
    assert run_case().wall_s == 1234.5
    real = program

    def other(scenario: Scenario) -> Program:
        # The same algorithm by name, in other steps. The core's fingerprint has plans of its own.
        before = real(scenario)

        def compile_plan(rank: int) -> Plan:
            plan = before.compile_plan(rank)
            return plan._replace(scratch_bytes=plan.scratch_bytes + 64)

        return dataclasses.replace(before, compile_plan=compile_plan) if scenario == case.scenario else before

    monkeypatch.setattr(runner, "program", other)
    assert run_case().wall_s != 1234.5


@pytest.mark.parametrize(("cores", "memory_gib", "jobs"), [(2, 23, 2), (8, 9, 2), (4, 1, 1)])
def test_runs_at_a_time_fit_the_machine(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory_gib: int, jobs: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else memory_gib << 18)
    assert runner.jobs_of_this_machine() == jobs


def test_unknown_case_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["testbed", "simulate", "--only", "sorting", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "sorting" in result.output
