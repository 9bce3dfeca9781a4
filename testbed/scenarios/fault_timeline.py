# SPDX-License-Identifier: Apache-2.0
"""What a run's samples say about a fault in the middle: stalls, goodput before and after, a plane's return.

All ranks' samples use one clock. Between collectives ranks check results, which is no stall. Only times when all
ranks are inside the same collective count.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence

from sennit.testbed.scenarios.model import Scenario, SwitchPlane
from sennit.testbed.scenarios.sampler import PERIOD_S
from sennit.testbed.scenarios.stage import Run

# A sample row is (time, payload bytes received, bytes of plane 0, plane 1, …).
FIRST_PLANE = 2
# A plane's rate is averaged over this time when its return is looked for.
RETURN_WINDOW_S = 0.01
# No sample for this many periods means that the machine stood still.
UNSAMPLED_PERIODS = 3
# The plane is in use again when it carries this share of its rate before the fault.
RETURN_FRACTION = 0.25

Interval = tuple[float, float]


def common_intervals(run: Run) -> list[Interval]:
    """When all surviving ranks were inside the same repetition."""
    alive = [answer for answer in run.answers if answer]
    begins = zip(*(answer["begins_s"] for answer in alive), strict=False)
    ends = zip(*(answer["ends_s"] for answer in alive), strict=False)
    common = [(max(begin), min(end)) for begin, end in zip(begins, ends, strict=False)]
    return [(begin, end) for begin, end in common if end > begin]


def pauses(run: Run) -> list[Interval]:
    """Between collectives: from the first rank's exit to the last rank's entry into the next one."""
    common = common_intervals(run)
    return [(end, begin) for (_, end), (begin, _) in itertools.pairwise(common)]


def progress_times_s(run: Run) -> list[float]:
    """When some rank had received more payload than at its previous sample."""
    moments = []
    for answer in run.answers:
        rows = answer["samples"]
        moments += [row[0] for previous, row in itertools.pairwise(rows) if row[1] > previous[1]]
    return sorted(moments)


def unsampled(run: Run, period_s: float = PERIOD_S) -> list[Interval]:
    """When no rank's sampler ran for several periods. Samplers have the highest priority on their host, so the machine
    stood still, and nobody knows what happened meanwhile.
    """
    moments = sorted(row[0] for answer in run.answers for row in answer["samples"])
    return [(a, b) for a, b in itertools.pairwise(moments) if b - a > UNSAMPLED_PERIODS * period_s]


def longest_stall_s(run: Run, since_s: float, until_s: float, period_s: float = PERIOD_S) -> float | None:
    """The longest time without progress inside a collective, minus unsampled time; accurate to a sampling period."""
    moments = progress_times_s(run)
    blind = unsampled(run, period_s)
    longest: float | None = None
    for begin, end in common_intervals(run):
        low, high = max(begin, since_s), min(end, until_s)
        if high <= low:
            continue
        inside = [low, *(moment for moment in moments if low < moment < high), high]
        gap = max(b - a - sum(_overlap_s((a, b), one) for one in blind) for a, b in itertools.pairwise(inside))
        longest = gap if longest is None else max(longest, gap)
    return longest


def _overlap_s(one: Interval, other: Interval) -> float:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0.0)


def rates(run: Run, column: int, period_s: float) -> tuple[list[float], list[float]]:
    """Times since the first sample, and bytes/s summed over ranks, of a column of the samples."""
    series = [answer["samples"] for answer in run.answers if answer and len(answer["samples"]) > 1]
    if not series:
        return [], []
    begin, end = max(rows[0][0] for rows in series), min(rows[-1][0] for rows in series)
    times, values = [], []
    steps = max(int((end - begin) / period_s), 1)
    totals = [
        sum(_at(rows, column, begin + step * period_s) for rows in series)
        for step in range(steps + 1)
    ]  # fmt: skip
    for step in range(steps):
        times.append((step + 0.5) * period_s)
        values.append((totals[step + 1] - totals[step]) / period_s)
    return times, values


def first_sample_s(run: Run) -> float:
    """The zero of `rates`."""
    firsts: list[float] = [answer["samples"][0][0] for answer in run.answers if answer and answer["samples"]]
    return max(firsts)


def _at(rows: Sequence[Sequence[float]], column: int, at_s: float) -> float:
    """The column at a time, interpolated between two samples."""
    high = min(max(bisect.bisect_right(rows, at_s, key=_time_s), 1), len(rows) - 1)
    before, after = rows[high - 1], rows[high]
    span_s = after[0] - before[0]
    part = min(max((at_s - before[0]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
    return before[column] + (after[column] - before[column]) * part


def _time_s(row: Sequence[float]) -> float:
    return row[0]


def goodput_within(run: Run, since_s: float, until_s: float) -> float | None:
    """Payload per second, summed over ranks, over the time when all were inside one collective."""
    received, seconds = 0.0, 0.0
    for begin, end in common_intervals(run):
        low, high = max(begin, since_s), min(end, until_s)
        if high > low:
            seconds += high - low
            for answer in run.answers:
                rows = answer["samples"]
                received += _at(rows, 1, high) - _at(rows, 1, low) if len(rows) > 1 else 0.0
    return received / seconds if seconds else None


def measure(scenario: Scenario, run: Run) -> dict[str, float]:
    """Returns the measures of planes switched off (and on again) during the run; none for a run that failed."""
    found: dict[str, float] = {}
    off = [
        at_s for (_, at_s), fault in _matched(scenario, run)
        if isinstance(fault, SwitchPlane) and not fault.up
    ]  # fmt: skip
    healed = [(at_s, fault.plane) for (_, at_s), fault in _matched(scenario, run) if fault.up]
    if not off or any("error" in answer for answer in run.answers):
        return found
    began_s, ended_s = min(a["begins_s"][0] for a in run.answers), max(a["ends_s"][-1] for a in run.answers)
    fault_s = min(off)
    heal_s = min((at_s for at_s, _ in healed), default=ended_s)
    before, after = goodput_within(run, began_s, fault_s), goodput_within(run, max(off), heal_s)
    if before and after is not None:
        found["goodput_after"] = after / before
    stalls = {
        "longest_stall_ms": longest_stall_s(run, fault_s, ended_s),
        "longest_stall_ms_before": longest_stall_s(run, began_s, fault_s),
    }
    found |= {name: 1e3 * stall for name, stall in stalls.items() if stall is not None}
    found["longest_unsampled_ms"] = max((1e3 * (b - a) for a, b in unsampled(run)), default=0.0)
    if healed:
        back = _return_s(run, healed[0][1], fault_s, healed[0][0])
        if back is not None:
            found["plane_back_ms"] = 1e3 * back
    return found


def _matched(scenario: Scenario, run: Run) -> list[tuple[tuple[str, float], SwitchPlane]]:
    ordered = sorted(
        (fault for fault in scenario.faults if isinstance(fault, SwitchPlane)), key=lambda fault: fault.at_s
    )
    return list(zip(run.events, ordered, strict=True))


def _return_s(run: Run, plane: int, fault_s: float, heal_s: float) -> float | None:
    times, values = rates(run, FIRST_PLANE + plane, RETURN_WINDOW_S)
    if not times:
        return None
    zero_s = first_sample_s(run)
    before = [value for time, value in zip(times, values, strict=True) if zero_s + time < fault_s]
    if not before:
        return None
    enough = RETURN_FRACTION * statistics.mean(before)
    for time, value in zip(times, values, strict=True):
        if zero_s + time - RETURN_WINDOW_S / 2 >= heal_s and value >= enough:
            return zero_s + time + RETURN_WINDOW_S / 2 - heal_s
    return None
