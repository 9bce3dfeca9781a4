# SPDX-License-Identifier: Apache-2.0
"""Whether the machine is quiet: what others use of its processors before, while and after a benchmark runs.

A figure of a busy machine says how busy it was. So a benchmark writes none there, unless it is told to. Then the file
says so, and no page is made of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sennit.command_line import fail

WINDOW_S: Final = 1.0
# Processors that others may use. An idle machine needs some hundredths of one for its timers and daemons.
OTHERS_MAX: Final = 0.2
PARTIAL: Final = "partial"
"""The field of the JSON of a benchmark that writes while it runs: true until it has ended."""
OTHERS: Final = "others"
"""The field of a benchmark's JSON with the processors that others used before it, while it ran, and after it."""
BUSY: Final = "busy"
"""The field beside it: whether that was too much."""


@dataclass(frozen=True)
class Watch:
    """One run of a benchmark."""

    begun: float
    """Processors that others used before it began."""

    is_forced: bool
    since: Use

    def noted(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """`figures` with the load beside them. Ends the command if others are busy, and the run is over."""
        used = [self.begun, Use.now().others_since(self.since), others()]
        is_partial = figures.get(PARTIAL)
        is_busy = max(used) > OTHERS_MAX
        if is_busy and not self.is_forced and not is_partial:
            fail(_refusal(max(used), "Nothing was written" if is_partial is None else "The file stays partial"))
        return {**figures, OTHERS: [round(each, 2) for each in used], BUSY: is_busy}


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(*, is_forced: bool) -> Iterator[None]:
    """Around a benchmark that writes figures. Ends the command if others are busy before it has begun."""
    begun = others()
    if begun > OTHERS_MAX and not is_forced:
        fail(_refusal(begun, "Nothing was measured"))
    token = _watch.set(Watch(begun, is_forced, Use.now()))
    try:
        yield
    finally:
        _watch.reset(token)


def noted(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `Watch.noted`. Outside `watched`, `figures` as they are."""
    watch = _watch.get()
    return figures if watch is None else watch.noted(figures)


def go_on(found: Mapping[str, Any], name: str) -> None:
    """This run goes on with the figures that the file `name` has: the load before those is part of its own.

    Raises ValueError for figures of a busy machine, unless this run is forced.
    """
    watch = _watch.get()
    if watch is not None:
        if not watch.is_forced:
            refuse_busy(found, name)
        _watch.set(replace(watch, begun=max(watch.begun, *found.get(OTHERS, []))))


def refuse_busy(found: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for figures of a busy machine, which no page may show."""
    if max(found.get(OTHERS, []), default=0.0) > OTHERS_MAX:
        raise ValueError(
            f"{name}: measured while others used {max(found[OTHERS]):.1f} processors; allowed in a page: up to "
            f"{OTHERS_MAX:g}. Measure again, without --force"
        )


def require(found: Mapping[str, Any], name: str) -> None:
    """`refuse_busy` for figures of time. They must say how busy others were."""
    if not found.get(OTHERS):
        raise ValueError(f"{name}: does not say how busy others were (`{OTHERS}`). Measure again")
    refuse_busy(found, name)


def others() -> float:
    """Processors that other processes and virtual machines use, over a second in which this one sleeps."""
    begun = Use.now()
    time.sleep(WINDOW_S)
    return Use.now().others_since(begun)


@dataclass(frozen=True)
class Use:
    """What the processors of the machine have done until a moment."""

    at_s: float
    busy_s: float
    """Of all processes and virtual machines."""

    own_s: float
    """Of this process and its descendants, those that have ended included."""

    @classmethod
    def now(cls) -> Use:
        return cls(time.monotonic(), _busy_s(), _own_s())

    def others_since(self, before: Use) -> float:
        """Processors that others used from then on."""
        spent_s = self.busy_s - before.busy_s - (self.own_s - before.own_s)
        return max(0.0, spent_s / (self.at_s - before.at_s))


def _busy_s() -> float:
    # proc_stat(5): user nice system idle iowait irq softirq steal, of all processors; guests are in user and nice.
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    # proc_pid_stat(5): behind the name state, parent and, from the twelfth field on, utime, stime, cutime and cstime.
    used: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        used[pid] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(pid)
    own, left = 0, [os.getpid()]
    while left:
        pid = left.pop()
        own += used.get(pid, 0)
        left += children.get(pid, [])
    return own / os.sysconf("SC_CLK_TCK")


def _refusal(used: float, what: str) -> str:
    return (
        f"other processes use {used:.1f} of {os.cpu_count()} processors; allowed for figures: up to {OTHERS_MAX:g}. "
        f"{what}. Wait until the machine is quiet (`top` names who is busy), or give --force: then the file says that "
        "the machine was busy, and no page takes it"
    )
