# SPDX-License-Identifier: Apache-2.0
"""How the stage plays a scenario, with planes and ranks that only record what they are asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.doctor import capabilities
from sennit.testbed.scenarios import stage
from sennit.testbed.scenarios.model import (
    NO_IMPAIRMENT,
    KillRank,
    Library,
    Scenario,
    Topology,
    Variant,
    Workload,
)
from sennit.testbed.scenarios.ranks import Event
from sennit.testbed.topology import Impairer, Impairment, ImpairmentCounters, QueueCounters

LOOKS = 4
Played = list[tuple[str, int | None, int]]


class FakePlanes:
    """Planes where every run of a collective drops a packet of each host on each plane, impaired or not."""

    made: FakePlanes

    def __init__(self, **options: Any) -> None:
        FakePlanes.made = self
        self.options = options
        self.impairer = options["impairer"]
        self.impairment = NO_IMPAIRMENT
        self.runs = 0
        self.limits: list[dict[str, Any]] = []
        self.played: Played = []
        """For each run: library, seed of the impairment (None: no impairment), repetitions."""

    def __enter__(self) -> FakePlanes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def impair(self, impairment: Impairment) -> None:
        self.impairment = impairment

    def limit_rate(self, bits_per_s: int, **options: Any) -> None:
        self.limits.append({"bits_per_s": bits_per_s, **options})

    def counters(self, host: int, plane: int) -> ImpairmentCounters:
        names = ImpairmentCounters.__dataclass_fields__
        return ImpairmentCounters(**{name: self.runs if name == "dropped" else 0 for name in names})

    def queue_counters(self, *_: object) -> QueueCounters:
        return QueueCounters(packets=10 * self.runs, bytes=0, dropped=2 * self.runs, backlog_bytes=0)


class FakeRanks:
    """Ranks that answer at once. A killed rank never answers."""

    def __init__(self, planes: FakePlanes, *, library: Library, world: int, **_: Any) -> None:
        self.library, self.happened = library, list[tuple[str, float]]()
        self._planes, self._world = planes, world
        self.asked: list[tuple[str, Collection[int]]] = []
        self.unread = self.late = 0

    def ask(
        self, command: dict[str, Any], *, timeout_s: float, events: Sequence[Event] = (), silent: Collection[int] = ()
    ) -> list[dict[str, Any]]:
        assert timeout_s > 0
        self.asked.append((command["do"], silent))
        planes = self._planes
        if command["do"] == "run":
            planes.runs += 1
            # A packet waits in a socket until the rank looks, some looks of ours later.
            self.unread, self.late = LOOKS, self.late + 1
            is_calm = planes.impairment == NO_IMPAIRMENT
            planes.played.append((self.library, None if is_calm else planes.impairment.seed, command["repetitions"]))
        self.happened += [(event.name, 5.0) for event in events]
        read = self.late - bool(self.unread)
        answer = {"counters": {"bad_icrc": 3 * planes.runs, "late": read}, "describe": "a rank"}
        return [{} if rank in silent else dict(answer) for rank in range(self._world)]

    def unread_bytes(self, silent: Collection[int] = ()) -> int:
        self.unread = max(0, self.unread - 1)
        return self.unread

    def lost_by_kernel(self, silent: Collection[int] = ()) -> dict[str, int]:
        return {"kernel_full_socket": 2 * self._planes.runs}

    def kill(self, rank: int) -> None:
        raise AssertionError("the fake fires no events")

    def stop(self) -> None:
        self.asked.append(("stop", ()))

    def log_tails(self) -> dict[str, str]:
        return {}

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "Planes", FakePlanes)
    monkeypatch.setattr(stage, "Ranks", FakeRanks)
    monkeypatch.setattr(capabilities, "missing", lambda *names: "no captures here")


def play(scenario: Scenario, folder: Path) -> stage.Observations:
    return stage.play(scenario, impairer=Impairer.BPF, seed=1, folder=folder, say=lambda what: None)


def test_both_libraries_suffer_the_same_seed_and_every_round_another(tmp_path: Path) -> None:
    scenario = Scenario(
        name="s",
        title="",
        impairment=Impairment(loss_fraction=0.5),
        beside_calm=True,
        libraries=(Library.SENNIT, Library.GLOO),
        workload=Workload(rounds=2, repetitions=3),
        variants=(Variant(impairment_seed=7),),
    )
    seen = play(scenario, tmp_path)
    planes = FakePlanes.made
    both = (Library.SENNIT, Library.GLOO)
    warm_up: Played = [(library, None, 1) for _ in range(2) for library in both]
    rounds: Played = [(library, seed, 3) for seed in (None, 7, None, 8) for library in both]
    assert planes.played == warm_up + rounds
    assert planes.impairment == NO_IMPAIRMENT
    assert [(run.library, run.disturbed, run.round) for run in seen.runs] == [
        (library, disturbed, round_) for round_ in range(2) for disturbed in (False, True) for library in both
    ]


def test_counters_are_those_of_the_run_alone(tmp_path: Path) -> None:
    topology = Topology(hosts=3, planes=2, rate_bits_per_s=10**9, queue_bytes=1 << 20, strangers=1)
    seen = play(Scenario(name="s", title="", topology=topology, workload=Workload(rounds=3)), tmp_path)
    assert FakePlanes.made.options["hosts"] == 4
    assert [limit["hosts"] for limit in FakePlanes.made.limits] == [[0]]
    assert len(seen.runs) == 3
    for run in seen.runs:
        assert run.impairment_counters["dropped"] == 3 * 2
        assert (run.queue_counters["packets"], run.queue_counters["dropped"]) == (10 * 2, 2 * 2)
        assert run.rank_counters == [{"bad_icrc": 3, "late": 1}] * 3


def test_nobody_waits_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    scenario = Scenario(
        name="s",
        title="",
        topology=Topology(hosts=3),
        workload=Workload(rounds=1),
        faults=(KillRank(rank=2, at_s=0.5),),
        recovers=True,
    )
    seen = play(scenario, tmp_path)
    assert seen.runs[0].events == [("rank 2 killed", 5.0)]
    assert seen.runs[0].answers[2] == {}
    assert seen.recovery is not None
    assert len(seen.recovery.reconfigured) == len(seen.recovery.answers) == 2
    assert seen.descriptions == ["a rank"] * 2


def test_a_run_ends_when_its_last_packets_have_been_read(tmp_path: Path) -> None:
    """Ranks without an operation look at their sockets every 50 ms: equal counters are not the last ones."""
    scenario = Scenario(name="s", title="", workload=Workload(rounds=2))
    runs = play(scenario, tmp_path).runs
    assert [run.rank_counters[0]["late"] for run in runs] == [1, 1]
    assert [run.kernel_losses for run in runs] == [{"kernel_full_socket": 2}] * 2
