# SPDX-License-Identifier: Apache-2.0
"""`make figures`: each row of docs/performance.json with a source finds its figures in what the benchmark writes.

The benchmarks' own reports are filled with made-up times: nothing is measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.command_line import app
from sennit.testbed.bench.figures import measured_figures, performance_page
from sennit.testbed.bench.figures.figures import GOAL, Figures
from sennit.testbed.bench.results import Report, Row
from sennit.testbed.bench.samples import feed, ingest, offload
from sennit.testbed.bench.tables import embedding, embedding_tiers, tiers, training_tiers
from sennit.testbed.bench.training import cost, sharded, slices
from sennit.testbed.bench.training.cost_ways import Measured

DOCS = Path(__file__).resolve().parents[2] / "docs"
MACHINE = {
    "processor": "A Processor",
    "cores": 64,
    "load_average": [0.0, 0.1, 0.2],
    "time_utc": "2027-01-02T03:04:05Z",
}


def collectives(bench: str) -> dict[str, Any]:
    peers = ["sennit", "gloo", "openmpi", "udp-bare"]
    rows = [
        Row(Case(collective, size), {peer: [0.25 * (1 + place)] for place, peer in enumerate(peers)})
        for collective in Collective
        for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    ]
    return Report(ours="sennit", settings={}, machine=MACHINE, rows=rows).as_json()


def tables(bench: str) -> dict[str, Any]:
    seconds = {"sennit": [0.5], "fbgemm": [1.0], "torch": [2.0]}
    results = [
        embedding.Result(shape=shape, forward_s=seconds, backward_s=seconds, absent={}) for shape in embedding.shapes()
    ]
    return {**embedding.as_json(results, rounds=1, seed=1, threads=1), "machine": MACHINE}


def dense(bench: str) -> dict[str, Any]:
    seconds = {slices.OURS: [3.0], **{peer: [2.0] for peer in slices.PEERS}}
    return slices.Report(settings=slices.Settings(), machine=MACHINE, seconds=seconds).as_json()


def step(bench: str) -> dict[str, Any]:
    seconds = {peer: [2.0] for peer in (*sharded.SHARDINGS, sharded.TORCHREC)}
    return sharded.Report(settings=sharded.Settings(), machine=MACHINE, seconds=seconds, absent=None).as_json()


def fed(bench: str) -> dict[str, Any]:
    turns = {source: [(1.0, 0.5)] for source in ("memory", "cpu://127.0.0.1", "xdp://veth")}
    found = ingest.results({"turns": turns, "batch_size": 2, "counters": {}})
    return {**ingest.as_json(found), "machine": MACHINE}


def costly(bench: str) -> dict[str, Any]:
    ways = {
        way.name: Measured(
            samples=1_000_000,
            processor_s=[2.0],
            roles_s=[{"driver": 2.0}],
            feeder_s=[0.0],
            moved_bytes=1_000_000_000,
        )
        for way in cost.BARE
    }
    return cost.Report(settings=cost.Settings(kind="bare"), machine=MACHINE, ways=ways).as_json()


def from_files(bench: str) -> dict[str, Any]:
    homes = [
        embedding_tiers.Result(
            home=home,
            access="",
            memory_s=[1.0],
            tiers_s=[8.0],
            wait_s=[0.0],
            misses=12_345.0,
            reads=9.0,
            bytes_read=1.0,
            bytes_written=1.0,
        )
        for home in embedding_tiers.HOMES
    ]
    trainer = training_tiers.Result(
        memory_s=[1.0], stored_s=[8.0], phases_s={}, counts={"misses": 12_345.0, "reads": 9.0}
    )
    report = tiers.Report(load=embedding_tiers.Load(), steps=1, seed=1, trainer=trainer, homes=homes)
    return {**report.as_json(), "machine": MACHINE}


def preprocessed(bench: str) -> dict[str, Any]:
    results = [
        offload.Result(
            shape=shape,
            records_a_packet=count,
            packet_bytes=1,
            xdp_ns_a_record=11.0,
            xdp_without_sketch_ns_a_record=10.0,
            ids_a_record=26.0,
            cpu_ns_a_record=17.0,
            numpy_ns_a_record=170.0,
        )
        for shape in offload.shapes()
        for count in (1, 8, 21)
    ]
    return {**offload.as_json(results), "machine": MACHINE}


def packed(bench: str) -> dict[str, Any]:
    names = ["packed in Python", "encoded, once a data set"]
    names += [f"packed, {what}MTU {mtu}" for what in ("", "sent and taken by XDP, ") for mtu in ("1,500", "3,506")]
    results = [feed.Result(what=name, records_a_packet=7, ns_a_record=1_000.0) for name in names]
    return {**feed.as_json(results), "machine": MACHINE}


REPORTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "collectives": collectives,
    "embedding": tables,
    "slices": dense,
    "sharded": step,
    "ingest": fed,
    "cost": costly,
    "tiers": from_files,
    "offload": preprocessed,
    "feed": packed,
}


def measure(bench: str) -> dict[str, Any]:
    report = REPORTS[bench.split()[0]](bench)
    return {**json.loads(json.dumps(report)), "others": [0.0, 0.1], "busy": False}


def test_every_source_finds_its_figures_and_pages_say_where_they_come_from() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    before = {(table.name, row.name, str(row.cells)) for table in figures.tables for row in table.rows}
    for bench in measured_figures.commands(figures):
        assert measured_figures.measured(figures, bench, measure) == []
    count = 0
    for table in figures.tables:
        for row in table.rows:
            if row.source is None:
                continue
            count += 1
            assert row.run == f"sennit bench {row.source['bench']}"
            assert (table.name, row.name, str(row.cells)) not in before
            for heading, wanted, cell in zip(table.columns[1:], row.source["figures"], row.cells, strict=True):
                # Nothing of an earlier run stays beside what is new.
                is_goal = heading.endswith(GOAL)
                assert (wanted is None) == (is_goal or cell is None), (table.name, row.name, heading)
    assert count >= 45
    text = performance_page.rendered(figures.without_unused_runs(), "performance.md.j2")
    assert "Measured 2027-01-02 on A Processor, 64 cores, load 0.0." in text
    left = measured_figures.unmeasured(figures)
    assert len(left) + count == sum(row.run is not None for table in figures.tables for row in table.rows)


def test_a_peer_that_did_not_run_leaves_its_row_as_it_was() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    _, before = figures.row("step torchrec")

    def without(bench: str) -> dict[str, Any]:
        found = measure(bench)
        del found["peer / table_wise"][sharded.TORCHREC]
        return found

    (told,) = measured_figures.measured(figures, "sharded", without)
    assert told == 'sharded tables: TorchRec, table-wise: no "peer / table_wise".torchrec'
    assert figures.row("step torchrec")[1] == before


def test_figures_of_a_busy_machine_are_refused() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    with pytest.raises(ValueError, match=r"sennit bench slices: measured while others used 1\.0 processors"):
        measured_figures.measured(figures, "slices", lambda bench: {**measure(bench), "busy": True, "others": [1, 0]})


def test_every_source_is_a_command(tmp_path: Path) -> None:
    group = typer.main.get_group(app)
    for bench in measured_figures.commands(Figures.read(DOCS / performance_page.FIGURES)):
        name, *options = shlex.split(bench)
        command = group.commands[name]
        command.make_context(name, [*options, "--json", str(tmp_path / "found.json")])
