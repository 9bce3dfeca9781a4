# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios one after another: whether each can run here, its observations, its verdict, its files."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sennit.doctor import capabilities
from sennit.runtime.calibrate import machine
from sennit.testbed.scenarios import measures, results, stage
from sennit.testbed.scenarios.model import Scenario
from sennit.testbed.scenarios.results import Case, Results, Status
from sennit.testbed.topology import Impairer
from sennit.testbed.topology.switch import resolve

Say = Callable[[str], None]

LOG_TAIL_CHARACTERS: Final = 2_000


def begin(*, short: bool, strict: bool, seed: int, impairer: Impairer = Impairer.AUTO) -> Results:
    """Results without a case yet, with the machine as it is now."""
    form = "short" if short else "full"
    return Results(form=form, strict=strict, seed=seed, impairer=impairer, machine=machine.describe())


def run(
    outcome: Results, scenarios: Sequence[Scenario], *, folder: Path, say: Say, finished: Callable[[Case], None]
) -> None:
    """Adds each scenario's case as soon as it is done and calls `finished`.

    Each case has its own folder in `folder`.
    """
    short = outcome.form == "short"
    for scenario in scenarios:
        case = run_case(
            scenario.shortened() if short else scenario,
            short=short,
            strict=outcome.strict,
            seed=outcome.seed,
            folder=folder,
            say=say,
            impairer=Impairer(outcome.impairer),
        )
        outcome.cases.append(case)
        finished(case)


def run_case(
    scenario: Scenario,
    *,
    short: bool,
    strict: bool,
    seed: int,
    folder: Path,
    say: Say,
    impairer: Impairer = Impairer.AUTO,
) -> Case:
    chosen = resolve(impairer)
    asked = "" if impairer is Impairer.AUTO else f" --impairment {impairer}"
    case = Case(
        name=scenario.name,
        title=scenario.title,
        status=Status.UNSUPPORTED,
        command=f"sennit testbed run {scenario.name}{' --short' if short else ''} --seed {seed}{asked}",
        impairer=chosen,
        scenario=scenario.as_json(),
    )
    missing = capabilities.missing(*scenario.needs(chosen)) or scenario.why_not_by(chosen)
    if missing is not None:
        case.reason = missing
        return case
    # Absolute, because torch's store is named by a URL.
    place = folder.resolve() / scenario.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    began_s = time.monotonic()
    try:
        seen = stage.play(
            scenario, impairer=chosen, seed=seed, folder=place, say=lambda what: say(f"{scenario.name}: {what}")
        )
        _judge(case, scenario, seen, strict=strict)
    except Exception as error:  # One broken case must not cost the others: it counts as failed.
        case.status = Status.FAILED
        case.reason = f"{type(error).__name__}: {error}"
        (place / "conductor.log").write_text(traceback.format_exc(), encoding="utf-8")
        case.log_tails = {
            log.name: log.read_text(errors="replace", encoding="utf-8")[-LOG_TAIL_CHARACTERS:]
            for log in sorted(place.glob("*.log"))
        }
    case.seconds = time.monotonic() - began_s
    case.files = [str(path.relative_to(folder.resolve())) for path in _kept(place)]
    return case


def _judge(case: Case, scenario: Scenario, seen: stage.Observations, *, strict: bool) -> None:
    case.measures = measures.measure(seen)
    judged = results.judge(scenario.goals, case.measures)
    case.status = results.status_of(judged, strict=strict)
    case.goals = results.judged_as_json(judged, strict=strict)
    case.runs = results.runs_as_json(seen)
    case.trainings = results.trainings_as_json(seen)
    case.series = seen.rack.series if seen.rack else results.series(scenario, seen.runs)
    case.descriptions = seen.descriptions
    case.log_tails = seen.log_tails
    missed = [one for one in case.goals if one["word"] == "failed"]
    if missed:
        case.reason = "; ".join(f"{one['measure']} is {_number(one['value'])}, must be {one['text']}" for one in missed)
        errors = [message for run in case.runs for message in run["errors"].values()]
        errors += [one["error"] for one in case.trainings if one["error"]]
        if errors and not scenario.victims():
            case.reason += f"; {errors[0]}"


def _kept(place: Path) -> list[Path]:
    """Keeps non-empty logs, and captures. The stores of rendezvous are no longer needed."""
    for store in place.rglob("*-store*"):
        if store.is_dir():
            shutil.rmtree(store)
        else:
            store.unlink(missing_ok=True)
    found = [path for path in sorted(place.rglob("*")) if path.suffix in {".log", ".pcap"}]
    return [path for path in found if os.path.getsize(path)]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
