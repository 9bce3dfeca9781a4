# SPDX-License-Identifier: Apache-2.0
"""The scenario of training runs that must end with one digest, without running them: data, table, verdict."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios import measures, results
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.model import Scenario, Topology
from sennit.testbed.scenarios.stage import Observations
from sennit.testbed.scenarios.training_runs import Ended
from sennit.testbed.scenarios.trainings import SHARDINGS, Training, Trainings, covering


def test_same_bits_training_runs_the_whole_product() -> None:
    job = SCENARIOS["same-bits-training"].job
    assert isinstance(job, Trainings)
    # The names are written twice, because those of the library need torch.
    assert pytest.importorskip("sennit.runtime.sharded.placement").SHARDINGS == SHARDINGS
    networks = [("shm", 0.0), ("udp", 0.0), ("udp", 0.01)]
    wanted = itertools.product((1, 2, 3, 4, 8), SHARDINGS, networks, (False, True))
    assert Counter(job.runs) == Counter(
        Training(ranks=ranks, sharding=sharding, transport=transport, loss_fraction=loss, changes=changes)
        for ranks, sharding, (transport, loss), changes in wanted
    )


def test_same_bits_dynamic_has_every_three_choices_in_a_run() -> None:
    job = SCENARIOS["same-bits-dynamic"].job
    assert isinstance(job, Trainings)
    assert job.tables == "dynamic"
    names = ("ranks", "sharding", "transport", "home", "changes", "resumes")
    choices = [
        (1, 2, 3, 4, 8),
        tuple(set(SHARDINGS) - {"data_parallel"}),
        ("shm", "udp"),
        ("memory", "files"),
        (False, True),
        (False, True),
    ]
    for places in itertools.combinations(range(len(names)), 3):
        met = {tuple(getattr(run, names[place]) for place in places) for run in job.runs}
        assert met == set(itertools.product(*(choices[place] for place in places))), places
    assert len(job.runs) < 100
    assert all(run.loss_fraction == (0.01 if run.transport == "udp" else 0) for run in job.runs)
    assert all(run.resumed_ranks != run.ranks for run in job.runs)


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_covering_has_every_way_in_which_so_many_choices_meet(strength: int) -> None:
    choices = [(1, 2, 3), "ab", (False, True), "wxyz"]
    rows = covering(choices, strength)
    for places in itertools.combinations(range(len(choices)), strength):
        met = {tuple(row[place] for place in places) for row in rows}
        assert met == set(itertools.product(*(choices[place] for place in places)))
    assert len(rows) <= {1: 4, 2: 14, 3: 32}[strength] < 48


def test_trainings_are_one_if_all_have_one_digest() -> None:
    kinds = [Training(ranks=1, sharding="grid", transport="shm"), Training(ranks=4, sharding="grid", changes=True)]
    scenario = Scenario(name="s", title="", topology=Topology(hosts=5), job=Trainings(runs=tuple(kinds)))

    def found(*ended: Ended) -> tuple[dict[str, float], list[str]]:
        seen = Observations(scenario=scenario, seed=1, trainings=list(ended))
        measured = measures.measure(seen)
        assert all(measures.MEANINGS[measures.family(name)] for name in measured)
        return measured, results.digest_table(results.trainings_as_json(seen))

    same, table = found(*(Ended(training=kind, digest="ab" * 32, dropped=3) for kind in kinds))
    assert same == {"trainings": 2, "failed_trainings": 0, "distinct_digests": 1, "impairment.dropped": 6}
    assert table[-1] == f"weights {'ab' * 32}"
    assert [line.split()[-1] for line in table[:-1]] == ["4", "abababab", "abababab"]
    other, table = found(Ended(training=kinds[0], digest="ab" * 32), Ended(training=kinds[1], digest="cd" * 32))
    assert other["distinct_digests"] == 2
    assert len([line for line in table if line.startswith("weights")]) == 2
    failed, table = found(Ended(training=kinds[0], digest="ab" * 32), Ended(training=kinds[1], error="gone"))
    assert (failed["trainings"], failed["failed_trainings"]) == (1, 1)
    assert "failed" in table[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Training(ranks=9, sharding="grid"), r"ranks 9; allowed: 1\.\.8"),
        (lambda: Training(ranks=2, sharding="grid", transport="shm", loss_fraction=0.1), "allowed: over udp"),
        (lambda: Training(ranks=2, sharding="grid", transport="verbs"), "allowed: shm, udp"),
        (lambda: Training(ranks=2, sharding="grid", home="hbm"), "home 'hbm'; allowed: memory, files"),
        (lambda: Trainings(runs=()), "no runs; allowed: one or more"),
        (lambda: Trainings(runs=(Training(ranks=2, sharding="grid"),), tables="none"), "tables 'none'; allowed: fixed"),
        (
            lambda: Scenario(
                name="s", title="", job=Trainings(runs=(Training(ranks=2, sharding="grid", transport="shm"),))
            ),
            "s: hosts 2; allowed: 3 or more",
        ),
    ],
)
def test_impossible_runs_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
