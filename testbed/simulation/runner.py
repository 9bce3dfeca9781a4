# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios, several at a time in separate processes, and keeps the part of each result that the report needs."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sennit.command_line import json_text
from sennit.testbed.simulation.outcome import Outcome, TierUse
from sennit.testbed.simulation.plans import program
from sennit.testbed.simulation.scenario import Scenario
from sennit.testbed.simulation.suite import QUICK, Case
from sennit.transport.plans.plan_codec import encode

if TYPE_CHECKING:
    from sennit.testbed._lab import FabricSimulation

QUANTILE_STEPS = 200
RUN_BYTES = 4 << 30
"""Room for a run of 1,024 hosts."""


COUNTERS = (
    "events",
    "connections",
    "messages",
    "message_bytes",
    "sent_packets",
    "delivered_packets",
    "queue_dropped_packets",
    "black_holed_packets",
    "marked_packets",
    "in_flight_packets",
    "control_packets",
    "retransmitted_packets",
    "duplicate_packets",
    "local_ack_timeout_err",
    "tail_probe_packets",
)


# A small scenario with dying links and full queues. It does not change when the suite does.
FINGERPRINTED = QUICK.with_(
    window_bytes=64 << 10,
    failed_fraction=0.05,
    fail_at_us=50,
    convergence_us=500,
    queue_limit_bytes=128 << 10,
)


def fingerprint() -> str:
    """Identifies how flows and fabrics of a core behave: the trace of one small run, which takes a second.

    It is an alltoall. What other plans are is in their own digest (plans.Program.digest).
    """
    simulation = simulation_of(FINGERPRINTED)
    simulation.run()
    return f"{simulation.result()['trace_hash']:016x}"


def simulation_of(scenario: Scenario) -> FabricSimulation:
    """Returns the simulation with the plans of all ranks. Raises ValueError for a scenario out of range."""
    from sennit.testbed._lab import FabricSimulation

    simulation = FabricSimulation(scenario.as_dict())
    of_all = program(scenario)
    for plan in of_all.plans(scenario.hosts):
        simulation.add_rank(encode(plan), of_all.counts)
    return simulation


def run(scenario: Scenario) -> Outcome:
    """Runs one scenario in this process. Raises ValueError for one out of range."""
    start_s = time.monotonic()
    simulation = simulation_of(scenario)
    simulation.run()
    result, of_all = simulation.result(), program(scenario)
    messages = np.frombuffer(result["message_us"], dtype=np.float32)
    quantiles = np.quantile(messages, np.linspace(0, 1, QUANTILE_STEPS + 1)) if len(messages) else np.zeros(0)
    return Outcome(
        scenario=scenario.as_dict(),
        algorithm=of_all.algorithm,
        is_complete=result["is_complete"],
        failure=result["failure"],
        completion_us=result["completion_us"],
        ideal_us=result["ideal_us"],
        trace_hash=f"{result['trace_hash']:016x}",
        counters={name: result[name] for name in COUNTERS},
        message_us=[round(float(value), 2) for value in quantiles],
        arrived_bytes=result["arrived_bytes"],
        tiers=_tiers(result["links"]),
        fingerprint=fingerprint(),
        plans=of_all.digest(scenario.hosts),
        wall_s=round(time.monotonic() - start_s, 1),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _tiers(links: list[tuple[str, bool, float, int, int]]) -> dict[str, TierUse]:
    tiers: dict[str, TierUse] = {}
    for name in dict.fromkeys(link[0] for link in links):
        living = [link for link in links if link[0] == name and not link[1]]
        if not living:
            continue
        shares = sorted(link[2] for link in living)
        tiers[name] = TierUse(
            links=len(living),
            least=shares[0],
            mean=sum(shares) / len(shares),
            most=shares[-1],
            shares=[round(share, 4) for share in shares],
            peak_queue_bytes=max(link[3] for link in living),
            dropped_packets=sum(link[4] for link in living),
        )
    return tiers


def jobs_of_this_machine() -> int:
    """How many full runs this machine can do at a time."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // RUN_BYTES))


def run_cases(
    cases: Iterable[Case], folder: Path, *, jobs: int, done: Callable[[Case, Outcome], None]
) -> dict[str, Outcome]:
    """Runs all cases and writes each outcome to `folder`/NAME.json as soon as it exists.

    Reuses an existing outcome of the very same scenario and plans from a core that behaves the same: the result would
    be equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    core = fingerprint()
    outcomes: dict[str, Outcome] = {}
    waiting = []
    for case in cases:
        kept = load(folder / f"{case.name}.json")
        if kept is not None and _comes_from(kept, case.scenario, core):
            outcomes[case.name] = kept
            done(case, kept)
        else:
            waiting.append(case)
    # Fresh processes, so that a simulation's memory is freed when its process ends.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, case.scenario): case for case in waiting}
        try:
            for future in concurrent.futures.as_completed(futures):
                case, outcome = futures[future], future.result()
                (folder / f"{case.name}.json").write_text(json_text(outcome.as_json()), encoding="utf-8")
                outcomes[case.name] = outcome
                done(case, outcome)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


def _comes_from(kept: Outcome, scenario: Scenario, core: str) -> bool:
    known = kept.scenario == scenario.as_dict() and kept.fingerprint == core
    return known and kept.plans == program(scenario).digest(scenario.hosts)


def load(path: Path) -> Outcome | None:
    """Reads an outcome; None if there is none, or one of another version."""
    try:
        return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
