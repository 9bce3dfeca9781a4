# SPDX-License-Identifier: Apache-2.0
"""`sennit trace ingest` counts the same as the trainer reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")
pytest.importorskip("sennit.offload._native", reason="the native receiver is not built")

from sennit.offload import tracepoints
from sennit.testbed.topology import Impairment, Planes
from tests.testbed.answering_ranks import DEADLINE_S
from tests.testbed.trace_runs import command_prefix, session

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.needs("tc-bpf", "nsenter", "tracepoints")]
FEEDER_HOST, TRAINER_HOST = 0, 1
# A tenth of 3,000 samples is held back, and ranks take whole batches.
BATCH, STEPS, RANKS = 128, 12, 2
DATA = ["--data", "synthetic", "--samples", "3000", "--row-limit", "200"]
RUN = ["--batch-size", f"{BATCH}", "--steps", f"{STEPS}", "--ranks", f"{RANKS}", "--dim", "4", "--bottom", "8",
       "--top", "8", "--timeout", "60", "--sharding", "table_wise"]  # fmt: skip
# `accepted` is no refusal, and only BPF programs count `busy`.
NOT_REFUSED = ("accepted", "busy")


def test_batches_requests_and_refusals_are_those_of_the_report(tmp_path: Path, seed: int) -> None:
    report, written = tmp_path / "report.json", tmp_path / "ingest.json"
    apart = command_prefix(tracepoints.library(), tmp_path / tracepoints.library().name)
    with (
        Planes(hosts=2, planes=1, mtu=1500, per_packet=True) as planes,
        session("ingest", "--json", str(written), enter=apart),
    ):
        planes.impair(Impairment(loss_fraction=0.03, seed=seed), hosts=[FEEDER_HOST])
        place = f"[{planes.addresses(TRAINER_HOST)[0]}]:4800"
        pipe = subprocess.PIPE
        train = [sys.executable, "-m", "sennit", "train", "--ingest", f"cpu://{place}", *RUN, "--json", str(report)]
        feed = [sys.executable, "-m", "sennit", "feed", *DATA, "--to", place, "--timeout", "60"]
        trainer = planes.popen(TRAINER_HOST, [*apart, *train], stdout=pipe, stderr=subprocess.STDOUT, text=True)
        feeder = planes.popen(FEEDER_HOST, [*apart, *feed], stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for process in (trainer, feeder):
            said, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, said
    document, counted = json.loads(written.read_text()), json.loads(report.read_text())["ingest"]
    print(document, counted)
    assert document["uncounted"] == {"map_full": 0, "unmatched": 0}
    trainers = [row for row in document["rows"] if "rank" in row]
    feeders = [row for row in document["rows"] if "feeder" in row]
    assert sorted(row["rank"] for row in trainers) == list(range(RANKS))

    assert sum(row["rows"] for row in trainers) == counted["records"]
    for why, name in (("gap", "gaps"), ("silence", "silences"), ("moved", "moved")):
        assert sum(row["asked"][why] for row in trainers) == counted[name]
    assert counted["gaps"] + counted["silences"] > 0
    for row in trainers:
        assert row["batches"] >= STEPS
        assert row["asked"]["opened"] >= row["batches"]
        assert sum(row["filling_us"].values()) == row["batches"]
        assert sum(row["waiting_us"].values()) == sum(row["starved_us"].values()) >= STEPS
        assert row["released"] >= STEPS
    for name, count in counted["datagrams"].items():
        refused = sum(row["refused"].get(name, 0) for row in trainers)
        # (Datagrams that arrived after the report are refused as well.)
        assert refused >= count if name not in NOT_REFUSED else refused == 0, name
    assert sum(row["rows"] for row in feeders) >= counted["records"]
    assert sum(row["packets"] for row in feeders) > counted["datagrams"]["accepted"]
    assert all(row["errors"] == 0 for row in feeders)
