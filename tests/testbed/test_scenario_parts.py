# SPDX-License-Identifier: Apache-2.0
"""The parts of scenarios, without a network: data and its limits, checks of bytes, measures, verdicts."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import socket
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios import fault_timeline, hostile, kernel_packets, measures, results
from sennit.testbed.scenarios.catalogue import SCENARIOS, choose
from sennit.testbed.scenarios.counters import difference
from sennit.testbed.scenarios.model import (
    Goal,
    KillRank,
    Library,
    Operation,
    Scenario,
    SwitchPlane,
    Topology,
    Variant,
    Workload,
)
from sennit.testbed.scenarios.payload import Payload, expected_sum, random_input, recoded, summed
from sennit.testbed.scenarios.stage import Observations, Recovery, Run
from sennit.transport.oracle import roce

SIZE_BYTES = 4096


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(hosts=1), r"hosts 1; allowed: 2\.\.64"),
        (lambda: Topology(planes=17), r"planes 17; allowed: 1\.\.16"),
        (lambda: Topology(hosts=64, strangers=1), r"hosts 64; allowed: 2\.\.63"),
        (lambda: Topology(mtu_bytes=9001), r"mtu_bytes 9001; allowed: 1280\.\.9000"),
        (lambda: Workload(timeout_s=0), "timeout_s 0; allowed: above 0"),
        (
            lambda: Scenario(
                name="s", title="", workload=Workload(rounds=1), faults=(SwitchPlane(plane=4, up=False, at_s=1.0),)
            ),
            r"s: fault of plane 4; allowed: 0\.\.3",
        ),
        (lambda: Topology(rate_bits_per_s=10**9), "queue of 0 bytes; allowed: both or neither"),
        (lambda: Workload(size_bytes=4), "size_bytes 4; allowed: 4096 or more"),
        (lambda: Workload(operation=Operation.ALLTOALL, duration_s=1.0), "allowed: with allreduce"),
        (lambda: Scenario(name="s", title="", faults=(KillRank(rank=0, at_s=1.0),)), "1 with faults|3 rounds"),
        (
            lambda: Scenario(name="s", title="", workload=Workload(rounds=1), faults=(KillRank(rank=2, at_s=1.0),)),
            r"s: fault at rank 2; allowed: 1\.\.1",
        ),
        (
            lambda: Scenario(
                name="s", title="", workload=Workload(leaves=3), variants=(Variant(layout="ab", scattered=True),)
            ),
            "s: scattered over 2 ranks; allowed: as many as leaves",
        ),
        (
            lambda: Scenario(name="s", title="", topology=Topology(hosts=3), libraries=(Library.GLOO,)),
            "gloo with 3 hosts",
        ),
    ],
)
def test_impossible_scenarios_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_data_with_goals_that_are_measured(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.name == name
    for form in (scenario, scenario.shortened()):
        assert form.goals == scenario.goals
        assert any(goal.must for goal in form.goals)
        for goal in form.goals:
            assert measures.MEANINGS[measures.family(goal.measure)]
        plain = json.loads(json.dumps(form.as_json(), allow_nan=False))
        assert plain["workload"]["size_bytes"] == form.workload.size_bytes
        assert len(plain["faults"]) == len(form.faults)
    assert scenario.shortened().workload.size_bytes <= scenario.workload.size_bytes


def test_unknown_scenarios_are_named_with_what_there_is() -> None:
    assert [scenario.name for scenario in choose(["plane-off", "plane-off"])] == ["plane-off"]
    assert len(choose(["plane-off", "all"])) == len(SCENARIOS)
    with pytest.raises(ValueError, match=r"no scenario nothing; there are: all, .*plane-off"):
        choose(["plane-off", "nothing"])


def exchange(operation: Operation, payloads: list[Payload]) -> None:
    """Does the collective with NumPy."""
    given = [payload.given.copy() for payload in payloads]
    world = len(payloads)
    for rank, payload in enumerate(payloads):
        match operation:
            case Operation.ALLREDUCE:
                total = given[0].copy()
                for other in given[1:]:
                    total += other
                payload.got[:] = total
            case Operation.ALLTOALL:
                blocks = [other.reshape(world, -1)[rank] for other in given]
                payload.got[:] = np.concatenate(blocks)
            case Operation.INCAST:
                payload.got[:] = np.concatenate(given) if rank == 0 else 0


@pytest.mark.parametrize("operation", Operation)
def test_payload_accepts_the_right_bytes_only(operation: Operation, seed: int) -> None:
    payloads = [Payload(operation, rank=rank, world=3, size_bytes=SIZE_BYTES, seed=seed) for rank in range(3)]
    for repetition in range(3):
        for rank, payload in enumerate(payloads):
            payload.fill(repetition, last=rank == 0 and repetition == 2)
        exchange(operation, payloads)
        assert [payload.wrong_elements(repetition) for payload in payloads] == [0, 0, 0]
        if operation is Operation.ALLREDUCE:
            assert [payload.was_last() for payload in payloads] == [repetition == 2] * 3
            assert len({payload.digest() for payload in payloads}) == 1
    root = payloads[0]
    root.got[7:8].view(np.uint32)[0] ^= 1
    assert root.wrong_elements(2) == 1
    root.got[7:8].view(np.uint32)[0] ^= 1
    assert root.wrong_elements(2) == 0
    # The right result of the previous repetition is wrong in this one.
    assert root.wrong_elements(1) > 0


def test_the_same_leaves_have_one_digest_however_many_ranks_give_them(seed: int) -> None:
    """Of the operation by which it was computed the payload knows nothing."""
    digests = set()
    for world in (1, 3, 8):
        for rank in range(world):
            payload = Payload(
                Operation.ALLREDUCE, rank=rank, world=world, size_bytes=SIZE_BYTES, seed=seed, leaves=8, scattered=True
            )
            payload.fill(0, last=False)
            assert payload.wrong_elements(0) > 0
            payload.got[:] = expected_sum(seed, 8, payload.elements)
            assert payload.wrong_elements(0) == 0
            digests.add(payload.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_coded_payload_accepts_the_bits_of_the_definition_only(codec: str, seed: int) -> None:
    digests = set()
    for world in (1, 3, 8):
        for rank in range(world):
            payload = Payload(
                Operation.ALLREDUCE, rank=rank, world=world, size_bytes=SIZE_BYTES, seed=seed, leaves=8, codec=codec
            )
            coder = payload.codec
            assert coder is not None
            for repetition in (1, 0):
                payload.fill(repetition, last=False)
                turned = [np.roll(random_input(seed, leaf, payload.elements), -131 * repetition) for leaf in range(8)]
                rows = [recoded(coder, row, leaf * payload.elements) for leaf, row in enumerate(turned)]
                payload.got[:] = summed(rows)
                assert payload.wrong_elements(repetition) > 0  # the sum is not coded
                payload.got[:] = recoded(coder, summed(rows), 8 * payload.elements)
                assert payload.wrong_elements(repetition) == 0
            payload.got[9:10].view(np.uint32)[0] ^= 1
            assert payload.wrong_elements(0) == 1
            payload.got[9:10].view(np.uint32)[0] ^= 1
            digests.add(payload.digest())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"codec": "zip", "leaves": 8}, "codec 'zip'; allowed: fp16"),
        ({"codec": "int8"}, "codec int8 with allreduce; allowed: with leaves or alltoall"),
        ({"codec": "int8", "operation": Operation.INCAST}, "codec int8 with incast"),
    ],
)
def test_codecs_of_workloads_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Workload(**fields)


def test_same_bits_runs_every_algorithm_in_every_world() -> None:
    variants = SCENARIOS["same-bits"].variants
    for world in (2, 3, 4, 5, 8):
        ran = {variant.algorithm for variant in variants if len(set(variant.layout)) == world == len(variant.layout)}
        assert ran >= {"one_shot", "direct", "dissemination", "halving"}, world
    halved = {(variant.layout, variant.loss_fraction) for variant in variants if variant.algorithm == "halving"}
    layouts = ("abc", "aabb", "aaabb", "aabbccdd")
    assert halved >= {(layout, loss) for layout in layouts for loss in (0.0, 0.01, 0.05)}
    assert {variant.algorithm for variant in variants if variant.scattered} == {"direct", "halving", "hierarchical"}
    assert any(len(variant.layout) == 1 for variant in variants)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("random", None),
        ("truncated", "truncated"),
        ("mutated", None),
        ("unknown_data", None),
        ("unknown_control", None),
    ],
)
def test_hostile_packets_are_what_they_are_called(kind: str, reason: str | None, seed: int) -> None:
    ends = ("fd00::1", 50_000), ("fd00::2", 4791)
    data = hostile.KINDS[kind](random.Random(seed), *ends)
    if kind.startswith("unknown"):
        packet = roce.Packet.pull(data)
        assert packet.icrc == roce.icrc(data[:-4], *ends)
    elif reason is not None:
        with pytest.raises(roce.WireError) as caught:
            roce.Packet.pull(data)
        assert caught.value.reason == reason
    else:
        assert len(data) == hostile.PACKET_BYTES


def answer(begins_s: list[float], ends_s: list[float], **fields: Any) -> dict[str, Any]:
    return {"begins_s": begins_s, "ends_s": ends_s, "wrong_elements": [0] * len(ends_s), "samples": [], **fields}


def run(answers: list[dict[str, Any]], **fields: Any) -> Run:
    values: dict[str, Any] = {
        "library": Library.SENNIT,
        "disturbed": True,
        "variant": Variant(),
        "round": 0,
        "answers": answers,
        "events": [],
        "impairment_counters": {},
        "queue_counters": {},
        "rank_counters": [],
    }
    return Run(**{**values, **fields})


def observe(scenario: Scenario, *runs: Run) -> dict[str, float]:
    found = measures.measure(Observations(scenario=scenario, seed=1, runs=list(runs)))
    for name in found:
        assert measures.MEANINGS[measures.family(name)]
    return found


def test_families_of_measures_have_a_meaning_and_others_must() -> None:
    assert measures.family("goodput_kept") == "goodput_kept"
    assert measures.family("goodput.sennit.calm") == "goodput."
    with pytest.raises(KeyError, match="goodput_lost"):
        measures.family("goodput_lost")


def test_a_repetition_lasts_from_the_last_to_come_to_the_last_to_leave() -> None:
    both = run([answer([0.0, 10.0], [2.0, 12.0]), answer([1.0, 9.0], [3.0, 11.5])])
    assert measures.repetition_times_s(both) == [2.0, 2.0]


def test_goodput_is_compared_within_rounds() -> None:
    scenario = Scenario(name="s", title="", workload=Workload(size_bytes=SIZE_BYTES))
    # The machine is ten times slower in the second round. The library loses half of its goodput in both rounds.
    runs = [
        run([answer([0.0], [seconds * slow])], disturbed=disturbed, round=round_, library=library)
        for round_, slow in enumerate((1.0, 10.0))
        for disturbed, library, seconds in (
            (False, Library.SENNIT, 1.0),
            (True, Library.SENNIT, 2.0),
            (True, Library.GLOO, 8.0),
        )
    ]
    found = observe(scenario, *runs)
    assert found["goodput_kept"] == 0.5
    assert found["ratio_to_gloo"] == 4.0
    assert "ratio_to_gloo_calm" not in found
    assert found["results"] == 6


def test_wrong_results_failures_and_other_bits_are_counted() -> None:
    scenario = Scenario(name="s", title="")
    good = answer([0.0], [1.0], digest="a")
    bad = answer([0.0], [1.0], digest="b") | {"wrong_elements": [3]}
    failed = answer([0.0], [], error={"kind": "PeerError", "message": "gone", "at_s": 1.0})
    found = observe(scenario, run([good, bad]), run([good, failed]))
    assert found["results"] == 3
    assert found["wrong_results"] == 1
    assert found["failed_ranks"] == 1
    assert found["distinct_digests"] == 2


def test_corrupt_packets_are_compared_with_those_counted() -> None:
    one = run(
        [answer([0.0], [1.0])] * 2,
        impairment_counters={"corrupted": 8, "dropped": 3},
        rank_counters=[{"bad_icrc": 5, "unknown_qpn": 1}, {"bad_icrc": 1}],
    )
    found = observe(Scenario(name="s", title=""), one)
    assert found["corrupt_counted"] == 7 / 8
    assert found["impairment.dropped"] == 3


@pytest.mark.parametrize(
    ("messages", "naming"),
    [
        (["rank 2 is gone", "waits for ranks 1, 2 of 4"], 1.0),
        (["rank 21 is gone", "rank 2 is gone"], 0.5),
        (["something is wrong"], 0.0),
    ],
)
def test_survivors_must_name_the_dead_rank(messages: list[str], naming: float) -> None:
    scenario = Scenario(
        name="s",
        title="",
        topology=Topology(hosts=len(messages) + 1 if len(messages) > 1 else 3),
        workload=Workload(rounds=1),
        faults=(KillRank(rank=2, at_s=1.0),),
    )
    survivors = [
        answer([0.0], [], error={"kind": "PeerError", "message": message, "lost_ranks": [2], "at_s": 11.0 + rank})
        for rank, message in enumerate(messages)
    ]
    survivors += [answer([0.0], [1.0])] * (2 - len(survivors))
    found = observe(scenario, run([*survivors, {}], events=[("rank 2 killed", 10.5)]))
    assert found["errors_naming_rank"] == naming
    assert found["error_within_s"] == 0.5 + len(messages) - 1


def test_recovery_takes_agreement_and_the_next_collective() -> None:
    scenario = Scenario(
        name="s",
        title="",
        topology=Topology(hosts=3),
        workload=Workload(rounds=1),
        faults=(KillRank(rank=2, at_s=1.0),),
        recovers=True,
    )
    error = {"kind": "PeerError", "message": "rank 2 is gone", "lost_ranks": [2], "at_s": 11.0}
    seen = Observations(
        scenario=scenario,
        seed=1,
        runs=[run([answer([0.0], [], error=error)] * 2 + [{}], events=[("rank 2 killed", 10.5)])],
        recovery=Recovery(
            reconfigured=[{"began_s": 11.0, "ended_s": 11.5}, {"began_s": 11.25, "ended_s": 11.75}],
            answers=[answer([20.0], [20.5]), answer([20.25], [20.5])],
        ),
    )
    found = measures.measure(seen)
    assert found["errors_naming_rank"] == 1.0
    assert found["recovered_ranks"] == 2
    assert found["recovered_within_s"] == 0.75 + 0.25
    # A survivor that blames another survivor has not named the right rank.
    error["lost_ranks"] = [0, 2]
    assert measures.measure(seen)["errors_naming_rank"] == 0.0


def sampled(progress: list[tuple[float, float]], plane: float = 0.0) -> list[tuple[float, ...]]:
    return [(at_s, received, plane) for at_s, received in progress]


def test_a_stall_is_a_time_without_progress_on_any_rank_inside_a_collective() -> None:
    # Nothing moves from 3 to 7, but from 5 on rank 1 is between two collectives.
    rows = sampled([(0.0, 0), (1.0, 10), (2.0, 20), (3.0, 30), (4.0, 30), (7.0, 30), (8.0, 40), (9.0, 50)])
    ranks = [
        answer([0.0, 6.0], [5.0, 9.0]) | {"samples": rows},
        answer([0.0, 6.5], [5.0, 9.0]) | {"samples": sampled([(0.0, 0), (3.5, 5), (9.0, 5)])},
    ]
    one = run(ranks)
    assert fault_timeline.common_intervals(one) == [(0.0, 5.0), (6.5, 9.0)]
    # Rank 1 moved at 3.5. Then nothing moves until the end of the collective at 5.
    assert fault_timeline.unsampled(one, period_s=1.0) == []
    assert fault_timeline.longest_stall_s(one, 0.0, 9.0, period_s=1.0) == 1.5
    assert fault_timeline.longest_stall_s(one, 0.0, 3.0, period_s=1.0) == 1.0
    assert fault_timeline.longest_stall_s(one, 5.0, 6.0, period_s=1.0) is None


def test_a_machine_that_stands_still_is_no_stall() -> None:
    rows = [(ms / 1000, 10.0 * min(ms, 20), 0.0) for ms in (*range(21), *range(26, 30), *range(60, 65))]
    one = run([answer([0.0], [0.064]) | {"samples": rows}] * 2)
    assert fault_timeline.unsampled(one) == [(0.020, 0.026), (0.029, 0.060)]
    # Payload stops at 20 ms. There are no samples in 6 ms and 31 ms of the 44 ms until the end.
    assert fault_timeline.longest_stall_s(one, 0.0, 1.0) == pytest.approx(0.007)


def test_return_of_a_plane_and_goodput_without_it() -> None:
    faults = (SwitchPlane(plane=0, up=False, at_s=1.0), SwitchPlane(plane=0, up=True, at_s=2.0))
    scenario = Scenario(
        name="s", title="", topology=Topology(planes=1), workload=Workload(rounds=1, timeline=True), faults=faults
    )
    # Payload comes at 1000 bytes/s, at half of that from 1 s to 2 s. It stops between the collectives, from 0.5 s to
    # 0.6 s, where nothing is measured. The plane carries 1000 bytes/s, but nothing from 1 s to 2.1 s.
    rows = [
        (
            ms / 1000,
            ms - max(min(ms, 600) - 500, 0) - max(min(ms, 2000) - 1000, 0) / 2,
            float(ms if ms < 1000 else 1000 if ms < 2100 else ms - 1100),
        )
        for ms in range(2501)
    ]
    ranks = [answer([0.0, 0.6], [0.5, 2.5]) | {"samples": rows}] * 2
    one = run(ranks, events=[("plane 0 down", 1.0), ("plane 0 up", 2.0)])
    found = fault_timeline.measure(scenario, one)
    assert found["goodput_after"] == pytest.approx(0.5)
    assert found["plane_back_ms"] == pytest.approx(110, abs=1.0)
    assert found["longest_stall_ms"] == pytest.approx(1.0)
    assert found["longest_unsampled_ms"] == 0.0


def test_a_run_that_failed_has_no_timeline_measures() -> None:
    scenario = SCENARIOS["planes-dead"]
    events = [(f"plane {plane} down", 1.0) for plane in (1, 2, 3)]
    failed = answer([0.0], [], error={"kind": "TimeoutError", "message": "…", "lost_ranks": [], "at_s": 9.0})
    found = observe(scenario, run([failed, failed], events=events))
    assert found["failed_ranks"] == 2
    assert "longest_stall_ms" not in found


def test_a_timeline_can_lack_the_rank_that_was_killed() -> None:
    scenario = Scenario(
        name="s",
        title="",
        topology=Topology(hosts=3, planes=1),
        workload=Workload(rounds=1, timeline=True),
        faults=(KillRank(rank=2, at_s=1.0),),
    )
    rows = sampled([(step / 100, step * 10.0) for step in range(301)], plane=1.0)
    alive = [answer([0.0, 1.5], [1.0, 3.0]) | {"samples": rows}] * 2
    series = results.series(scenario, [run([*alive, {}], events=[("rank 2 killed", 1.25)])])
    assert series["between"] == [[1.0, 1.5]]
    assert series["events"] == [["rank 2 killed", 1.25]]
    assert series["goodput_bytes_per_s"][0] == pytest.approx(2 * 1_000)


def test_path_shares_sum_to_one() -> None:
    received = {"plane0": 30, "plane1": 10}
    assert measures.path_shares([run([answer([0.0], [1.0], received_bytes=received)] * 2 + [{}])]) == {
        "plane0": 0.75,
        "plane1": 0.25,
    }


def test_goals_of_speed_fail_a_case_only_when_strict() -> None:
    goals = (Goal(measure="wrong_results", at_most=0, must=True), Goal(measure="goodput_kept", at_least=0.9))
    slow = results.judge(goals, {"wrong_results": 0, "goodput_kept": 0.5})
    assert results.status_of(slow, strict=False) is results.Status.PASSED
    assert results.status_of(slow, strict=True) is results.Status.FAILED
    assert [one.word(strict=False) for one in slow] == ["met", "short"]
    wrong = results.judge(goals, {"wrong_results": 1, "goodput_kept": 1.0})
    assert results.status_of(wrong, strict=False) is results.Status.FAILED
    # A goal without a measure is not met.
    assert results.status_of(results.judge(goals, {"goodput_kept": 1.0}), strict=False) is results.Status.FAILED
    assert dataclasses.replace(goals[1], at_most=0.95).text() == "≥ 0.9 and ≤ 0.95"


@pytest.mark.parametrize(
    ("refused", "lost", "counted"),
    [
        (10, 5, 1.0),
        (8, 100, 1.0),
        (8, 1, 0.9),
        # One in a hundred is corrupt: five that found a full socket do not explain ten.
        (0, 5, 0.3),
        (11, 0, 1.1),
    ],
)
def test_corrupt_packets_are_accounted_for_by_name(refused: int, lost: int, counted: float) -> None:
    done = run(
        [],
        impairment_counters={"corrupted": 10},
        rank_counters=[{"bad_icrc": refused - 1}, {"unknown_qpn": 1}] if refused else [{"bad_icrc": 0}],
        kernel_losses={"kernel_full_socket": lost, "kernel_checksum": 0},
    )
    found = observe(SCENARIOS["disorder"], done)
    assert found["corrupt_counted"] == counted
    by_name = {name: value for name, value in found.items() if name.startswith(("refused.", "lost."))}
    losses = {"lost.kernel_full_socket": lost} if lost else {}
    names = {"refused.bad_icrc": refused - 1, "refused.unknown_qpn": 1} if refused else {}
    assert by_name == {name: count for name, count in names.items() if count} | losses
    done.kernel_losses["kernel_checksum"] = 10  # those are corrupt for certain
    assert observe(SCENARIOS["disorder"], done)["corrupt_counted"] == max(1, counted)


def test_the_kernel_shows_what_waits_in_sockets_and_what_it_dropped() -> None:
    pid = os.getpid()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, socket.socket(type=socket.SOCK_DGRAM) as sender:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's minimum
        receiver.bind(("127.0.0.1", 0))
        before = kernel_packets.losses(pid)
        # No other process of this machine takes what is in this socket.
        sender.sendto(bytes(100), receiver.getsockname())
        assert kernel_packets.waiting_bytes(pid) >= 100
        for _ in range(100):
            sender.sendto(bytes(1000), receiver.getsockname())
        lost = difference(kernel_packets.losses(pid), before)
        assert lost["kernel_full_socket"] > 50
        assert set(lost) == set(kernel_packets.LOSSES.values())
    assert kernel_packets.backlog_packets() >= 0
