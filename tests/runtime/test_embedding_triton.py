# SPDX-License-Identifier: Apache-2.0
"""Triton kernels beyond the test table: what a GPU would run and how often; the choice of tiles changes no bit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.runtime.data.seeds import torch_stream

pytest.importorskip("triton")

from sennit.runtime.kernels import triton_attention, triton_operator, triton_products, triton_tiles
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import ShardMemory, allocate
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Rounding, ShardSpec
from sennit.runtime.kernels.triton_operator import TritonOperator, sorted_runs
from sennit.runtime.kernels.triton_tables import describe, vectors_of
from sennit.runtime.kernels.triton_tiles import tiles_of_gpu
from tests.extent import briefly
from tests.forked_commands import forked
from tests.runtime.embedding_cases import CASES, expected, run, same_bits

ROW_COUNTS = (1, 40, 70_000, (1 << 31) - 1, (1 << 32) - 1)
# Of tensor trains, and of attention.
NOT_HOT = {"fold_products_kernel"} | {name for name in vars(triton_attention) if name.endswith("_kernel")}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("only", briefly(["", "hot"], ["hot"]), ids=["all", "hot"])
def test_kernels_compile_for_an_h100_exactly_and_keep_to_registers(tmp_path: Path, only: str) -> None:
    """The compiler may refuse what the interpreter accepts. Its code must round as the reference does.

    Triton's cache knows a kernel by its source, so only kernels that changed are compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "sennit.runtime.kernels.triton_report",
            "--only",
            only,
            "--json",
            tmp_path / "report.json",
        ],
        check=True,
        timeout=460,
        env=environment,
    )
    found = json.loads((tmp_path / "report.json").read_text())["kernels"]
    launched = vars(triton_operator) | vars(triton_products) | vars(triton_attention)
    kernels = {name for name in launched if name.endswith("_kernel")}
    assert kernels - {one["kernel"] for one in found} == (set() if not only else NOT_HOT)
    assert {one["kernel"]: one["inexact"] for one in found if one["inexact"]} == {}
    hot = [one for one in found if one["case"].startswith("hot: ")]
    # In attention of float32 the compiler rather spills a little than have fewer warps at a time.
    assert [one for one in found if one["spill_bytes"] > (256 if one["case"] == "attention" else 0)] == []
    # The first case has only rows of 128 columns. They move 16 bytes at a time.
    first = [one for one in hot if one["case"] == "hot: sequences"]
    for kernel in ("lookup_kernel", "update_kernel", "sum_long_kernel"):
        assert all(one["loads"].get("16") for one in first if one["kernel"] == kernel), kernel
    for kernel in ("lookup_kernel", "update_kernel"):
        assert all(set(one["stores"]) == {"16"} for one in first if one["kernel"] == kernel), kernel


def test_the_report_refuses_kernels_of_the_interpreter() -> None:
    done = forked("sennit.runtime.kernels.triton_report", TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "TRITON_INTERPRET=1: kernels were imported for the interpreter; allowed: unset"
    )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    """Lists calls that wait for a GPU if their tensors are there: they need values, or sizes that depend on values."""

    OF_TENSORS = frozenset({"tolist", "item", "cpu", "cuda", "numpy", "copy_", "equal", "tensor", "as_tensor"})
    OF_SIZES = frozenset({"nonzero", "unique", "masked_select"})
    OF_PYTHON = frozenset({"__bool__", "__int__", "__float__", "__index__", "__array__"})

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        of_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        to_device = name == "to" and any(isinstance(each, (str, torch.device)) for each in (*args, *kwargs.values()))
        if name in self.OF_TENSORS | self.OF_SIZES | self.OF_PYTHON or of_size or to_device:
            self.calls.append(name)
        return function(*args, **kwargs)


@interpreted
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.NONE])
@pytest.mark.parametrize("dims", [[64] * 26, [1] * 2 + [16] * 8 + [128] * 16], ids=["one dim", "three classes"])
def test_a_sliced_update_takes_few_launches_and_operations_and_waits_once(
    dims: list[int], pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not run. Counted when the tables are known. What depends on a batch's shape is kept, too: a new shape
    takes two operations more, and on a GPU a third one, which copies it there."""
    launches: Counter[str] = Counter()

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **keywords: launches.update([self.name])

    monkeypatch.setattr(torch, "empty", torch.zeros)  # Nothing writes what the kernels would.
    for name in [name for name in vars(triton_operator) if name.endswith("_kernel")]:
        monkeypatch.setattr(triton_operator, name, Counted(name))
    optimizer = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
    tables = [
        allocate(ShardSpec(name=str(number), row_count=1000, dim=dim), optimizer, torch.device("cpu"))
        for number, dim in enumerate(dims)
    ]
    triton, blocks, length = TritonOperator(), 8 * len(dims), 5
    counts = []
    first = 3 if pooling is Pooling.SUM else 5  # The parameter before has other shapes.
    for bags in (first, first + 1, first + 1):
        batch = Batch(
            table_of_block=tuple(range(len(dims))) * 8,
            bags_of_block=(bags,) * blocks,
            lengths=torch.full((blocks * bags,), length, dtype=torch.int32),
            values=torch.zeros(blocks * bags * length, dtype=torch.int64),
            pooling=pooling,
            slice_of_block=tuple(block // len(dims) for block in range(blocks)),
        )
        gradient = torch.zeros(batch.output_size(tuple(table.spec for table in tables)))
        launches.clear()
        with _Operations() as operations, _Waits() as waits:
            triton.update(
                tables,
                batch,
                gradient,
                kind=optimizer.kind,
                constants=optimizer.constants(step=1, rate=0.1),
                rounding=Rounding.NEAREST,
                seed=0,
            )
        assert 0 < launches.total() <= 12, launches
        assert waits.calls == ["tolist"]
        counts.append(operations.counts)
    assert sum(count for function, count in counts[1].items() if not function.is_view) <= 18, counts[1]
    assert counts[2].total() < counts[1].total()


@interpreted
@pytest.mark.parametrize(
    "name",
    briefly(["long runs 128 x 9", "slices of one row", "three classes in slices"], ["slices of one row"]),
)
def test_pieces_of_any_size_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = dataclasses.replace(
        triton_tiles.tiles_for(16, torch.device("cpu")), chunks=2, pieces=2, vectors=16, rows=4, programs=3
    )
    monkeypatch.setattr(triton_tiles, "tiles_for", lambda width, device: tiles)
    found = run(CASES[name], "triton")
    assert all(same_bits(found[part], tensor) for part, tensor in expected(name).items())


@interpreted
@pytest.mark.parametrize(
    ("row_count", "slices"),
    briefly(product(ROW_COUNTS, (1, 3)), [(1, 1), (40, 3), (70_000, 1), ((1 << 31) - 1, 3), ((1 << 32) - 1, 1)]),
)
def test_sort_is_stable_and_cuts_rows(row_count: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers 64-bit keys too, which need no table."""
    monkeypatch.setattr(triton_operator, "TILE", 64)
    generator = torch_stream(1, f"sort {row_count}")
    values = torch.randint(min(row_count, 1 << 32), (510,), generator=generator)
    values[torch.rand(510, generator=generator) < 0.3] = row_count - 1
    values[::7] = -1
    bags = 510 // slices
    batch = Batch(
        table_of_block=(0,) * slices,
        bags_of_block=(bags,) * slices,
        lengths=torch.ones(510, dtype=torch.int64),
        values=values,
        pooling=Pooling.NONE,
        slice_of_block=tuple(range(slices)) if slices > 1 else None,
    )
    memory = ShardMemory(spec=ShardSpec(name="t", row_count=row_count, dim=1), weight=torch.zeros(1), states={})
    about = describe([memory], torch.device("cpu"))
    runs = sorted_runs(about, batch, vectors_of(batch, [memory]), [64])

    bits = (slices - 1).bit_length()
    is_ignored = values < 0
    rows = torch.where(is_ignored, row_count, values)
    keys, order = torch.sort((rows << bits) | torch.where(is_ignored, 0, torch.arange(510) // bags), stable=True)
    assert runs.slice_bits == bits
    # A vector has one column, so a lookup's begins at its number.
    assert torch.equal(runs.starts, order)
    assert torch.equal(runs.keys.to(torch.int64), keys)
    distinct, counts = torch.unique_consecutive(keys >> bits, return_counts=True)
    starts = _before_each(counts)
    assert torch.equal(runs.rows[0, : len(starts)], starts)
    long_rows = distinct[(counts > 32) & (distinct < row_count)]
    assert len(long_rows) == 1
    of_segment, lengths = torch.unique_consecutive(keys, return_counts=True)
    is_long = torch.isin(of_segment >> bits, long_rows)
    begins, pieces = _before_each(lengths)[:-1][is_long], _before_each((lengths[is_long] + 63) // 64)
    assert torch.equal(runs.segments[0, : len(begins)], begins)
    assert torch.equal(runs.segments[1, : len(begins)], begins + lengths[is_long].to(torch.int32))
    assert torch.equal(runs.segments[2, : len(pieces)], pieces)
    segments_of_row = torch.stack([((of_segment >> bits) == row)[is_long].sum() for row in distinct])
    assert torch.equal(runs.rows[1, : len(starts)], _before_each(segments_of_row))
    assert runs.borders.tolist() == [[0, 0, 0], [int((distinct < row_count).sum()), len(begins), int(pieces[-1])]]
    assert int(pieces[-1]) <= runs.piece_room


def _before_each(counts: Tensor) -> Tensor:
    """Int32 [counts + 1]: sums of those before each, and of all."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_tiles_fit_a_gpu(width: int) -> None:
    tiles = tiles_of_gpu(width, multiprocessors=132)
    assert tiles.chunks & (tiles.chunks - 1) == 0
    assert tiles.pieces & (tiles.pieces - 1) == 0
    assert tiles.chunks * width <= 8192
    for elements, warps in (
        (tiles.vectors * width, tiles.vector_warps),
        (tiles.sequence_vectors * width, tiles.vector_warps),
        (tiles.rows * width, tiles.row_warps),
        (tiles.chunks * width, tiles.chunk_warps),
        (tiles.pieces * width, tiles.piece_warps),
    ):
        assert elements <= 32 * 32 * warps


@pytest.mark.gpu
@pytest.mark.parametrize("skew", [1.0, 8.0])
def test_backward_takes_at_most_48_bytes_a_lookup(skew: float) -> None:
    """Counts newly allocated memory, at the dim of the benchmark and with one lookup in each bag: 45 bytes, and what
    torch's allocator rounds up."""
    count, spec = 1 << 22, ShardSpec(name="t", row_count=1_000_000, dim=128)
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
    assert torch.cuda.max_memory_allocated() - before <= 48 * count
