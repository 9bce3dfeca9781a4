# SPDX-License-Identifier: Apache-2.0
"""What a timeline is made of: named stretches of time on the tracks of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sennit.transport.errors import SennitError

STEP: Final = "step"
PHASE: Final = "phase"
TASK: Final = "task"
WAIT: Final = "wait"
COLLECTIVE: Final = "collective"
EXPOSED: Final = "exposed"

MAIN: Final = "main"
"""The track of the thread that takes the steps."""


class TimelineError(SennitError):
    """A file that is not a timeline, or one that cannot be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time. Those of one track lie in each other or apart, but for collectives."""

    rank: int
    track: str
    """The thread; of a collective, the thread that posted it."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, int | str] = field(default_factory=dict)
    """By kind. A step has `step`. A task has `step`, and `queued_ns` from its submission to its start. A wait has the
    `thread` whose task it waits for, or the `group` and `sequence` of a collective. A collective has these, its bytes
    and `status`, as in core.h.
    """

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class RankClock:
    """A rank's clock beside that of rank 0, and what became of its spans."""

    rank: int
    host: str
    offset_ns: int
    """Nanoseconds added to the rank's times, in the middle of the recording."""

    uncertainty_ns: int
    """Half of the shortest round trip; 0 on a host with rank 0."""

    lost: int = 0
    """Spans for which there was no room. Those that are kept are the last ones."""

    has_died: bool = False
    """Whether its process ended within the recording. The name of its last span then ends in "not ended"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """All ranks on one clock. Times are nanoseconds from the begin."""

    ranks: tuple[RankClock, ...]
    spans: tuple[Span, ...]
