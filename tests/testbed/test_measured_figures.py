# SPDX-License-Identifier: Apache-2.0
"""`make figures`: each row of docs/performance.json with a source finds its figures in what the benchmark writes.

The benchmarks' own reports are filled with made-up times: nothing is measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.command_line import app
from sennit.testbed.bench.figures import measured_figures, performance_page
from sennit.testbed.bench.figures.figures import GOAL, Figures
from sennit.testbed.bench.results import Report, Row
from sennit.testbed.bench.samples import feed, ingest, offload, offload_end_to_end
from sennit.testbed.bench.tables import embedding, embedding_tiers, tiers, training_tiers
from sennit.testbed.bench.training import cost, scaling, sharded, slices, timeline
from sennit.testbed.bench.training.cost_ways import Measured
from sennit.testbed.bench.transport import codecs, rdma
from sennit.testbed.commands import app as scenario_commands
from sennit.testbed.scenarios import catalogue
from sennit.testbed.scenarios.results import Case as ScenarioCase
from sennit.testbed.scenarios.results import Results

DOCS = Path(__file__).resolve().parents[2] / "docs"
MACHINE = {
    "processor": "Some(R) Kind Processor",
    "cores": 64,
    "load_average": [0.0, 0.1, 0.2],
    "time_utc": "2027-01-02T03:04:05Z",
}


def collectives(command: str) -> dict[str, Any]:
    ours = "sennit-core" if "--core" in command else "sennit"
    peers = [ours, "symmetric", "core-symmetric", "gloo", "openmpi", "udp-bare"]
    rows = [
        Row(Case(collective, size), {peer: [0.25 * (1 + place)] for place, peer in enumerate(peers)})
        for collective in Collective
        for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 25 << 20, 64 << 20)
    ]
    return Report(ours=ours, settings={}, machine=MACHINE, rows=rows, memory_growth_bytes=123 << 20).as_json()


def tables(command: str) -> dict[str, Any]:
    seconds = {"sennit": [0.5], "fbgemm": [1.0], "torch": [2.0]}
    results = [
        embedding.Result(shape=shape, forward_s=seconds, backward_s=seconds, absent={}) for shape in embedding.shapes()
    ]
    return {**embedding.as_json(results, rounds=1, seed=1, threads=1), "machine": MACHINE}


def dense(command: str) -> dict[str, Any]:
    seconds = {slices.OURS: [3.0], **{peer: [2.0] for peer in slices.PEERS}}
    return slices.Report(settings=slices.Settings(), machine=MACHINE, seconds=seconds).as_json()


def step(command: str) -> dict[str, Any]:
    seconds = {peer: [2.0] for peer in (*sharded.SHARDINGS, sharded.TORCHREC)}
    return sharded.Report(settings=sharded.Settings(), machine=MACHINE, seconds=seconds, absent=None).as_json()


def fed(command: str) -> dict[str, Any]:
    turns = {source: [(1.0, 0.5)] for source in ("memory", "cpu://127.0.0.1", "xdp://veth")}
    found = ingest.results({"turns": turns, "batch_size": 2, "counters": {}})
    return {**ingest.as_json(found), "machine": MACHINE}


def costly(command: str) -> dict[str, Any]:
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


def from_files(command: str) -> dict[str, Any]:
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


def preprocessed(command: str) -> dict[str, Any]:
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


def packed(command: str) -> dict[str, Any]:
    names = ["packed in Python", "encoded, once a data set"]
    names += [f"packed, {what}MTU {mtu}" for what in ("", "sent and taken by XDP, ") for mtu in ("1,500", "3,506")]
    results = [feed.Result(what=name, records_a_packet=7, ns_a_record=1_000.0) for name in names]
    return {**feed.as_json(results), "machine": MACHINE}


def end_to_end(command: str) -> dict[str, Any]:
    times = {name: [1e-3] for name in ("load alone", "XDP", "cpu", "C loop", "Python")}
    return {
        "results": [
            asdict(one)
            for per_packet in offload_end_to_end.RECORDS_A_PACKET
            for one in offload_end_to_end.results_of(
                per_packet, batches=1, load_s=[1e-4], times_s=times, samplers=[], program_ns=1.0
            )
        ]
    }


def coded(command: str) -> dict[str, Any]:
    results = [
        codecs.Result(
            name=codecs.name_of(codec),
            encode=5e9,
            encode_with_residual=None,
            decode=6e9,
            ratio=2.0,
            peers={} if codec.stochastic else {"torch": (7e9, 7e9)},
        )
        for codec in codecs.CODECS
    ]
    return codecs.as_json(results, size_bytes=1, rounds=1, seed=1)


def worlds(command: str) -> dict[str, Any]:
    exposed = {"step_ms": 1.0, "alltoall_ms": 0.0, "others_ms": 0.0}
    return {"worlds": {str(world): {"processor_efficiency": 0.5, **exposed} for world in scaling.WORLDS}}


def timed(command: str) -> dict[str, Any]:
    settings = timeline.Settings(rounds=1)
    turns = [[[(1.0, 1.0)], [(1.5, 1.5)]]]  # of one rank: without, with
    return timeline.Report(settings=settings, machine=MACHINE, turns=turns).as_json()


def in_vm(command: str) -> dict[str, Any]:
    peers = ("verbs", "kernel-rc")
    rows = [
        rdma.Row(netem=netem, in_flight=count, samples_s={peer: [1.0 if not netem else 3.0] for peer in peers})
        for netem in rdma.NETEM
        for count in (1, 8)
    ]
    return rdma.Report(settings=rdma.Settings(), machine=MACHINE, rows=rows).as_json()


def impaired(command: str) -> dict[str, Any]:
    """A case of each scenario, with all measures that its goals name, and those that any scenario of its kind gives."""
    given = ("goodput_kept", "ratio_to_gloo", "ratio_to_gloo_calm", "longest_stall_ms_before")
    cases = [
        ScenarioCase(
            name=name,
            title="",
            status="passed",
            measures=dict.fromkeys((*given, *(goal.measure for goal in catalogue.SCENARIOS[name].goals)), 0.321),
        )
        for name in command.split()[2:]
    ]
    results = Results(form="full", strict=False, seed=1, machine=dict(MACHINE), cases=cases)
    return results.as_json()


REPORTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "bench collectives": collectives,
    "bench embedding": tables,
    "bench slices": dense,
    "bench sharded": step,
    "bench ingest": fed,
    "bench cost": costly,
    "bench tiers": from_files,
    "bench offload --end-to-end": end_to_end,
    "bench offload": preprocessed,
    "bench feed": packed,
    "bench codecs": coded,
    "bench scaling": worlds,
    "bench timeline": timed,
    "testbed run": impaired,
    "testbed vm -- sennit bench rdma": in_vm,
}


def measure(command: str) -> dict[str, Any]:
    report = next(made for words, made in REPORTS.items() if command.startswith(words))(command)
    return {**json.loads(json.dumps(report)), "machine": MACHINE, "others": [0.0, 0.1], "busy": False}


def test_every_source_finds_its_figures_and_pages_say_where_they_come_from() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    before = {(table.name, row.name, str(row.cells)) for table in figures.tables for row in table.rows}
    for command in measured_figures.commands(figures):
        assert measured_figures.measured(figures, command, measure) == []
    count = 0
    for table in figures.tables:
        for row in table.rows:
            if row.source is None:
                continue
            count += 1
            assert row.run == f"sennit {row.source['command']}"
            assert (table.name, row.name, str(row.cells)) not in before
            for heading, wanted, cell in zip(table.columns[1:], row.source["figures"], row.cells, strict=True):
                # Nothing of an earlier run stays beside what is new.
                is_goal = heading.endswith(GOAL)
                assert (wanted is None) == (is_goal or cell is None), (table.name, row.name, heading)
    assert count >= 90
    text = performance_page.rendered(figures.without_unused_runs(), "performance.md.j2")
    assert "Measured 2027-01-02 on Some Kind, 64 cores, load 0.0 (others used at most 0.10 of a core)." in text
    assert "Noted" not in text


def test_a_peer_that_did_not_run_leaves_its_row_as_it_was() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    _, before = figures.row("step torchrec")

    def without(command: str) -> dict[str, Any]:
        found = measure(command)
        del found["peer / table_wise"][sharded.TORCHREC]
        return found

    (told,) = measured_figures.measured(figures, "bench sharded", without)
    assert told == 'sharded tables: TorchRec, table-wise: no "peer / table_wise".torchrec'
    assert figures.row("step torchrec")[1] == before


def test_figures_of_a_busy_machine_are_refused() -> None:
    figures = Figures.read(DOCS / performance_page.FIGURES)
    with pytest.raises(ValueError, match=r"sennit bench slices: measured while others used 1\.0 processors"):
        measured_figures.measured(
            figures, "bench slices", lambda command: {**measure(command), "busy": True, "others": [1, 0]}
        )


def test_a_run_says_the_most_that_others_used_beside_any_of_its_figures() -> None:
    figures, used = Figures.read(DOCS / performance_page.FIGURES), iter([[0.0, 0.2], [0.1, 0.0]])
    measured_figures.measured(figures, "bench sharded", lambda command: {**measure(command), "others": next(used)})
    assert figures.runs["sennit bench sharded"]["others"] == [0.1, 0.2]


def test_every_source_is_a_command(tmp_path: Path) -> None:
    bench, scenarios = typer.main.get_group(app), typer.main.get_group(scenario_commands)
    for command in measured_figures.commands(Figures.read(DOCS / performance_page.FIGURES)):
        words = [*shlex.split(command.removeprefix("testbed vm -- sennit ")), "--json", str(tmp_path / "found.json")]
        group = bench if words[0] == "bench" else scenarios
        context = group.commands[words[1]].make_context(words[1], words[2:])
        if group is scenarios:
            catalogue.choose(context.params["names"])


def test_a_figure_that_is_not_finite_is_not_written() -> None:
    figures = Figures.read(DOCS / "performance.json")
    figures.runs["none"] = {"took_s": float("nan")}
    with pytest.raises(ValueError, match="not JSON compliant"):
        figures.text()
