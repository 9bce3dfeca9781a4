# SPDX-License-Identifier: Apache-2.0
"""The sessions with our own programs count exactly what the ranks themselves counted."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.ebpf.loader import BpfObject
from sennit.runtime.trace import paths, tracing
from sennit.testbed.topology import Impairment, Planes
from sennit.transport import counters, tracepoints
from tests.testbed.answering_ranks import DEADLINE_S, WORLD, Ranks
from tests.testbed.trace_runs import SENNIT, command_prefix, everybody, last_pages, session

PLANES = 2
Observed = tuple[list[counters.Page], dict[str, Any], dict[str, Any]]
pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf", "nsenter", "tracepoints")]


def lossy_run(folder: Path, seed: int, apart: list[str]) -> list[counters.Page]:
    """Returns the counters of two ranks over planes that lose 1 %. The ranks were killed when they were idle."""
    environment = {**os.environ, "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    with Planes(hosts=WORLD, planes=PLANES, per_packet=True) as planes:
        planes.impair(Impairment(loss_fraction=0.01, seed=seed))

        def start(rank: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
            return planes.popen(rank, [*apart, *command], env=environment | planes.environment(rank), **options)

        return last_pages(Ranks(start, folder, seed))


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """The counters of one run over planes, and what `trace paths` and `trace stalls --by-peer` wrote of it."""
    folder = tmp_path_factory.mktemp("observed")
    apart = command_prefix(tracepoints.library(), folder / tracepoints.LIBRARY)
    written = [folder / "paths.json", folder / "stalls.json"]
    with (
        session("paths", "--json", str(written[0]), enter=apart),
        session("stalls", "--by-peer", "--json", str(written[1]), enter=apart),
    ):
        pages = lossy_run(folder, int(request.config.getoption("seed")), apart)
    documents = [json.loads(file.read_text()) for file in written]
    for document in documents:
        assert document["uncounted"] == {"map_full": 0, "unmatched": 0}
    return pages, documents[0], documents[1]


def flow_total(page: counters.Page, name: str) -> int:
    return page.total("flow", name)


def test_paths_are_those_of_the_counters(observed: Observed) -> None:
    pages, document, _ = observed
    rows = {(row["rank"], row["peer"], row["path"]): row for row in document["rows"]}
    for page in pages:
        blocks = {(page.rank, block.peer, block.path): block for block in page.blocks if block.group == "path"}
        assert {key for key in rows if key[0] == page.rank} == set(blocks)
        for key, block in blocks.items():
            row = rows[key]
            assert row["sent_packets"] == block.values["data_packets_sent"]
            assert row["retransmitted_packets"] == block.values["retransmitted_packets"]
            assert row["lost_packets"] == block.values["lost_packets"]
            assert row["state"] == ("good", "skip", "bad", "probing")[block.values["state"]]
            assert 0 < sum(row["rtt_us"].values()) <= row["sent_packets"]
            assert row["rtt_p50_us"] <= row["rtt_p90_us"] <= row["rtt_p99_us"]
        mine = [row for key, row in rows.items() if key[0] == page.rank]
        for name, counter in (
            ("sent_bytes", "data_bytes_sent"),
            ("received_packets", "data_packets_received"),
            ("received_bytes", "data_bytes_received"),
            ("duplicate_packets", "duplicate_packets"),
            ("state_changes", "path_state_changes"),
        ):
            assert sum(row[name] for row in mine) == flow_total(page, counter), name
        assert sum(row["lost_packets"] for row in mine) > 0


def test_waits_are_those_of_the_counters(observed: Observed) -> None:
    pages, _, document = observed
    for page in pages:
        rows = {(row["wait"], row["peer"]): row for row in document["rows"] if row["rank"] == page.rank}
        operation = rows["operation", None]
        assert operation["count"] == page.total("engine", "operations_completed")
        assert (operation["failed"], operation["open"], operation["share"]) == (0, 0, 1.0)
        credit = rows.get(("credit", None), {"count": 0, "open": 0})
        assert credit["count"] + credit["open"] == flow_total(page, "credit_stalls")
        for wait in ("send", "receive"):
            whole, of_peer = rows[wait, None], rows[wait, 1 - page.rank]
            assert whole["count"] == of_peer["count"] > 0
            assert whole["open"] == 0
        for wait in ("send", "receive", "reduce", "copy"):
            row = rows[wait, None]
            assert 0 < row["busy_s"] <= operation["busy_s"]
            assert row["busy_s"] <= row["time_s"]
            assert sum(row["time_us"].values()) == row["count"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["paths", "--", "sh", "-c", "exit 3"], 3, "nothing was seen"),
        pytest.param(["stalls", "--seconds", "0.2"], 0, "nothing was seen", marks=pytest.mark.long),
        # The command lives longer than the session, and says so.
        (["stalls", "--seconds", "0.1", "--", "sh", "-c", "sleep 0.6; echo still here >&2; exit 4"], 4, "still here"),
        (["paths", "--", "/no/such/program"], 69, "/no/such/program: No such file"),
        (["stalls", "--pid", "4194305"], 69, "--pid 4194305: no such process"),
        (["paths", "--json", "/dev/full", "--", "sh", "-c", "exit 5"], 5, "/dev/full cannot be written"),
        (["paths", "--interval", "0.1", "--seconds", "0.3"], 0, "no process that runs now uses"),
        (["paths", "--pid", "1", "--seconds", "0.1"], 0, "nothing was seen: process 1 had not loaded /"),
    ],
)
def test_how_a_session_ends(arguments: list[str], code: int, said: str, apart: list[str]) -> None:
    done = subprocess.run(
        [*apart, *SENNIT, "trace", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.needs("loopback-ipv6")
def test_hits_without_room_are_counted(
    tmp_path: Path, seed: int, apart: list[str], own_core: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map has room for one of the two paths, one of each rank."""
    here = {**os.environ, "SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    monkeypatch.setattr(tracing, "BpfObject", functools.partial(BpfObject, max_entries={"paths": 1}))

    def start(_: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*apart, *command], env=here, **options)

    with tracing.Tracing(paths.PROGRAM, paths.PROBES, everybody(own_core)) as running:
        pages = last_pages(Ranks(start, tmp_path, seed))
        rows, uncounted = paths.collect(running), running.uncounted()
    assert len(rows) == 1
    sent = sum(flow_total(page, "data_packets_sent") for page in pages)
    received = sum(flow_total(page, "data_packets_received") for page in pages)
    missing = sent + received - sum(row.sent_packets + row.received_packets for row in rows)
    # (The maps of round trips, losses and states lack room too.)
    assert uncounted["map_full"] > missing > 0


@pytest.mark.needs("loopback-ipv6")
def test_an_end_whose_beginning_was_not_seen_is_counted(tmp_path: Path, seed: int, apart: list[str]) -> None:
    """The rank was in the middle of an operation when the session began."""
    here = {**os.environ, "SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    written = tmp_path / "stalls.json"

    def start(_: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*apart, *command], env=here, **options)

    with Ranks(start, tmp_path, seed) as ranks:
        posted = ranks.pages()[0].total("engine", "operations_posted")
        ranks.begin_barrier(0)
        ranks.wait_for(0, "engine", "operations_posted", posted + 1)
        with session("stalls", "--json", str(written), enter=apart):
            ranks.begin_barrier(1)
            assert ranks.answer(0)
            assert ranks.answer(1)
    document = json.loads(written.read_text())
    assert document["uncounted"]["unmatched"] > 0
    counted = {row["rank"]: row["count"] for row in document["rows"] if row["wait"] == "operation"}
    assert counted == {1: 1}
