# SPDX-License-Identifier: Apache-2.0
"""Puts what ranks have recorded on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sennit.runtime.timeline.clocks import shift
from sennit.runtime.timeline.exposure import exposed
from sennit.runtime.timeline.rank_log import Recording
from sennit.runtime.timeline.spans import RankClock, Span, TimelineError, Trace


def aligned(recordings: Sequence[Recording]) -> Trace:
    """All ranks on the clock of the first, from the first moment that all of them have.

    Raises `TimelineError` if there is no such moment.
    """
    shifted: list[Span] = []
    ranks = []
    since_ns = 0
    for one in sorted(recordings, key=lambda one: one.rank):
        shifted += [_moved(span, one) for span in one.spans]
        if one.lost:
            since_ns = max(since_ns, shift(one.since_ns, one.first, one.last))
        ranks.append(
            RankClock(
                rank=one.rank,
                host=one.host,
                offset_ns=(one.first.offset_ns + one.last.offset_ns) // 2,
                uncertainty_ns=max(one.first.uncertainty_ns, one.last.uncertainty_ns),
                lost=one.lost,
                has_died=one.has_died,
            )
        )
    kept = [span for span in shifted if span.start_ns >= since_ns]
    if not kept:
        raise TimelineError("the ranks have no time in common; record fewer steps, or with more room")
    zero = min(span.start_ns for span in kept)
    spans = [replace(span, start_ns=span.start_ns - zero, end_ns=span.end_ns - zero) for span in kept]
    spans.sort(key=lambda span: (span.rank, span.start_ns, -span.end_ns))
    return Trace(ranks=tuple(ranks), spans=tuple(spans + exposed(spans)))


def _moved(span: Span, of: Recording) -> Span:
    return replace(span, start_ns=shift(span.start_ns, of.first, of.last), end_ns=shift(span.end_ns, of.first, of.last))
