# SPDX-License-Identifier: Apache-2.0
"""Computes measures from observations, by the names that goals use. `MEANINGS` explains each.

A measure that a scenario cannot give is absent.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from sennit.testbed.bench.results import quantile
from sennit.testbed.scenarios import fault_timeline
from sennit.testbed.scenarios.counters import total
from sennit.testbed.scenarios.kernel_packets import WRONG_CHECKSUM
from sennit.testbed.scenarios.model import Library, Operation, Scenario
from sennit.testbed.scenarios.stage import Observations, Recovery, Run
from sennit.testbed.scenarios.training_runs import Ended
from sennit.transport.oracle import roce

Measures = dict[str, float]

# The report and docs/how-to/scenarios.md link here. A name that ends in a dot covers all names that start with it.
MEANINGS: Final = {
    "results": "results compared byte for byte",
    "wrong_results": "results that differ in any bit from NumPy's result for the same inputs",
    "failed_ranks": "ranks whose operation raised an error",
    "distinct_digests": "different bits of one AllReduce over ranks, rounds and variants, or of the weights of all "
    "training runs; 1 is right",
    "trainings": "training runs that came to their end",
    "failed_trainings": "training runs that failed, or lost other ranks than they should",
    "rack.": "of the run with deaths: kills; summed_before and summed_after, blocks that the first aggregator and the "
    "last one summed; errors_naming_rank, the share of survivors whose message names the dead rank",
    "goodput.": "bytes/s of one rank's input over the time of a repetition, median over rounds, by library and by "
    "whether the impairment was on (disturbed) or off (calm); a repetition lasts from the moment when all ranks are "
    "in it to the moment when all are done",
    "goodput_kept": "sennit's goodput with the impairment / without it, median over rounds",
    "gloo_goodput_kept": "the same for gloo",
    "ratio_to_gloo": "goodput of sennit / of gloo with the impairment, median over rounds",
    "ratio_to_gloo_calm": "the same without the impairment",
    "p50_ms": "time of a repetition, median",
    "p99_ms": "time of a repetition, 99th percentile",
    "p99_over_p50": "p99_ms / p50_ms",
    "impairment.": "what the impairment did to sennit's packets, in packets (in bytes: bytes)",
    "retransmitted_packets": "packets that sennit sent again",
    "duplicate_packets": "packets that sennit received twice",
    "corrupt_counted": "corrupt packets that sennit counted or a kernel dropped / corrupt packets that were made",
    "refused_packets": "packets that sennit counted as malformed, unknown or corrupt",
    "refused.": "the same, by counter (docs/reference/wire.md)",
    "lost.": "UDP packets that the kernel of a host dropped, by reason: a wrong checksum, a full socket, no memory, no "
    "socket",
    "hostile_sent": "hostile packets that the stranger sent",
    "hostile_packets_per_s": "hostile packets per second; the scenario sets the upper limit",
    "queue_drops": "packets dropped in the queue of the limited port, in all repetitions after a warm-up",
    "queue_packets": "packets that passed this queue",
    "longest_stall_ms": "longest time without payload on any rank while all were in one collective, after the first "
    "fault",
    "longest_stall_ms_before": "the same before the first fault",
    "longest_unsampled_ms": "longest time in which no sampler ran, because the machine stood still; no stall",
    "goodput_after": "payload per second inside collectives while the plane is off, stall included / before",
    "plane_back_ms": "time from the plane's return until it carries a quarter of its rate before the fault",
    "survivors": "ranks that the fault does not hit",
    "survivors_with_error": "survivors whose operation raised an error",
    "error_within_s": "time from the rank's death to the last survivor's error",
    "errors_naming_rank": "share of survivors whose error names the dead rank, and that list only this rank as lost",
    "recovered_ranks": "survivors in the new group whose result was right",
    "disk.": "of disks of another host: remote_to_local, samples a second on them / on disks of this machine; "
    "errors_naming_it, whether the rank whose disk was pulled named its files; bytes_read and evictions of rows",
    "front_end.": "what passed the front-end interfaces of all hosts, in and out: bytes with headers; rank_packets, "
    "UDP between ports of ranks; link_packets, ARP and ICMPv6; other_packets, all else",
    "back_end.": "the same of the back-end interfaces",
    "payload_bytes": "bytes that the ranks' collectives sent",
    "record_bytes": "bytes of samples that the ranks took from the feeder",
    "checkpoint_bytes": "bytes of the checkpoints that the last host got over the front-end network",
    "recovered_within_s": "time from the first survivor's call of reconfigure until all have a new group, plus the "
    "time of the AllReduce that followed",
}

# Counters of packets that sennit refused: malformed ones, and acknowledgements of packets that were never sent.
REFUSALS: Final = (*roce.REFUSALS, "bad_control")


def family(name: str) -> str:
    """The key of `MEANINGS` for a measure."""
    for key in (name, name.partition(".")[0] + "."):
        if key in MEANINGS:
            return key
    raise KeyError(f"measure {name!r}; there are: {', '.join(MEANINGS)}")


def repetition_times_s(run: Run) -> list[float]:
    """Seconds from the last rank's entry to the last rank's exit, for each completed repetition."""
    alive = [answer for answer in run.answers if answer]
    begins = zip(*(answer["begins_s"] for answer in alive), strict=False)
    ends = zip(*(answer["ends_s"] for answer in alive), strict=False)
    return [max(end) - max(begin) for begin, end in zip(begins, ends, strict=False)]


def goodput_bytes_per_s(scenario: Scenario, run: Run) -> float | None:
    times_s = repetition_times_s(run)
    return scenario.workload.size_bytes / statistics.median(times_s) if times_s else None


def measure(seen: Observations) -> Measures:
    """Returns all measures that these observations give."""
    if seen.trainings:
        return _trainings(seen.trainings)
    if seen.rack is not None:
        return dict(seen.rack.measures)
    if seen.scenario.job is not None:
        return dict(seen.networks)
    measures = _correctness(seen) | _speed(seen) | _impairment(seen)
    if seen.scenario.victims():
        measures |= _deaths(seen)
        if seen.recovery is not None:
            measures |= _recovery(seen.recovery)
    elif seen.scenario.faults:
        measures |= fault_timeline.measure(seen.scenario, seen.runs[-1])
    return measures


def _correctness(seen: Observations) -> Measures:
    answers = [answer for run in seen.runs for answer in run.answers if answer]
    wrong = [count for answer in answers for count in answer["wrong_elements"]]
    measures: Measures = {
        "results": len(wrong),
        "wrong_results": sum(count > 0 for count in wrong),
        "failed_ranks": sum("error" in answer for answer in answers),
    }
    digests = {
        answer["digest"]
        for run in seen.runs
        if run.library is Library.SENNIT
        for answer in run.answers
        if "digest" in answer
    }
    if digests and seen.scenario.workload.operation is Operation.ALLREDUCE:
        measures["distinct_digests"] = len(digests)
    return measures


def _trainings(ended: Sequence[Ended]) -> Measures:
    digests = [one.digest for one in ended if one.digest]
    return {
        "trainings": len(digests),
        "failed_trainings": sum(bool(one.error) for one in ended),
        "distinct_digests": len(set(digests)),
        "impairment.dropped": sum(one.dropped for one in ended),
    }


def _speed(seen: Observations) -> Measures:
    measures: Measures = {}
    by_condition: dict[tuple[Library, bool], list[float]] = {}
    for run in seen.runs:
        goodput = goodput_bytes_per_s(seen.scenario, run)
        if goodput is not None:
            by_condition.setdefault((run.library, run.disturbed), []).append(goodput)
    for (library, disturbed), goodputs in by_condition.items():
        measures[f"goodput.{library}.{'disturbed' if disturbed else 'calm'}"] = statistics.median(goodputs)
    ours, ours_calm = by_condition.get((Library.SENNIT, True)), by_condition.get((Library.SENNIT, False))
    theirs, theirs_calm = by_condition.get((Library.GLOO, True)), by_condition.get((Library.GLOO, False))
    for name, top, bottom in (
        ("goodput_kept", ours, ours_calm),
        ("gloo_goodput_kept", theirs, theirs_calm),
        ("ratio_to_gloo", ours, theirs),
        ("ratio_to_gloo_calm", ours_calm, theirs_calm),
    ):
        # Ratios are taken within a round, because a machine that slows down for a minute slows both.
        if top and bottom and len(top) == len(bottom):
            measures[name] = statistics.median(a / b for a, b in zip(top, bottom, strict=True))
    times_s = [
        time_s for run in seen.runs if run.library is Library.SENNIT and run.disturbed
        for time_s in repetition_times_s(run)
    ]  # fmt: skip
    if times_s:
        measures["p50_ms"] = 1e3 * quantile(times_s, 0.5)
        measures["p99_ms"] = 1e3 * quantile(times_s, 0.99)
        measures["p99_over_p50"] = measures["p99_ms"] / measures["p50_ms"]
    return measures


def _impairment(seen: Observations) -> Measures:
    ours = [run for run in seen.runs if run.disturbed and run.library is Library.SENNIT]
    done = total(run.impairment_counters for run in ours)
    measures: Measures = {f"impairment.{name}": value for name, value in done.items()}
    counted = total(counters for run in ours for counters in run.rank_counters)
    measures["retransmitted_packets"] = counted.get("retransmitted_packets", 0)
    measures["duplicate_packets"] = counted.get("duplicate_packets", 0)
    measures["refused_packets"] = sum(counted.get(name, 0) for name in REFUSALS)
    lost = total(run.kernel_losses for run in ours)
    if corrupted := done.get("corrupted"):
        # Nobody knows which of the packets that a kernel dropped were corrupt: as many as are missing, if it can be so.
        # It drops those with a wrong checksum for it, and those that find a full socket without looking at them.
        refused = measures["refused_packets"]
        unseen = sum(count for name, count in lost.items() if name != WRONG_CHECKSUM)
        may_be = lost.get(WRONG_CHECKSUM, 0) + _corrupt_among(unseen, seen.scenario.impairment.corrupt_fraction)
        by_kernel = min(may_be, max(corrupted - refused, 0))
        measures["corrupt_counted"] = (refused + by_kernel) / corrupted
        measures |= {f"refused.{name}": counted[name] for name in REFUSALS if counted.get(name)}
        measures |= {f"lost.{name}": count for name, count in lost.items() if count}
    queued = total(run.queue_counters for run in ours)
    if queued:
        measures["queue_drops"] = queued["dropped"]
        measures["queue_packets"] = queued["packets"]
    if seen.hostile_sent:
        measures["hostile_sent"] = sum(seen.hostile_sent.values())
        measures["hostile_packets_per_s"] = measures["hostile_sent"] / seen.hostile_s
        measures |= {f"refused.{name}": counted[name] for name in REFUSALS if counted.get(name)}
    return measures


def _corrupt_among(dropped: int, fraction: float) -> int:
    """How many of the dropped packets may be corrupt, if nobody chose them: more are there once in a million times."""
    if fraction == 0:
        return 0
    found, below = -1, 0.0
    while below < 1 - 1e-6 and found < dropped:
        found += 1
        ways = math.lgamma(dropped + 1) - math.lgamma(found + 1) - math.lgamma(dropped - found + 1)
        below += math.exp(ways + found * math.log(fraction) + (dropped - found) * math.log1p(-fraction))
    return found


def _deaths(seen: Observations) -> Measures:
    run = seen.runs[-1]
    victims = seen.scenario.victims()
    survivors = [answer for rank, answer in enumerate(run.answers) if rank not in victims]
    errors = [answer["error"] for answer in survivors if "error" in answer]
    measures: Measures = {"survivors": len(survivors), "survivors_with_error": len(errors)}
    if errors:
        died_s = min(at_s for _, at_s in run.events)
        measures["error_within_s"] = max(error["at_s"] for error in errors) - died_s
    naming = sum(_names(error["message"], victims) and set(error["lost_ranks"]) == victims for error in errors)
    measures["errors_naming_rank"] = naming / len(survivors)
    return measures


def _recovery(recovery: Recovery) -> Measures:
    begun_s = min(answer["began_s"] for answer in recovery.reconfigured)
    ready_s = max(answer["ended_s"] for answer in recovery.reconfigured)
    right = [answer for answer in recovery.answers if answer["wrong_elements"] == [0]]
    measures: Measures = {"recovered_ranks": len(right)}
    if len(right) == len(recovery.answers):
        collective_s = max(answer["ends_s"][0] for answer in right) - max(answer["begins_s"][0] for answer in right)
        measures["recovered_within_s"] = ready_s - begun_s + collective_s
    return measures


def _names(message: str, ranks: Iterable[int]) -> bool:
    return all(re.search(rf"\branks? (\d+, )*{rank}\b", message) for rank in ranks)


def path_shares(runs: Sequence[Run]) -> dict[str, float]:
    """The share of all received bytes that came over each interface (plane)."""
    received = total(answer.get("received_bytes", {}) for run in runs for answer in run.answers)
    whole = sum(received.values())
    return {name: value / whole for name, value in received.items()} if whole else {}
