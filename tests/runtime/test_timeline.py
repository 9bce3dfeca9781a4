# SPDX-License-Identifier: Apache-2.0
"""Timelines: files, clocks, the critical path and exposure of made ones, and those of real ranks."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.timeline import Timeline
from sennit.runtime.timeline.clocks import Offset, estimate, offset_to_first, shift
from sennit.runtime.timeline.critical_path import TRANSFER, WORK
from sennit.runtime.timeline.exposure import exposed
from sennit.runtime.timeline.spans import RankClock, Span, TimelineError, Trace
from sennit.runtime.timeline.summary import summarise
from sennit.runtime.timeline.threads import Thread, Wait
from sennit.runtime.timeline.trace_file import open_new, read, write
from sennit.transport.errors import ConfigError
from tests.runtime import perfetto
from tests.runtime.pipeline_model import Model, batches, pipeline
from tests.runtime.world import WorldFactory


def timed(rank: int, world: int, path: str) -> list[Any]:
    """The digest without and with a timeline."""
    plain, watched = Model("row_wise"), Model("row_wise")
    with pipeline(plain, batches(plain)) as steps:
        list(steps)
    with Timeline(path) as timeline, pipeline(watched, batches(watched), timeline=timeline) as steps:
        list(steps)
    return [plain.digest(), watched.digest(), timeline.is_written]


def few_kept(rank: int, world: int, path: str) -> bool:
    """With room for so few slices that only the last steps are there."""
    model = Model("row_wise")
    with Timeline(path, room=40) as timeline, pipeline(model, batches(model, 12), timeline=timeline) as steps:
        list(steps)
    return timeline.is_written


SKEW_NS = 3_000_000_000


def skewed(rank: int, world: int) -> list[int]:
    """The offset that a rank finds whose clock is ahead by SKEW_NS a rank, and its uncertainty."""
    found = offset_to_first(clock=lambda: time.monotonic_ns() + rank * SKEW_NS, name=f"clock {rank}")
    same = offset_to_first(clock=lambda: time.monotonic_ns() + rank * SKEW_NS)
    return [found.offset_ns, found.uncertainty_ns, same.offset_ns, same.uncertainty_ns]


def mishaps(rank: int, world: int, folder: str) -> list[Any]:
    """What is said of a path that is a folder, of a full disk, and of a block that fails; then what is left there."""
    found: list[Any] = []
    try:
        with Timeline(folder):
            found.append("entered")
    except ConfigError as error:
        found.append(str(error))
    full = Path(folder) / "full.json"
    if rank == 0:
        Path(folder, ".full.json.part").symlink_to("/dev/full")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Timeline(full) as timeline, timeline.step(0):
            pass
    found += [[str(warning.message) for warning in caught], timeline.is_written]
    try:
        with Timeline(Path(folder) / "empty.json"):
            raise ValueError("a step failed")
    except ValueError as error:
        found.append(str(error))
    dist.barrier()
    return [*found, sorted(entry.name for entry in Path(folder).iterdir())]


def made(rank: int, track: str, kind: str, name: str, start: int, end: int, **facts: int | str) -> Span:
    return Span(rank=rank, track=track, kind=kind, name=name, start_ns=start, end_ns=end, facts=facts)


def collective(rank: int, track: str, name: str, sequence: int, posted: int, wait: int, end: int) -> list[Span]:
    key: dict[str, int | str] = {"group": track, "sequence": sequence}
    return [
        made(rank, track, "collective", name, posted, end, **key, sent_bytes=1000, received_bytes=500, status=0),
        made(rank, track, "wait", f"wait for {name}", wait, end, **key),
    ]


def worked_example() -> Trace:
    """Two ranks, one step. Rank 1 comes 200 later to an allreduce, because its ids came late.

    rank 0: 0 forward 300, waits for the allreduce until 700, update until 800.
    rank 1: submits the task ids at 5, waits for it until 200 (which itself waits from 50 to 150 for an alltoall),
    forward until 500, posts the allreduce, which ends at 700, update until 750.
    """
    spans = [
        made(0, "main", "step", "step 0", 0, 800, step=0),
        made(0, "main", "phase", "forward", 0, 300),
        *collective(0, "main", "allreduce", 1, 300, 300, 700),
        made(0, "main", "phase", "update", 700, 800),
        made(1, "main", "step", "step 0", 0, 750, step=0),
        made(1, "main", "wait", "wait for ids", 6, 200, thread="ids"),
        made(1, "ids", "task", "ids", 20, 200, step=0, queued_ns=15),
        *collective(1, "ids", "alltoall", 1, 40, 50, 150),
        *collective(0, "ids", "alltoall", 1, 10, 10, 150),
        made(0, "ids", "task", "ids", 10, 160, step=0, queued_ns=0),
        made(1, "main", "phase", "forward", 200, 500),
        *collective(1, "main", "allreduce", 1, 500, 500, 700),
        made(1, "main", "phase", "update", 700, 750),
    ]
    clocks = [RankClock(rank=rank, host="here", offset_ns=0, uncertainty_ns=0) for rank in range(2)]
    return Trace(ranks=tuple(clocks), spans=tuple(spans + exposed(spans)))


def test_the_critical_path_of_a_worked_example() -> None:
    path = summarise(worked_example()).paths[0]
    assert [(link.start_ns, link.end_ns, link.rank, link.thread, link.kind, link.what) for link in path] == [
        # Rank 1 posted its part of the alltoall last, at 40, and began to wait at 50.
        (0, 5, 1, "main", WORK, "rest of the step"),
        (5, 20, 1, "ids", WORK, "nothing recorded"),
        (20, 50, 1, "ids", WORK, "task ids"),
        (50, 150, 1, "ids", TRANSFER, "alltoall"),
        (150, 200, 1, "ids", WORK, "task ids"),
        (200, 500, 1, "main", WORK, "forward"),
        (500, 700, 0, "main", TRANSFER, "allreduce"),
        (700, 800, 0, "main", WORK, "update"),
    ]


def test_what_was_exposed_and_what_was_hidden() -> None:
    summary = summarise(worked_example())
    found = {key: (share.busy_ns, share.exposed_ns, share.hidden_ns) for key, share in summary.shares.items()}
    assert found == {
        ("main", "collective allreduce"): (400 + 200, 400 + 200, 0),
        # Rank 0 waited for none of its ids; rank 1 from 50 to 150.
        ("ids", "collective alltoall"): (140 + 110, 100, 150),
        ("ids", "task ids"): (10 + 30 + 50, 30 + 50, 10),
    }
    stretches = [(one.rank, one.name, one.start_ns, one.end_ns) for one in exposed(worked_example().spans)]
    assert sorted(stretches) == [(0, "allreduce", 300, 700), (1, "allreduce", 500, 700), (1, "alltoall", 50, 150)]


def test_the_root_of_a_broadcast_waits_for_nobody() -> None:
    spans = [
        made(0, "main", "step", "step 0", 0, 100, step=0),
        *collective(0, "main", "broadcast", 1, 10, 12, 20),
        made(1, "main", "step", "step 0", 0, 90, step=0),
        *collective(1, "main", "broadcast", 1, 50, 51, 60),
    ]
    clocks = [RankClock(rank=rank, host="here", offset_ns=0, uncertainty_ns=0) for rank in range(2)]
    path = summarise(Trace(ranks=tuple(clocks), spans=tuple(spans))).paths[0]
    assert [(link.start_ns, link.end_ns, link.rank, link.kind) for link in path] == [
        (0, 12, 0, WORK),
        (12, 20, 0, TRANSFER),
        (20, 100, 0, WORK),
    ]


def test_a_path_ends_though_waits_go_in_a_circle() -> None:
    spans = [
        made(0, "main", "step", "step 0", 0, 100, step=0),
        made(0, "main", "wait", "wait for a", 10, 90, thread="a"),
        made(0, "a", "wait", "wait for main", 10, 90, thread="main"),
        *[one for rank in (0, 1) for one in collective(rank, "main", "allreduce", 1, 95 + 2 * rank, 91, 99)],
        made(1, "main", "step", "step 0", 0, 98, step=0),
    ]
    clocks = [RankClock(rank=rank, host="here", offset_ns=0, uncertainty_ns=9) for rank in range(2)]
    path = summarise(Trace(ranks=tuple(clocks), spans=tuple(spans))).paths[0]
    assert sum(link.length_ns for link in path) == 100
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(path))


class Counted(list[Any]):
    """A list that counts the elements read of it."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


def test_pieces_are_found_in_time_that_grows_with_them_alone() -> None:
    waits = Counted(Wait(10 * n, 10 * n + 5, thread="x") for n in range(1000))
    thread = Thread("main", waits=waits)
    thread.index()
    pieces = [piece for step in range(1000) for piece in thread.between(10 * step, 10 * step + 10)]
    assert len(pieces) == 2000
    assert waits.reads <= 3 * len(waits)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_has_what_was_written(tmp_path: Path, name: str) -> None:
    trace = worked_example()
    path = tmp_path / name
    write(trace, open_new(path), path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    back = read(path)
    assert back.ranks == trace.ranks
    assert sorted(map(repr, back.spans)) == sorted(map(repr, trace.spans))
    text = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"main", "ids", "exposed communication", "collectives of main", "collectives of ids"}
    arrows = [(event["ph"], event["pid"], event["ts"]) for event in events if event.get("cat") == "arrow"]
    # Rank 1 posted last in both.
    assert sorted(one for one in arrows if one[0] != "i") == [
        ("f", 0, 0.04),
        ("f", 0, 0.5),
        ("s", 1, 0.04),
        ("s", 1, 0.5),
    ]
    assert sorted(one for one in arrows if one[0] == "i") == [
        ("i", 0, 0.04),
        ("i", 0, 0.5),
        ("i", 1, 0.04),
        ("i", 1, 0.5),
    ]
    numbers = [event["id"] for event in events if event["ph"] == "s"]
    tracks = [event["tid"] for event in events if event["name"] == "thread_name"]
    for found in (numbers, tracks):
        assert sorted(found) == list(range(1, len(found) + 1))
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():  # Perfetto drops spans of a row that overlap and do not lie in each other.
        for start, end in row:
            assert not any(start < other < end < until for other, until in row)


def test_collectives_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    step = made(0, "main", "step", "step 0", 0, 100, step=0)
    posted = [collective(0, "main", "allreduce", number, number, 50, 90 + number)[0] for number in (1, 2, 3)]
    later = collective(0, "main", "allreduce", 4, 92, 93, 99)[0]
    clock = RankClock(rank=0, host="here", offset_ns=0, uncertainty_ns=0)
    write(Trace(ranks=(clock,), spans=(step, *posted, later)), open_new(path), path)
    rows = [event["tid"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "collective"]
    assert len(set(rows[:3])) == 3
    assert rows[3] == rows[0]


class CountedTime(int):
    """A time that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountedTime.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        CountedTime.compared += 1
        return int(self) <= int(other)

    def __eq__(self, other: object) -> bool:
        CountedTime.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_rows_are_found_in_time_that_hardly_grows_with_what_goes_on(tmp_path: Path) -> None:
    """As of a rank that has posted all messages of a step before it waits for the first one."""
    path, count = tmp_path / "many.json", 1000
    step = made(0, "main", "step", "step 0", 0, 3 * count, step=0)
    posted = [collective(0, "main", "send", 0, n, n, CountedTime(count + n))[0] for n in range(count)]
    clock = RankClock(rank=0, host="here", offset_ns=0, uncertainty_ns=0)
    CountedTime.compared = 0
    write(Trace(ranks=(clock,), spans=(step, *posted)), open_new(path), path)
    assert 0 < CountedTime.compared < 40 * count
    rows = [event["tid"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "collective"]
    assert len(set(rows)) == count


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    write(worked_example(), open_new(path), path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(TimelineError):
            read(path)
    good = json.loads(gzip.decompress(whole))
    changes: list[dict[str, Any]] = [
        {"traceEvents": []},
        {"traceEvents": [{"ph": "X"}]},
        {"traceEvents": 3},
        {"otherData": None},
        {"otherData": {"format": "sennit timeline 9"}},
        {"otherData": {"format": "sennit timeline 1", "ranks": [{"rank": 0}]}},
        {"otherData": {"format": "sennit timeline 1", "ranks": []}},
    ]
    for change in changes:
        path.write_text(json.dumps(good | change))
        with pytest.raises(TimelineError):
            read(path)
    for number, event in enumerate(good["traceEvents"]):
        if event.get("cat") in ("step", "task", "wait", "collective"):
            lacking = [*good["traceEvents"][:number], event | {"args": {"track": "main"}}]
            path.write_text(json.dumps(good | {"traceEvents": lacking}))
            with pytest.raises(TimelineError, match="damaged"):
                read(path)


def test_damage_is_told_and_nothing_else_is_raised(tmp_path: Path, seed: int) -> None:
    """Values of a file are replaced by others at random, and bytes of a packed one."""
    path = tmp_path / "run.json"
    write(worked_example(), open_new(path), path)
    good = path.read_text()
    chance = random.Random(seed)
    strange: list[Any] = [None, -1, 1e400, "x", [], {}, 3, True, 2**70]
    for _ in range(150):
        content = json.loads(good)
        place = content["otherData"]["ranks"] if chance.random() < 0.2 else content["traceEvents"]
        chosen = chance.choice(place)
        while isinstance(chosen[key := chance.choice(sorted(chosen))], dict) and chosen[key] and chance.random() < 0.8:
            chosen = chosen[key]
        chosen[key] = chance.choice(strange)
        path.write_text(json.dumps(content))
        with contextlib.suppress(TimelineError):
            summarise(read(path))
    packed = gzip.compress(good.encode(), mtime=0)
    for _ in range(200):
        damaged = bytearray(packed)
        damaged[chance.randrange(2, len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(TimelineError):
            summarise(read(path))
    path.write_text("[" * 100_000)
    with pytest.raises(TimelineError, match="is no timeline"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is no timeline"),
        (b"\x1f\x8b\x08broken", "run.json"),
        (b'{"traceEvents": []}', "is no timeline; allowed: a file of sennit train --timeline"),
        (b"\xff\xfe\x00", "is no timeline"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["timeline", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_command_prints_path_and_overlaps(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(worked_example(), open_new(path), path)
    told = CliRunner().invoke(app, ["timeline", str(path)])
    assert told.exit_code == 0, told.output
    assert "2 ranks, steps 0 to 0: 0.0008 ms a step" in told.stdout
    figures = json.loads(CliRunner().invoke(app, ["timeline", str(path), "--json"]).stdout)
    assert figures["critical_path"][0] == {
        "kind": "work", "what": "forward", "ms_a_step": 0.0003, "share": 300 / 800, "share_by_rank": {"1": 1.0},
    }  # fmt: skip
    assert sum(one["share"] for one in figures["critical_path"]) == pytest.approx(1)
    step = CliRunner().invoke(app, ["timeline", str(path), "--step", "0"])
    assert step.exit_code == 0
    assert "transfer" in step.stdout
    picture = tmp_path / "step.svg"
    assert CliRunner().invoke(app, ["timeline", str(path), "--plot", str(picture)]).stdout == (
        f"step 0 is drawn in {picture}\n"
    )
    drawn = ElementTree.parse(picture).getroot()
    titles = Counter(str(one.text).partition(":")[0] for one in drawn.iter("{http://www.w3.org/2000/svg}title"))
    # Of the step's own threads: work once a rank, what was waited for, and no idle time.
    assert titles == {"forward": 2, "update": 2, "allreduce": 2, "alltoall": 2, "ids": 3, "wait for ids": 1,
                      "rest of the step": 1}  # fmt: skip
    missing = CliRunner().invoke(app, ["timeline", str(path), "--step", "1"])
    assert missing.stderr == "error: step 1; allowed: 0 to 0\n"


def test_offsets_are_as_good_as_the_shortest_round_trip(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        true = chance.randrange(-(10**12), 10**12)
        trips = []
        for _ in range(16):
            asked = chance.randrange(10**12)
            there, back = chance.randrange(100, 10**7), chance.randrange(100, 10**5)
            trips.append((asked, asked + there + true, asked + there + back))
        found = estimate(trips)
        assert abs(found.offset_ns - true) <= found.uncertainty_ns
        assert found.uncertainty_ns == (min(answered - asked for asked, _, answered in trips) + 1) // 2


def test_clocks_that_run_apart_are_followed() -> None:
    first = Offset(at_ns=1000, offset_ns=50, uncertainty_ns=1)
    last = Offset(at_ns=11_000, offset_ns=150, uncertainty_ns=1)
    assert [shift(time, first, last) for time in (1000, 6000, 11_000)] == [1050, 6100, 11_150]
    assert shift(5, first, first) == 55


def test_a_pipeline_of_two_ranks_has_a_timeline_and_its_bits(kept_world: WorldFactory, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json.gz"
    found = kept_world(2).run(timed, path=str(path))
    assert [written for *_, written in found] == [True, False]
    assert len({digest for *digests, _ in found for digest in digests}) == 1
    trace = read(path)
    summary = summarise(trace)
    assert summary.steps == (0, 1, 2, 3, 4)[: len(summary.steps)]
    assert len(summary.steps) >= 4
    for rank in (0, 1):
        own = [one for one in trace.spans if one.rank == rank]
        assert {one.track for one in own} >= {"main", "input", "ids", "exchange"}
        names = {(one.track, one.name) for one in own if one.kind == "collective"}
        assert names >= {("ids", "alltoall"), ("exchange", "alltoall"), ("main", "allreduce")}, names
        assert any(one.facts.get("sent_bytes") for one in own if one.name == "alltoall")
        assert any("sequence" in one.facts and one.end_ns > one.start_ns for one in own if one.kind == "wait")
    parts = {
        (one.facts["group"], one.facts["sequence"], one.rank): one.name
        for one in trace.spans
        if one.kind == "collective"
    }
    assert all(parts[group, sequence, 1 - rank] == name for (group, sequence, rank), name in parts.items())
    for path_of_step in summary.paths.values():
        assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(path_of_step))


ERRORS = "SELECT name, value FROM stats WHERE severity != 'info' AND value != 0"
PROCESSES = "SELECT pid, name FROM process WHERE name IS NOT NULL"
SLICES = """SELECT pid, thread.name, slice.name, category, slice.ts - trace_start(), dur FROM slice
JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"""
# An arrow's ends are moments within the two parts of a collective. Its source began last.
PARTS = ", ".join(
    f"extract_arg({part}.arg_set_id, 'args.{fact}')" for fact in ("group", "sequence") for part in ("source", "target")
)
ARROWS = f"""SELECT begin.name, process.name, end.name, begin.ts - source.ts, end.ts - begin.ts, source.ts > target.ts,
{PARTS} FROM flow JOIN slice begin ON begin.id = slice_out JOIN slice end ON end.id = slice_in
JOIN slice source ON source.id = begin.parent_id JOIN slice target ON target.id = end.parent_id
JOIN thread_track ON source.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)"""


@pytest.mark.long
@pytest.mark.needs("chromium")
def test_perfetto_shows_every_span_and_arrow(kept_world: WorldFactory, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    kept_world(2).run(timed, path=str(path))
    questions = {"errors": ERRORS, "processes": PROCESSES, "slices": SLICES, "arrows": ARROWS}
    found = perfetto.ask(path, questions, tmp_path)
    assert found["errors"] == []
    assert sorted(found["processes"]) == [[one.rank, f"rank {one.rank} on {one.host}"] for one in read(path).ranks]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    first = min(event["ts"] for event in events if event["ph"] == "X")
    written = [
        [event["pid"], rows[event["tid"]], event["name"], event["cat"],
         round((event["ts"] - first) * 1e3), round(event["dur"] * 1e3)]
        for event in events if event["ph"] == "X"
    ]  # fmt: skip
    assert sorted(row for row in found["slices"] if row[3] != "arrow") == sorted(written)
    assert len(found["arrows"]) == sum(event["ph"] == "s" for event in events) > 0
    for begin, source, end, since_ns, apart_ns, later, group, same_group, sequence, same_sequence in found["arrows"]:
        assert (begin, end) == ("came last", f"{source.partition(' on ')[0]} came last")
        assert (since_ns, apart_ns, later) == (0, 0, 1)
        assert (group, sequence) == (same_group, same_sequence)


def test_the_last_steps_are_kept(kept_world: WorldFactory, tmp_path: Path) -> None:
    path = tmp_path / "few.json"
    assert kept_world(2).run(few_kept, path=str(path)) == [True, False]
    trace = read(path)
    steps = {one.facts["step"] for one in trace.spans if one.kind == "step"}
    assert 11 in steps
    assert 0 not in steps
    assert all(clock.lost for clock in trace.ranks)


def test_ranks_on_other_clocks_find_their_offsets(kept_world: WorldFactory) -> None:
    first, second = kept_world(2).run(skewed)
    assert first == [0, 0, 0, 0]
    offset_ns, uncertainty_ns, *same = second
    assert abs(offset_ns + SKEW_NS) <= uncertainty_ns
    assert uncertainty_ns < 30_000_000_000
    assert same == [0, 0]


def test_mishaps_cost_the_timeline_and_not_the_training(kept_world: WorldFactory, tmp_path: Path) -> None:
    (refused, told, written, failed, left), (_, told_1, *_) = kept_world(2).run(mishaps, folder=str(tmp_path))
    assert refused == f"timeline {tmp_path}: {tmp_path} is a folder"
    assert told == [f"no timeline in {tmp_path}/full.json: [Errno 28] No space left on device"]
    assert told_1 == []
    assert written is False
    assert failed == "a step failed"
    assert left == []
