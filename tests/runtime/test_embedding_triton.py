# SPDX-License-Identifier: Apache-2.0
"""Triton kernels beyond the test table: what a GPU would run, and that the choice of tiles changes no bit."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sennit.runtime.data.seeds import torch_stream

pytest.importorskip("triton")

from sennit.runtime.kernels import triton_operator, triton_products, triton_tiles
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import ShardMemory, allocate
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Rounding, ShardSpec
from sennit.runtime.kernels.triton_operator import TritonOperator, sorted_runs
from sennit.runtime.kernels.triton_tables import describe, vectors_of
from sennit.runtime.kernels.triton_tiles import tiles_of_gpu
from tests.runtime.embedding_cases import CASES, expected, run, same_bits

HERE = Path(__file__).parent
# Instructions whose results differ from IEEE 754: contracted, flushing, approximate.
INEXACT = re.compile(r"\b(fma|mad)\.\S*f32|\.ftz\b|\.approx\b|div\.full|\.f64\b")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kernels_compile_for_an_h100_to_exact_instructions(tmp_path: Path) -> None:
    """The compiler may refuse what the interpreter accepts. Its code must round as the reference does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, HERE / "triton_compiling.py", tmp_path],
        check=True,
        timeout=220,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    found = {path.stem: path.read_text() for path in tmp_path.glob("*.ptx")}
    launched = vars(triton_operator) | vars(triton_products)
    kernels = {name for name in launched if name.endswith("_kernel")}
    assert {name.rpartition("-")[0] for name in found} == kernels
    for name, ptx in found.items():
        assert not INEXACT.findall(ptx), name
    assert any("div.rn.f32" in ptx for ptx in found.values())
    assert any("sqrt.rn.f32" in ptx for ptx in found.values())
    # Rows of 128 columns move 16 bytes at a time. The first case of triton_compiling has only such rows.
    for name in ("lookup_kernel-0", "update_short_kernel-0"):
        assert "ld.global.v4.b32" in found[name]
        assert "st.global.v4.b32" in found[name]


@interpreted
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("long runs 128 x 9", 16), ("slices of one row", 2)],
)
def test_pieces_of_any_size_give_the_same_bits(chunks: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = dataclasses.replace(
        triton_tiles.tiles_for(16, torch.device("cpu")), chunks=chunks, vectors=16, runs=4, programs=3
    )
    monkeypatch.setattr(triton_tiles, "tiles_for", lambda width, device: tiles)
    found = run(CASES[name], "triton")
    assert all(same_bits(found[part], tensor) for part, tensor in expected(name).items())


@interpreted
@pytest.mark.parametrize("row_count", [1, 40, 70_000, (1 << 32) - 1])
def test_sort_is_stable_and_cuts_runs(row_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers 64-bit keys too, which need no table."""
    monkeypatch.setattr(triton_operator, "TILE", 64)
    generator = torch_stream(1, f"sort {row_count}")
    values = torch.randint(min(row_count, 1 << 32), (500,), generator=generator)
    values[torch.rand(500, generator=generator) < 0.3] = row_count - 1
    values[::7] = -1
    batch = Batch(
        table_of_block=(0,), bags_of_block=(500,), lengths=torch.ones(500, dtype=torch.int64), values=values,
        pooling=Pooling.NONE,
    )  # fmt: skip
    memory = ShardMemory(spec=ShardSpec(name="t", row_count=row_count, dim=1), weight=torch.zeros(1), states={})
    about = describe([memory], torch.device("cpu"))
    runs = sorted_runs(about, batch, vectors_of(batch, [memory], torch.arange(501)), None)
    keys, order = torch.sort(torch.where(values < 0, row_count, values), stable=True)
    assert torch.equal(runs.lookups.to(torch.int64), order)
    distinct, counts = torch.unique_consecutive(keys, return_counts=True)
    assert runs.totals.tolist() == [int((distinct < row_count).sum()), int((counts[distinct < row_count] > 32).sum())]
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    assert torch.equal(runs.starts[: len(starts)].to(torch.int64), starts)
    long = ((counts > 32) & (distinct < row_count)).nonzero().squeeze(1)
    assert torch.equal(runs.long[: len(long)].to(torch.int64), long)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_tiles_fit_a_gpu(width: int) -> None:
    tiles = tiles_of_gpu(width, multiprocessors=132)
    assert tiles.chunks & (tiles.chunks - 1) == 0
    assert tiles.chunks * width <= 8192
    for elements, warps in (
        (tiles.vectors * width, tiles.vector_warps),
        (tiles.runs * width, tiles.run_warps),
        (tiles.chunks * width, tiles.chunk_warps),
    ):
        assert elements <= 32 * 32 * warps


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [1.0, 8.0])
def test_backward_takes_at_most_24_bytes_a_lookup(skew: float) -> None:
    """Counts newly allocated memory, at the dim of the benchmark and with one lookup in each bag."""
    count, spec = 1 << 20, ShardSpec(name="t", row_count=1_000_000, dim=128)
    generator = torch_stream(1, "memory")
    values = (torch.rand(count, generator=generator, dtype=torch.float64) ** skew * spec.row_count).to(torch.int64)
    batch = Batch(
        table_of_block=(0,),
        bags_of_block=(count,),
        lengths=torch.ones(count, dtype=torch.int32, device="cuda"),
        values=values.cuda(),
        pooling=Pooling.NONE,
    )
    optimizer = OptimizerSpec(kind=Optimizer.SGD)
    tables, gradient = [allocate(spec, optimizer, torch.device("cuda"))], torch.ones(count * 128, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    TritonOperator().update(
        tables,
        batch,
        gradient,
        kind=optimizer.kind,
        constants=optimizer.constants(step=1, rate=0.1),
        rounding=Rounding.NEAREST,
        seed=0,
    )
    assert torch.cuda.max_memory_allocated() - before <= 24 * count
