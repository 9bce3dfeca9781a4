# SPDX-License-Identifier: Apache-2.0
"""The roofline: bounds computed by hand, that a bound is a bound, and bad descriptions."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.runtime.model.factory import build
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.roofline import (
    ARITHMETIC,
    FAR,
    LATENCY,
    NEAR,
    Bounds,
    Link,
    Machines,
    Tables,
    Tier,
    Workload,
    bounds_of,
)
from sennit.runtime.planner.roofline_files import dlrm, read_machines, read_model, read_rate, this_machine
from sennit.runtime.planner.usage import Use
from sennit.runtime.sharded.tables import Table
from sennit.testbed.models_page import with_tables
from sennit.transport.errors import ConfigError
from tests.extent import examples

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    "--data", "synthetic", "--samples", "20000", "--row-limit", "2000", "--ranks", "2", "--dim", "8", "--batch-size",
    "1024",
]  # fmt: skip


def used(rows: float, length: float = 1.0) -> Use:
    """Each row as often as every other one."""
    return Use(length, np.zeros(1, np.int64), np.array([float(rows)]), np.ones(1))


def table(rows: int = 1000, dim: int = 8, **options: Any) -> Tables:
    length = options.pop("length", 1.0)
    return Tables(
        **{"name": "t", "row_bytes": 4.0 * dim, "state_bytes": 4.0, "length": length, "use": used(rows, length)}
        | {"rows": rows, "dim": dim}
        | options
    )


def workload(*tables: Tables, **options: Any) -> Workload:
    given: dict[str, Any] = {"name": "m", "batch": 64, "dense_flops": 0.0, "dense_numbers": 0.0}
    return Workload(tables=tables, **given | options)


def cluster(hosts: int = 2, devices: int = 2, **options: Any) -> Machines:
    tiers = [Tier(name="fast", size_bytes=1e9, bytes_per_s=1000.0), Tier(name="slow", size_bytes=1e9, bytes_per_s=10.0)]
    links = {"near": Link(bytes_per_s=100.0, latency_s=0.25), "far": Link(bytes_per_s=10.0, latency_s=0.5)}
    given: dict[str, Any] = {"name": "c", "flops_per_s": 50.0, "tiers": tiers, **links}
    return Machines(hosts=hosts, devices=devices, **given | options)


def needs(bounds: Bounds) -> dict[str, Mapping[str, float]]:
    return {phase.name: phase.needs for phase in bounds.phases}


def test_a_table_by_hand() -> None:
    # 64 samples, 4 ranks, 3 tables of one row each and dim 8; 2 ids a bag.
    found = bounds_of(workload(table(rows=1, count=3, length=2.0)), cluster())
    got = needs(found)
    # A rank's 16 samples have 3 x (2 ids of 4 bytes + a length) each; half goes to the other host, a quarter beside it.
    assert got["id exchange"] == {LATENCY: 0.5, NEAR: 16 * 36 / 4 / 100, FAR: 16 * 36 / 2 / 10}
    # Sums of 24 floats for 64 samples, made on 4 ranks alike.
    sums = 64 * 24 * 4 / 4
    assert got["pooled exchange"] == {LATENCY: 0.5, NEAR: sums / 4 / 100, FAR: sums / 2 / 10}
    assert got["gradient exchange"] == got["pooled exchange"]
    # The three rows of 32 bytes are distinct once, so a rank reads 24; and it writes its sums.
    assert got["lookup"] == pytest.approx({"fast": (24 + sums) / 1000, ARITHMETIC: 16 * 48 / 50})
    # Rows and states of 36 bytes are read and written, gradients are read.
    assert got["update"] == pytest.approx({"fast": (2 * 27 + sums) / 1000, ARITHMETIC: 16 * 48 / 50})
    assert found.serial_s == pytest.approx(sum(max(one.values()) for one in got.values()))
    # The link between hosts: ids, sums, gradients.
    assert found.overlapped_binding == FAR
    assert found.overlapped_s == pytest.approx((288 + 2 * sums / 2) / 10)
    assert [phase.binding for phase in found.phases][:2] == [FAR, ARITHMETIC]
    assert found.phases[0].by_kind() == {"bandwidth": 28.8, "latency": 0.5, "arithmetic": 0.0}


def test_dense_weights_by_hand() -> None:
    work = workload(table(rows=1), dense_flops=10.0, dense_numbers=1000.0, gradient_bytes=2.0)
    got = needs(bounds_of(work, cluster()))
    assert got["dense"] == {"fast": 1000 * 4 * 5 / 1000, ARITHMETIC: 16 * 10 / 50}
    # Ranks of a host add up 2,000 bytes; each then sends its half to the other host and back.
    assert got["AllReduce"] == {LATENCY: 0.5, NEAR: 2 * 2000 / 2 / 100, FAR: 2 * 2000 / 2 / 2 / 10}


def test_rows_over_ranks_by_hand() -> None:
    got = needs(bounds_of(workload(table(rows=1000, spread="row", length=1.0)), cluster()))["pooled exchange"]
    # A bag of one id is in one of four ranks and in one of two hosts.
    size = 64 * 8 * 4
    assert got == pytest.approx({LATENCY: 0.5, NEAR: size / 4 / 4 / 100, FAR: size / 2 / 2 / 2 / 10})


def test_replicas_by_hand() -> None:
    got = needs(bounds_of(workload(table(rows=1, spread="replicated")), cluster()))
    assert set(got) == {"lookup", "update", "replicas"}
    # One row of 8 gradients comes from the other host, a half by each link of this one.
    assert got["replicas"] == pytest.approx({LATENCY: 0.5, NEAR: 32 / 2 / 100, FAR: 32 / 2 / 10})
    # Each rank reads the row and changes it; 16 samples have sums of 8.
    assert got["lookup"]["fast"] == pytest.approx((32 + 16 * 32) / 1000)
    assert got["update"]["fast"] == pytest.approx((2 * 36 + 16 * 32) / 1000)


def test_a_rank_alone_exchanges_nothing_and_a_cache_hides_what_it_holds() -> None:
    work = workload(table(rows=1), dense_numbers=10.0, dense_flops=1.0)
    alone = bounds_of(work, cluster(1, 1))
    assert set(needs(alone)) == {"lookup", "update", "dense"}
    cached = bounds_of(work, cluster(1, 1, cache_bytes=2048.0 + 32))
    assert set(needs(cached)["lookup"]) == {ARITHMETIC}
    # 72 bytes of rows and states and 2,048 of gradients: 40 more than the cache has.
    assert needs(cached)["update"]["fast"] == pytest.approx(40 / 1000)


def test_the_most_used_rows_are_in_the_fastest_tier() -> None:
    hot = dataclasses.replace(table(rows=100, length=50.0), name="hot")
    cold = dataclasses.replace(table(rows=100), name="cold")
    work = workload(cold, hot, batch=4)
    # Ids, lengths, sums and gradients of one sample; then room for the rows of half the tables.
    batch = 51 * 4 + 8 + 2 * 16 * 4
    tiers = [
        Tier(name="fast", size_bytes=100 * 36 / 4 + batch, bytes_per_s=1e3),
        Tier(name="slow", size_bytes=1e9, bytes_per_s=1),
    ]
    found = bounds_of(work, cluster(tiers=tiers))
    seen = [100 * -math.expm1(-4 * length / 100) for length in (1, 50)]
    assert found.row_shares == pytest.approx([seen[1] / sum(seen), seen[0] / sum(seen)])
    assert needs(found)["lookup"]["slow"] == pytest.approx(seen[0] * 32 / 4)
    assert found.memory["slow"] == {"tables": pytest.approx(900)}


def test_a_cluster_that_is_too_small_is_refused_by_table_tier_and_bytes() -> None:
    small = [Tier(name="HBM", size_bytes=1000.0, bytes_per_s=1), Tier(name="SSD", size_bytes=1000.0, bytes_per_s=1)]
    with pytest.raises(ConfigError, match=r"table t has no place in tier SSD.*; 28,2\d\d bytes are missing"):
        # 1,000 rows of 36 bytes; 4 ranks have 8,000 bytes, less ids and sums of their samples.
        bounds_of(workload(table(rows=1000), batch=4), cluster(tiers=small))
    with pytest.raises(ConfigError, match=r"tier HBM of each device lacks 11,\d\d\d bytes .*most of it dense"):
        bounds_of(workload(table(rows=1), batch=4, dense_numbers=1000.0), cluster(tiers=small))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, Machines]:
    tables = [
        table(
            rows=draw(st.integers(1, 10_000)),
            dim=draw(st.sampled_from([4, 16])),
            count=draw(st.integers(1, 3)),
            length=draw(st.sampled_from([0.5, 1.0, 20.0])),
            spread=draw(st.sampled_from(["table", "row", "replicated"])),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    work = workload(
        *tables, batch=draw(st.integers(1, 4096)), dense_flops=draw(st.floats(0, 1e4)),
        dense_numbers=draw(st.floats(0, 1e4)),
    )  # fmt: skip
    return work, cluster(draw(st.integers(1, 4)), draw(st.integers(1, 4)), cache_bytes=draw(st.floats(0, 1e5)))


@examples(15)
@given(cases(), st.sampled_from(["near", "far", "flops", "fast", "slow"]), st.floats(1, 100))
def test_a_faster_part_never_raises_a_bound(case: tuple[Workload, Machines], part: str, factor: float) -> None:
    work, machines = case
    if part in ("near", "far"):
        link = getattr(machines, part)
        better: Any = {part: Link(bytes_per_s=link.bytes_per_s * factor, latency_s=link.latency_s / factor)}
        faster = dataclasses.replace(machines, **better)
    elif part == "flops":
        faster = dataclasses.replace(machines, flops_per_s=machines.flops_per_s * factor)
    else:
        tiers = [
            dataclasses.replace(tier, bytes_per_s=tier.bytes_per_s * (factor if tier.name == part else 1))
            for tier in machines.tiers
        ]
        faster = dataclasses.replace(machines, tiers=tiers)
    before, after = bounds_of(work, machines), bounds_of(work, faster)
    assert after.serial_s <= before.serial_s * (1 + 1e-9)
    assert after.overlapped_s <= before.overlapped_s * (1 + 1e-9)
    assert before.overlapped_s <= before.serial_s * (1 + 1e-9)
    for one, other in zip(before.phases, after.phases, strict=True):
        assert other.seconds <= one.seconds * (1 + 1e-9)


@examples(15)
@given(cases(), st.integers(2, 4), st.booleans())
def test_more_ranks_never_raise_the_memory_of_one(case: tuple[Workload, Machines], factor: int, hosts: bool) -> None:
    work, machines = case
    name = "hosts" if hosts else "devices"
    more = dataclasses.replace(machines, **{name: getattr(machines, name) * factor})
    used_before, used_after = (
        sum(sum(one.values()) for one in bounds_of(work, where).memory.values()) for where in (machines, more)
    )
    assert used_after <= used_before * (1 + 1e-9)


@pytest.mark.parametrize("dense", [0, 13])
def test_the_arithmetic_of_a_described_dlrm_is_what_torch_counts(dense: int) -> None:
    flops, weights = dlrm(dense, 3, 16, [32, 8], [64, 4])
    inputs = ModelInputs(
        dense_count=dense,
        tables=tuple(Table(name=f"t{number}", rows=9, dim=16) for number in range(3)),
        bottom=(32, 8),
        top=(64, 4),
        seed=1,
    )
    model = build("dlrm", inputs)
    vectors = {one.name: torch.zeros(5, one.dim, requires_grad=True) for one in inputs.tables}
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(5, dense), vectors).sum().backward()
    assert counter.get_total_flops() == 5 * flops
    assert sum(one.numel() for one in model.parameters()) == weights


MODEL = """
name = "clicks"
batch = 1024
dense = 13
bottom = [32]
top = [32]
[[table]]
name = "users"
rows = 1000
dim = 16
pooling = 2
"""
CLUSTER = """
hosts = 2
devices = 2
tflops = 10
near_gbit = 100
near_us = 1
far_gbit = 10
far_us = 5
[[tier]]
name = "HBM"
size = "1GiB"
gbyte_s = 1000
"""


def written(folder: Path, model: str = MODEL, where: str = CLUSTER) -> tuple[Path, Path]:
    paths = folder / "model.toml", folder / "cluster.toml"
    for path, text in zip(paths, (model, where), strict=True):
        path.write_text(text)
    return paths


def test_descriptions_are_read_as_written(tmp_path: Path) -> None:
    model, where = written(tmp_path)
    work, machines = read_model(model).work, read_machines(where)
    assert (work.batch, work.tables[0].row_bytes, work.tables[0].state_bytes) == (1024, 64, 4)
    assert work.dense_flops == dlrm(13, 1, 16, [32], [32])[0]
    assert (machines.far.bytes_per_s, machines.far.latency_s) == pytest.approx((1.25e9, 5e-6))
    assert machines.tiers == [Tier(name="HBM", size_bytes=float(1 << 30), bytes_per_s=1e12)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch = 1024", "batch = 0", r"batch 0; allowed: an integer from 1"),
        ("batch = 1024", "batches = 1024", r"unknown key 'batches'; allowed: .*batch"),
        ("batch = 1024", "", r"batch is missing"),
        ("rows = 1000", "rows = 1.5", r"table users: rows 1.5; allowed"),
        ("rows = 1000", "row = 1000", r"table users: unknown key 'row'"),
        ("rows = 1000", "", r"table users: rows is missing"),
        ("pooling = 2", "pooling = -1", r"table users: pooling -1; allowed: above 0"),
        ("pooling = 2", "pooling = inf", r"table users: pooling inf; allowed"),
        ("pooling = 2", 'pooling = 2\nprecision = "fp8"', r"precision 'fp8'; allowed: fp32"),
        ("pooling = 2", 'pooling = 2\nspread = "rows"', r"spread 'rows'; allowed: table, row, replicated"),
        ("pooling = 2", "pooling = 2\n[[table]]\nname='users'\nrows=1\ndim=16\npooling=1", "two are called users"),
        ("pooling = 2", "pooling = 2\n[[table]]\nname = 'x'\nrows = 1\ndim = 8\npooling = 1", r"tables of dim 8, 16"),
        ("top = [32]", "", r"top is missing"),
        ("top = [32]", "top = [0]", r"top 0; allowed: an integer from 1"),
        ("top = [32]", "top = [32]\nmflop = 3", r"the dense part; allowed: mflop and dense_parameters, or"),
        ("name = \"clicks\"", 'name = "clicks"\nexchange = "lossless"', r"exchange 'lossless'; allowed: fp32"),
    ],
)  # fmt: skip
def test_bad_models_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MODEL
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(written(tmp_path, model=MODEL.replace(old, new))[0])
    assert "model.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hosts = 2", "hosts = 0", r"hosts 0; allowed: an integer from 1"),
        ("devices = 2", "devices = 4096", r"2 hosts of 4096 devices; allowed: 4096 devices"),
        ("tflops = 10", "tflops = nan", r"tflops nan; allowed: above 0"),
        ("tflops = 10", "flops = 10", r"unknown key 'flops'"),
        ("far_us = 5", "", r"far_us is missing"),
        ("far_us = 5", "far_us = -5", r"far_us -5; allowed: 0 or more"),
        ("near_gbit = 100", "near_gbit = true", r"near_gbit True; allowed: above 0"),
        ('size = "1GiB"', "size = 1024", r"tier HBM: size 1024; allowed: a size"),
        ('size = "1GiB"', 'size = "1 GB"', r"tier HBM: size '1 GB'; allowed: a size"),
        ("gbyte_s = 1000", "", r"tier HBM: gbyte_s is missing"),
        ("gbyte_s = 1000", "gbyte_s = 1000\nspeed = 1", r"tier HBM: unknown key 'speed'"),
        ("[[tier]]", "[tier]", r"tier \{.*allowed: one \[\[tier\]\] or more"),
    ],
)  # fmt: skip
def test_bad_clusters_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CLUSTER
    with pytest.raises(ConfigError, match=message) as caught:
        read_machines(written(tmp_path, where=CLUSTER.replace(old, new))[1])
    assert "cluster.toml" in str(caught.value)


def test_a_model_that_does_not_fit_ends_the_command_with_one_line(tmp_path: Path) -> None:
    model, where = written(tmp_path, model=MODEL.replace("rows = 1000", "rows = 1_000_000_000"))
    result = CliRunner().invoke(app, ["roofline", "--model-file", str(model), "--cluster", str(where)])
    assert result.exit_code == 1
    # 68 bytes a row, on four devices of a GiB, of which batches and dense weights take some.
    assert "error: clicks does not fit on cluster: table users has no place in tier HBM" in result.output
    assert 63.70e9 < int(result.output.partition("; ")[2].split()[0].replace(",", "")) < 63.72e9
    result = CliRunner().invoke(app, ["roofline", "--model-file", str(model), "--ranks", "2", "--cluster", str(where)])
    assert result.exit_code == 1
    assert "--ranks with --model-file" in result.output


def test_the_page_has_the_tables_that_its_command_makes() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert with_tables(page) == page, "make models writes them again"
    with pytest.raises(ValueError, match="no place for tables"):
        with_tables("# A page\n")


def test_this_machine_is_what_its_calibration_says() -> None:
    constants = Constants()
    found = this_machine(constants, ranks=4, cores=2, memory_bytes=1e9, cache_bytes=0.0)
    assert found.turns == 2
    assert found.flops_per_s == pytest.approx(1 / constants.gemm.flop_s)
    assert found.tiers[0].bytes_per_s == pytest.approx(3 / constants.memory.copy_byte_s)
    assert (
        this_machine(constants, ranks=1, cores=1, memory_bytes=1e9, cache_bytes=0.0, read_bytes_per_s=1e15)
        .tiers[0]
        .bytes_per_s
        == 1e15
    )
    stopped = dataclasses.replace(constants, gemm=dataclasses.replace(constants.gemm, flop_s=0.0))
    with pytest.raises(ConfigError, match="takes no time"):
        this_machine(stopped, ranks=1, cores=1, memory_bytes=1e9, cache_bytes=0.0)
    assert 1e8 < read_rate() < 1e13


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_measured_run_is_never_faster_than_its_bound(tmp_path: Path) -> None:
    report, found = tmp_path / "report.json", tmp_path / "bound.json"
    run = [sys.executable, "-m", "sennit", "train", *OPTIONS, "--steps", "6", "--batches-ahead", "0"]
    subprocess.run([*run, "--json", str(report)], check=True, timeout=200, stdout=subprocess.DEVNULL)
    result = CliRunner().invoke(app, ["roofline", *OPTIONS, "--measured", str(report), "--json", str(found)])
    assert result.exit_code == 0, result.output
    told = json.loads(found.read_text())
    # A clock may be wrong by a thousandth.
    assert told["overlapped_s"] <= told["serial_s"] <= told["measured_step_s"] * 1.001
    phases = {one["name"]: one for one in told["phases"]}
    assert set(phases) == {
        "id exchange", "lookup", "pooled exchange", "dense", "gradient exchange", "update", "AllReduce",
    }  # fmt: skip
    for phase in phases.values():
        assert 0 < phase["bound_s"] <= phase["measured_s"] * 1.001, phase
    assert "times that with perfect overlap" in result.output
    cost = json.loads(report.read_text())["cost"]
    assert told["measured_cost"] == cost
    assert cost["moved_bytes"] > 0
    assert 0 < cost["roles"]["transport"]["processor_s"] < cost["user_s"] + cost["system_s"]
    # The system's times are in ticks of 10 ms, two for each rank.
    of_all = sum(role["processor_s"] for role in cost["roles"].values())
    assert abs(of_all - cost["user_s"] - cost["system_s"]) < 0.1
    assert "measured cost: " in result.output
    assert "measured by role: trainer " in result.output

    for option, value, message in (
        ("--batch-size", "2048", "1,024 samples a step, and here are 2,048"),
        ("--ranks", "1", "2 ranks, and here are 1"),
        ("--dim", "16", "numbers in tables, and here are"),
    ):
        options = [value if before == option else one for before, one in zip(["", *OPTIONS], OPTIONS, strict=False)]
        result = CliRunner().invoke(app, ["roofline", *options, "--measured", str(report)])
        assert result.exit_code == 1
        assert message in result.output, result.output
    broken = json.loads(report.read_text())
    for part in ({"processor_s_per_million_samples": 1.0}, {**cost, "roles": [1]}, [1]):
        report.write_text(json.dumps({**broken, "cost": part}))
        result = CliRunner().invoke(app, ["roofline", *OPTIONS, "--measured", str(report)])
        assert result.exit_code == 1
        assert "no report of a run with steps" in result.output
    report.write_text("{}")
    result = CliRunner().invoke(app, ["roofline", *OPTIONS, "--measured", str(report)])
    assert result.exit_code == 1
    assert "no report of a run with steps" in result.output


def test_help_has_the_command_and_an_example() -> None:
    assert "roofline" in CliRunner().invoke(app, ["--help"]).output
    assert "Example: sennit roofline" in CliRunner().invoke(app, ["roofline", "--help"]).output
