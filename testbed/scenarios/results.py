# SPDX-License-Identifier: Apache-2.0
"""All cases of one run as plain data, with the verdict on each goal: the source of the page and of other programs.

`results.json` has the fields of `Results.as_json`. A change of their meaning increases SCHEMA.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from sennit.command_line import json_text
from sennit.testbed.scenarios import fault_timeline, measures
from sennit.testbed.scenarios.model import Goal, Library, Scenario, goal_as_json
from sennit.testbed.scenarios.stage import Observations, Run


class Status(StrEnum):
    """The outcome of a case."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A goal with the measured value."""

    goal: Goal
    value: float | None
    """The measured value; None: the run gave no such measure."""

    @property
    def met(self) -> bool:
        return self.goal.met_by(self.value)

    def word(self, *, strict: bool) -> str:
        if self.met:
            return "met"
        return "failed" if self.goal.must or strict else "short"


def judge(goals: Sequence[Goal], measures: Mapping[str, float]) -> list[Judged]:
    return [Judged(goal=goal, value=measures.get(goal.measure)) for goal in goals]


def status_of(judged: Sequence[Judged], *, strict: bool) -> Status:
    """Failed if a goal of correctness or bounded time is missed, or with `strict` any goal."""
    missed = any(not one.met and (one.goal.must or strict) for one in judged)
    return Status.FAILED if missed else Status.PASSED


SCHEMA: Final = 1
SERIES_PERIOD_S: Final = 0.01


@dataclass(kw_only=True)
class Case:
    """One scenario's outcome."""

    name: str
    title: str
    status: str
    reason: str = ""
    """Why it failed, or the missing capability."""
    seconds: float = 0.0
    command: str = ""
    """The command that repeats it."""
    impairer: str = ""
    """Who impaired the packets: bpf or netem."""
    scenario: dict[str, Any] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    """Goals with `value`, `met` and `word`: met, short (a speed goal was missed) or failed."""
    measures: dict[str, float] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Repetition times, plane shares and counters, one per library, condition and round."""
    series: dict[str, Any] = field(default_factory=dict)
    """For runs with faults: goodput and bytes of each plane over time, and the faults."""
    descriptions: list[str] = field(default_factory=list)
    log_tails: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """Logs and captures, relative to the results."""
    trainings: list[dict[str, Any]] = field(default_factory=list)
    """Training runs with their digests."""


@dataclass(kw_only=True)
class Results:
    """One `sennit testbed run`."""

    form: str
    """full or short."""
    strict: bool
    seed: int
    machine: dict[str, object]
    impairer: str = "auto"
    """The requested impairer; every case says which one it used."""
    cases: list[Case] = field(default_factory=list)

    def count(self, status: Status) -> int:
        return sum(case.status == status for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        path.write_text(json_text(self.as_json()), encoding="utf-8")


def read(path: Path) -> Results:
    """Reads what `write` wrote. Raises ValueError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        return Results(**{**data, "cases": [Case(**case) for case in data["cases"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no results of schema {SCHEMA}: {error}") from error


def judged_as_json(judged: Sequence[Judged], *, strict: bool) -> list[dict[str, Any]]:
    return [
        {
            **goal_as_json(one.goal),
            "text": one.goal.text(),
            "value": one.value,
            "met": one.met,
            "word": one.word(strict=strict),
        }
        for one in judged
    ]


def runs_as_json(seen: Observations) -> list[dict[str, Any]]:
    return [
        {
            "library": run.library,
            "disturbed": run.disturbed,
            "round": run.round,
            "variant": dataclasses.asdict(run.variant),
            "repetition_times_s": measures.repetition_times_s(run),
            "path_shares": measures.path_shares([run]),
            "impairment_counters": run.impairment_counters,
            "queue_counters": run.queue_counters,
            "rank_counters": run.rank_counters,
            "kernel_losses": run.kernel_losses,
            "errors": {
                str(rank): answer["error"]["message"] for rank, answer in enumerate(run.answers) if "error" in answer
            },
        }
        for run in seen.runs
    ]


def trainings_as_json(seen: Observations) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(one) | {"name": str(one.training), "events": one.training.events} for one in seen.trainings
    ]


def digest_table(trainings: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each kind of run, with the digests of all numbers of ranks, and then all digests that there are."""
    counts = sorted({one["training"]["ranks"] for one in trainings})
    cells: dict[tuple[Any, ...], dict[int, str]] = {}
    for one in trainings:
        run = one["training"]
        network = run["transport"] if run["transport"] == "shm" else f"udp, {100 * run['loss_fraction']:g} % lost"
        key = (network, one["events"], run["sharding"])
        cells.setdefault(key, {})[run["ranks"]] = one["digest"][:8] or "failed"
    width = 2 + max((len(events) for _, events, _ in cells), default=0)
    head = f"{'ranks':>{33 + width}}" + "".join(f"{count:>10}" for count in counts)
    rows = [
        f"{network:15}{events:{width}}{sharding:18}" + "".join(f"{of_count.get(count, ''):>10}" for count in counts)
        for (network, events, sharding), of_count in cells.items()
    ]
    return [head, *rows, *(f"weights {digest}" for digest in sorted({one["digest"] for one in trainings} - {""}))]


def series(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    """Samples of the last run of sennit that has any; empty otherwise."""
    sampled = [run for run in runs if run.library is Library.SENNIT and any(a.get("samples") for a in run.answers)]
    if not sampled:
        return {}
    run = sampled[-1]
    times_s, goodput = fault_timeline.rates(run, 1, SERIES_PERIOD_S)
    zero_s = fault_timeline.first_sample_s(run)
    return {
        "period_s": SERIES_PERIOD_S,
        "times_s": times_s,
        "goodput_bytes_per_s": goodput,
        "plane_bytes_per_s": [
            fault_timeline.rates(run, fault_timeline.FIRST_PLANE + plane, SERIES_PERIOD_S)[1]
            for plane in range(scenario.topology.planes)
        ],
        "events": [[name, at_s - zero_s] for name, at_s in run.events],
        "between": [[end - zero_s, begin - zero_s] for end, begin in fault_timeline.pauses(run)],
    }
