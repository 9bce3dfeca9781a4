# SPDX-License-Identifier: Apache-2.0
"""Sessions find the library of a process, wherever it lies; they count what they miss; intervals are differences."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.ebpf.compiler import PROGRAMS
from sennit.offload import tracepoints as of_ingest
from sennit.runtime.trace import commands, ingest, loss, ops, paths, session, stalls, target
from sennit.runtime.trace.target import SessionError, not_seen, target_of, why_empty
from sennit.transport import tracepoints
from sennit.transport.tracepoints import PathState
from tests.ranks import command
from tests.testbed.answering_ranks import DEADLINE_S, Ranks
from tests.testbed.trace_runs import everybody, holding
from tests.testbed.trace_runs import session as running_session


def test_an_interval_has_what_came_in_it() -> None:
    before = paths.Path(rank=0, peer=1, path=0, sent_packets=5, state=PathState.BAD, rtt_us=Counter({3: 2, 4: 1}))
    before.state_s = {"good": 1.0}
    now = paths.Path(rank=0, peer=1, path=0, sent_packets=9, state=PathState.GOOD, rtt_us=Counter({3: 2, 4: 2, 7: 1}))
    now.state_s = {"good": 1.5, "bad": 0.25}
    new = paths.Path(rank=1, peer=0, path=0, sent_packets=3)
    between, first = session.since([before], [now, new])
    assert (between.rank, between.peer, between.path, between.sent_packets, between.state) == (
        0,
        1,
        0,
        4,
        PathState.GOOD,
    )
    assert between.rtt_us == {4: 1, 7: 1}
    assert between.state_s == {"good": 0.5, "bad": 0.25}
    assert first is new


def test_shares_and_rates_of_an_interval_are_its_own() -> None:
    kind = stalls.Kind.SEND
    before = stalls.Wait(rank=0, kind=kind, peer=None, busy_s=1.0, whole_s=1.0, open=3)
    now = stalls.Wait(rank=0, kind=kind, peer=None, busy_s=1.5, whole_s=3.0, open=2)
    (between,) = session.since([before], [now])
    assert (between.share, between.open, between.kind) == (0.25, 2, kind)
    start = ingest.Trainer(process=7, rank=0, batches=11, later_batches=10, seconds=1.0, asked={"gap": 1})
    later = ingest.Trainer(process=7, rank=0, batches=31, later_batches=30, seconds=2.0, asked={"gap": 4})
    (rate,) = session.since([start], [later])
    assert (start.batches_per_s, rate.batches, rate.batches_per_s, rate.asked) == (10.0, 20, 20.0, {"gap": 3})
    group = ops.Group(kind="barrier", bytes_log2=0, rank=None, count=2, time_ns=50)
    assert session.since([group], [group])[0] == ops.Group(kind="barrier", bytes_log2=0, rank=None)
    path = loss.Path(rank=0, peer=1, path=2, lost=3)
    assert session.since([path], [path]) == [loss.Path(rank=0, peer=1, path=2)]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a library of its own, in a pid namespace; the file has been removed."""
    copy = tmp_path / tracepoints.LIBRARY
    copy.write_bytes(tracepoints.library().read_bytes()[:4096])
    with holding(copy, ["unshare", "--pid", "--fork", "--kill-child"]) as process:
        copy.unlink()
        yield process


@pytest.mark.root
def test_a_process_with_a_library_of_its_own_is_found_by_either_number(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (number,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    found = target_of(tracepoints, int(number))
    assert found.path.endswith(f"/{tracepoints.LIBRARY} (deleted)")
    assert (str(found), found.is_mapped) == (f"process {number}", True)
    assert found.file.stat().st_nlink == 0
    assert found.file.read_bytes() == tracepoints.library().read_bytes()[:4096]
    assert f"process {number} uses {found.path}, and came to none" in why_empty(found, tracepoints)

    # Other tests run at the same time: only the processes of this one are looked at.
    shown = {"1", str(holder.pid), number}
    monkeypatch.setattr(target, "_numbers", lambda: sorted(int(one) for one in shown))
    with pytest.raises(
        SessionError, match=rf"--pid 1: in a container a process has this number; here it is --pid {number}"
    ):
        target_of(tracepoints, 1)
    told = why_empty(target_of(tracepoints, None), tracepoints)
    assert told.startswith(f"no process that runs now uses {tracepoints.library()}; with a library of its own, ")
    assert f": --pid {number} ({found.path})" in told
    assert not target_of(of_ingest, holder.pid).is_mapped  # `unshare` itself has none


def test_processes_are_shown_by_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks of one environment are many, and have one library."""
    own, other, third = (tmp_path / name for name in ("own", "other", "third"))
    for file in (own, other, third):
        file.touch()
    files = {1: own, 2: other, 3: third, 4: other, 5: other, 6: tmp_path / "ended"}
    monkeypatch.setattr(target, "_numbers", lambda: list(files))
    monkeypatch.setattr(
        target,
        "_mapping",
        lambda _, number: target.Mapping(process=number, path=files[number].name, file=files[number]),
    )
    here = everybody(own)
    assert not_seen(here, tracepoints) == (
        "with a library of its own, in a container or another environment: --pid 2 (other, and 2 more of it), "
        "--pid 3 (third)"
    )
    assert why_empty(here, tracepoints).startswith(f"1 process uses {own}, and came to none of these tracepoints; with")
    monkeypatch.setattr(target, "SHOWN_MAX", 1)
    assert not_seen(here, tracepoints).endswith("--pid 2 (other, and 2 more of it), and of 1 more")
    files = {1: own, 6: tmp_path / "ended"}
    assert not_seen(here, tracepoints) == ""


@pytest.mark.root
@pytest.mark.needs("tracepoints")
def test_who_is_not_seen_is_said_at_the_start_or_as_soon_as_there_is_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = tmp_path / tracepoints.LIBRARY, tmp_path / "other" / tracepoints.LIBRARY
    other.parent.mkdir()
    for file in (own, other):
        file.write_bytes(tracepoints.library().read_bytes())
    monkeypatch.setattr(tracepoints, "library", lambda: own)

    def said(*looks: list[int]) -> list[str]:
        """What the session says if it finds these processes, one list after the other."""
        left = list(looks)
        monkeypatch.setattr(target, "_numbers", lambda: left.pop(0) if len(left) > 1 else left[0])
        with pytest.raises(SystemExit, match="0"):
            commands.app(["paths", "--seconds", "0.5", "--interval", "0.1"])
        return capsys.readouterr().err.splitlines()

    with holding(other) as process:
        line = (
            f"not seen: with a library of its own, in a container or another environment: --pid {process.pid} ({other})"
        )
        for looks in ([[process.pid]], [[], [process.pid]]):
            begin, hint, end = said(*looks)
            assert (begin, hint) == ("sennit trace: 5 tracepoints of every process", line)
            assert end.startswith("nothing was seen: no process that runs now uses")
    assert len(said([])) == 2


@pytest.mark.root
@pytest.mark.needs("tracepoints", "loopback-ipv6")
@pytest.mark.parametrize("name", ["paths", pytest.param("ops", marks=[pytest.mark.needs("bcc"), pytest.mark.long])])
def test_a_session_from_outside_sees_a_rank_with_a_library_of_its_own(
    tmp_path: Path, seed: int, apart: list[str], own_core: Path, name: str
) -> None:
    here = {**os.environ, "SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    written = tmp_path / "found.json"

    def start(_: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*apart, *command], env=here, **options)

    with Ranks(start, tmp_path, seed) as ranks:
        own_core.unlink()  # as after an update of the package
        process = ranks.processes[0].pid
        with running_session(name, "--pid", f"{process}", "--json", str(written), said=f"of process {process}"):
            for rank in range(2):
                ranks.begin_barrier(rank)
            assert all(ranks.answer(rank) for rank in range(2))
    rows = json.loads(written.read_text())["rows"]
    assert {row["rank"] for row in rows} <= {0, None}
    assert sum(row.get("sent_packets", 0) + row.get("count", 0) for row in rows) > 0


def has_no_room(folder: Path, seed: int, apart: list[str], core: Path) -> None:
    """The maps have room for one group and for one duration."""
    text = (PROGRAMS / "ops.bcc.c").read_text()
    small = text.replace("GROUPS_MAX 10240", "GROUPS_MAX 1").replace("LATENCIES_MAX 65536", "LATENCIES_MAX 1")
    assert small.count("_MAX 1\n") == 2
    (folder / "ops.bcc.c").write_text(small)
    here = {**os.environ, "SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}

    def start(_: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*apart, *command], env=here, **options)

    session.PROGRAMS = folder  # type: ignore[attr-defined]  # of this process alone
    with session.open_bcc(ops.PROGRAM, ops.PROBES, everybody(core)) as program:
        with Ranks(start, folder, seed) as ranks:
            done = sum(page.total("engine", "operations_completed") for page in ranks.pages())
        rows, uncounted = ops.collect(program, by_rank=True), program.uncounted()
    (row,) = [row for row in rows if row.count]
    durations = sum(sum(row.latencies_us.values()) for row in rows)
    assert uncounted["map_full"] == (done - row.count) + (done - durations) > 0
    assert uncounted["unmatched"] == 0


@pytest.mark.root
@pytest.mark.needs("tracepoints", "bcc", "loopback-ipv6")
def test_hits_that_bcc_has_no_room_for_are_counted(tmp_path: Path, seed: int, apart: list[str], own_core: Path) -> None:
    """In a process of its own, because a session gets its own mounts where tracefs is not mounted."""
    process = subprocess.run(
        command(functools.partial(has_no_room, tmp_path, seed, apart, own_core)),
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
