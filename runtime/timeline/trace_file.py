# SPDX-License-Identifier: Apache-2.0
"""Timelines as files: trace events in JSON, which ui.perfetto.dev opens, with gzip if the name ends in .gz.

The format is Chrome's ("Trace Event Format"): a process for each rank, a thread for each track, complete events ("X")
in microseconds. What it has no field for is in `args` and `otherData`.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from sennit.runtime.timeline.spans import (
    COLLECTIVE,
    EXPOSED,
    MAIN,
    PHASE,
    STEP,
    TASK,
    WAIT,
    RankClock,
    Span,
    TimelineError,
    Trace,
)
from sennit.runtime.timeline.threads import Key, key_of

FORMAT: Final = "sennit timeline 1"
# The facts of each kind, without which it cannot be analysed.
NEEDED: Final = {
    STEP: ("step",),
    PHASE: (),
    TASK: ("step", "queued_ns"),
    WAIT: ("group", "sequence"),
    COLLECTIVE: ("group", "sequence", "sent_bytes"),
    EXPOSED: (),
}
NUMBERS: Final = ("step", "queued_ns", "sequence", "sent_bytes")
# A gigabyte of JSON is more than any viewer opens.
FILE_MAX_BYTES: Final = 1 << 30
ALLOWED: Final = "allowed: a file of sennit train --timeline"


def open_new(path: Path) -> IO[bytes]:
    """A file beside `path`, which takes its name when it is complete. Raises OSError where none can be made."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    return open(path.with_name(f".{path.name}.part"), "wb")


def with_word(path: Path, word: str) -> Path:
    """run.WORD.json.gz for run.json.gz."""
    endings = "".join(path.suffixes[-2:])
    return path.with_name(f"{path.name.removesuffix(endings)}.{word}{endings}")


def numbered(path: Path, number: int) -> Path:
    """The files of a run's groups or starts, from 1: run.json.gz, run.2.json.gz, …"""
    return path if number == 1 else with_word(path, f"{number}")


def write(trace: Trace, file: IO[bytes], path: Path) -> None:
    """Writes to `file` of `open_new`, and gives it the name `path`. Raises OSError."""
    with file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0) as packed:
                for text in _texts(trace):
                    packed.write(text.encode())
        else:
            for text in _texts(trace):
                file.write(text.encode())
        file.flush()
    os.replace(file.name, path)


def _texts(trace: Trace) -> Iterator[str]:
    about = {"format": FORMAT, "ranks": [asdict(rank) for rank in trace.ranks]}
    yield '{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[\n'
    begin = ""
    for event in _events(trace):
        yield begin + json.dumps(event, separators=(",", ":"))
        begin = ",\n"
    yield "\n]}\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    laid_out = list(_laid_out(trace.spans))
    numbers = _track_numbers(laid_out)
    for clock in trace.ranks:
        name = f"rank {clock.rank} on {clock.host}" + (", died" if clock.has_died else "")
        yield _meta("process_name", clock.rank, 0, {"name": name})
        yield _meta("process_sort_index", clock.rank, 0, {"sort_index": clock.rank})
    for (rank, title), number in numbers.items():
        yield _meta("thread_name", rank, number, {"name": title})
        yield _meta("thread_sort_index", rank, number, {"sort_index": number})
    parts: dict[Key, list[tuple[Span, int]]] = defaultdict(list)
    for span, title in laid_out:
        row = numbers[span.rank, title]
        if span.kind == COLLECTIVE and (key := key_of(span)) is not None:
            parts[key].append((span, row))
        yield {
            "ph": "X",
            "pid": span.rank,
            "tid": row,
            "name": span.name,
            "cat": span.kind,
            "ts": span.start_ns / 1e3,
            "dur": span.length_ns / 1e3,
            "args": {**span.facts, "track": span.track},
        }

    arrows = itertools.count(1)
    for found in parts.values():
        yield from _arrows(found, arrows)


def _arrows(parts: list[tuple[Span, int]], arrows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """From the part of a collective that was posted last to those that waited for it, at that moment.

    `arrows`: a number for each; Perfetto draws none that is named by a text. It draws them from the end of what began
    first to the begin of what began later, so each has moments ("i") of its own at both ends.
    """
    last, last_row = max(parts, key=lambda part: part[0].start_ns)
    waiting = [(span, row) for span, row in parts if span is not last and last.start_ns < span.end_ns]
    moment = {"cat": "arrow", "ts": last.start_ns / 1e3}
    for span, row in waiting:
        arrow = {**moment, "id": next(arrows), "name": "came last"}
        begin, end = {"pid": last.rank, "tid": last_row}, {"pid": span.rank, "tid": row}
        yield {"ph": "i", "s": "t", **begin, **moment, "name": "came last"}
        yield {"ph": "s", **begin, **arrow}
        yield {"ph": "i", "s": "t", **end, **moment, "name": f"rank {last.rank} came last"}
        yield {"ph": "f", "bp": "e", **end, **arrow}


def _meta(name: str, rank: int, track: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": values}


def _laid_out(spans: Iterable[Span]) -> Iterator[tuple[Span, str]]:
    """Each span and the title of its row. Collectives that overlap go to several rows, each to the first free one."""
    rows: dict[tuple[int, str], _Rows] = defaultdict(_Rows)
    for span in sorted(spans, key=lambda one: (one.start_ns, -one.end_ns)):
        title = span.track
        if span.kind == EXPOSED:
            title = "exposed communication"
        elif span.kind == COLLECTIVE:
            row = rows[span.rank, span.track].place(span.start_ns, span.end_ns)
            title = f"collectives of {span.track}" + (f", {row + 1}" if row else "")
        yield span, title


class _Rows:
    """Rows for spans that come in the order of their begins."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        """Heap: the end of the last span of a row, and the row."""
        self._free: list[int] = []
        """Heap."""

    def place(self, start_ns: int, end_ns: int) -> int:
        """The first row that is free at this moment. It is taken until the end."""
        while self._taken and self._taken[0][0] <= start_ns:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        row = heapq.heappop(self._free) if self._free else len(self._taken)
        heapq.heappush(self._taken, (end_ns, row))
        return row


def _track_numbers(laid_out: Iterable[tuple[Span, str]]) -> dict[tuple[int, str], int]:
    """For each row of each rank its number. The main thread comes first, what it waited for next.

    No two rows share a number, and none is 0: Perfetto shows rows of two ranks as one if their numbers are the same.
    """
    first = (MAIN, "exposed communication", f"collectives of {MAIN}")
    titles: dict[int, set[str]] = defaultdict(set)
    for span, title in laid_out:
        titles[span.rank].add(title)
    rows = [
        (rank, title)
        for rank, found in sorted(titles.items())
        for title in sorted(found, key=lambda one: (first.index(one) if one in first else len(first), one))
    ]
    return {row: number for number, row in enumerate(rows, 1)}


def read(path: Path) -> Trace:
    """Reads what `write` wrote. Raises `TimelineError` for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(2)
            file.seek(0)
            with gzip.open(file) if data == b"\x1f\x8b" else file as plain:
                text = plain.read(FILE_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TimelineError(f"{path}: {getattr(error, 'strerror', None) or error}; {ALLOWED}") from error
    if len(text) > FILE_MAX_BYTES:
        raise TimelineError(f"{path} has more than {FILE_MAX_BYTES >> 20} MiB of events; {ALLOWED}, of fewer steps")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TimelineError(f"{path} is no timeline: {error}; {ALLOWED}") from error
    if not isinstance(content, dict) or not isinstance(content.get("otherData"), dict):
        raise TimelineError(f"{path} is no timeline; {ALLOWED}")
    if content["otherData"].get("format") != FORMAT:
        raise TimelineError(f"{path} has the format {content['otherData'].get('format')!r}; allowed: {FORMAT!r}")
    try:
        ranks = tuple(_clock(one) for one in content["otherData"]["ranks"])
        spans = tuple(_span(event) for event in content["traceEvents"] if event["ph"] == "X")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TimelineError(f"{path} is a damaged timeline: {type(error).__name__} {error}; {ALLOWED}") from error
    known = {clock.rank for clock in ranks}
    if not spans or any(span.rank not in known for span in spans):
        raise TimelineError(f"{path} is a damaged timeline: no events, or of ranks that there are not; {ALLOWED}")
    return Trace(ranks=ranks, spans=spans)


def _clock(values: dict[str, Any]) -> RankClock:
    clock = RankClock(**values)
    numbers = [value for name, value in values.items() if name not in ("host", "has_died")]
    if type(clock.host) is not str or type(clock.has_died) is not bool or not all(type(one) is int for one in numbers):
        raise TypeError("a number that is none, or a text that is none")
    return clock


def _span(event: dict[str, Any]) -> Span:
    facts = dict(event["args"])
    kind = event["cat"]
    needed = ("thread",) if kind == WAIT and "thread" in facts else NEEDED[kind]
    if lacking := [name for name in needed if name not in facts]:
        raise ValueError(f"a {kind} lacks {', '.join(lacking)}")
    numbers = [event["pid"], *(facts[name] for name in NUMBERS if name in facts)]
    texts = [event["name"], facts["track"], *(facts[name] for name in ("thread", "group") if name in facts)]
    if not all(type(one) is int for one in numbers) or not all(isinstance(one, str) for one in texts):
        raise TypeError("a number that is none, or a text that is none")
    start_ns = round(event["ts"] * 1e3)
    return Span(
        rank=event["pid"],
        track=facts.pop("track"),
        kind=kind,
        name=event["name"],
        start_ns=start_ns,
        end_ns=start_ns + round(event["dur"] * 1e3),
        facts=facts,
    )
