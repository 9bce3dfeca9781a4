# SPDX-License-Identifier: Apache-2.0
"""The test table of the embedding operator: every implementation runs these cases, with results equal to the bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, Rounding, ShardSpec
from tests import extent

# Triton's interpreter takes 0.1 ms per operation.
STEPS, BAGS = (3, 40) if extent.is_long else (2, 16)

OPTIMIZERS: dict[str, OptimizerSpec] = {kind.value: OptimizerSpec(kind=kind) for kind in Optimizer} | {
    "momentum": OptimizerSpec(kind=Optimizer.SGD, momentum=0.9),
    "nesterov": OptimizerSpec(kind=Optimizer.SGD, momentum=0.9, nesterov=True),
    # Some weights become 0.
    "ftrl": OptimizerSpec(kind=Optimizer.FTRL, beta=0.25, l1=2.0, l2=0.5),
}


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The bags of one block."""

    table: int
    bags: int
    most: int = 9
    """Each length is drawn from 0 to this."""
    slice: int = 0
    """The slice of the global batch; unless all are in slice 0."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Some steps on some tables. All numbers are functions of the case's name."""

    name: str
    tables: tuple[ShardSpec, ...]
    blocks: tuple[BlockShape, ...]
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    bounds: Bounds = Bounds.ERROR
    rounding: Rounding = Rounding.STOCHASTIC
    ids: torch.dtype = torch.int64
    lengths: torch.dtype = torch.int32
    skew: float = 1.0
    """Ids are row_count · u^skew with uniform u. Above 1, low rows are looked up most."""
    outside: float = 0.0
    """Share of ids that are out of range."""
    bad_gradients: bool = False
    scale: float = 1.0
    """Scale of gradients and initial weights."""


def table(name: str, rows: int, dim: int, precision: Precision = Precision.FP32, first_row: int = 0) -> ShardSpec:
    return ShardSpec(name=name, row_count=rows, dim=dim, precision=precision, first_row=first_row)


def _cases() -> Iterator[Case]:
    two = (BlockShape(table=0, bags=BAGS), BlockShape(table=1, bags=BAGS))
    for precision in Precision:
        tables = (table("wide", 37, 64, precision), table("odd", 11, 20, precision))
        for kind, optimizer in OPTIMIZERS.items():
            name = f"{kind} {precision.name.lower()}"
            yield Case(name=name, tables=tables, blocks=two, optimizer=optimizer)
            if precision is not Precision.FP32:
                yield Case(
                    name=f"{name} nearest",
                    tables=tables,
                    blocks=two,
                    optimizer=optimizer,
                    rounding=Rounding.NEAREST,
                )
    tables = (table("wide", 37, 64), table("odd", 11, 20, Precision.FP16))
    for kind, plain in OPTIMIZERS.items():
        for decay in Decay if kind != "ftrl" else (Decay.L2,):
            optimizer = dataclasses.replace(plain, weight_decay=0.03, decay=decay, max_gradient=0.7)
            yield Case(name=f"{kind} decay {decay.value} clipped", tables=tables, blocks=two, optimizer=optimizer)
        for max_gradient in (None, 0.7):
            options: dict[str, Any] = {"max_gradient": max_gradient, "max_gradient_norm": 4.0}
            optimizer = dataclasses.replace(plain, weight_decay=0.03, **options)
            name = f"{kind} clipped by norm{'' if max_gradient is None else ' after value'}"
            yield Case(name=name, tables=tables, blocks=two, optimizer=optimizer)
    for dim in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48, 92, 128, 129, 200, 257):
        for precision in (Precision.FP32, Precision.BF16):
            yield Case(
                name=f"dim {dim} {precision.name.lower()}",
                tables=(table("only", 23, dim, precision),),
                blocks=(BlockShape(table=0, bags=30),),
                optimizer=OptimizerSpec(kind=Optimizer.LAMB),
            )
    for pooling, weighted in ((Pooling.SUM, True), (Pooling.MEAN, False), (Pooling.MEAN, True), (Pooling.NONE, False)):
        for precision in Precision:
            name = f"weighted {pooling.value}" if weighted else pooling.value
            yield Case(
                name=f"pooling {name} {precision.name.lower()}",
                tables=(table("wide", 37, 64, precision), table("odd", 11, 20, precision)),
                blocks=(*two, BlockShape(table=0, bags=17), BlockShape(table=1, bags=1)),
                pooling=pooling,
                weighted=weighted,
            )
    # As in fbgemm's backward_determinism_test: tables of few rows, with runs of any length.
    for bags, most in ((3, 30), (64, 1), (128, 9), (300, 20)):
        yield Case(
            name=f"long runs {bags} x {most}",
            tables=(table("one", 1, 32), table("three", 3, 8)),
            blocks=(BlockShape(table=0, bags=bags, most=most), BlockShape(table=1, bags=bags, most=most)),
            optimizer=OptimizerSpec(kind=Optimizer.SGD),
        )
    yield Case(
        name="skewed",
        tables=(table("heads", 3000, 16),),
        blocks=(BlockShape(table=0, bags=500, most=20),),
        skew=6.0,
        weighted=True,
    )
    yield Case(
        name="shared tables, variable bags, empty blocks",
        tables=(table("a", 9, 16), table("unused", 5, 8), table("b", 30, 12)),
        blocks=(
            BlockShape(table=2, bags=5),
            BlockShape(table=0, bags=0),
            BlockShape(table=0, bags=33),
            BlockShape(table=2, bags=12, most=0),
            BlockShape(table=0, bags=1, most=50),
            BlockShape(table=2, bags=20),
        ),
        optimizer=OptimizerSpec(kind=Optimizer.ADAM),
    )
    yield Case(name="no blocks", tables=(table("a", 9, 16),), blocks=())
    yield Case(name="no tables", tables=(), blocks=())
    yield Case(
        name="a table without rows",
        tables=(table("none", 0, 4), table("a", 9, 4)),
        blocks=(BlockShape(table=0, bags=3, most=0), BlockShape(table=1, bags=3)),
    )
    for ids in (torch.int32, torch.int64):
        for lengths in (torch.int32, torch.int64):
            yield Case(
                name=f"ids {ids} lengths {lengths}".replace("torch.", ""),
                tables=(table("a", 70_000, 8), table("b", 300, 24)),
                blocks=two,
                ids=ids,
                lengths=lengths,
            )
    for bounds in (Bounds.WRAP, Bounds.IGNORE):
        for pooling, weighted in (
            (Pooling.SUM, False),
            (Pooling.SUM, True),
            (Pooling.MEAN, False),
            (Pooling.MEAN, True),
            (Pooling.NONE, False),
        ):
            yield Case(
                name=f"{bounds.value} {'weighted ' if weighted else ''}{pooling.value}",
                tables=(table("a", 37, 16), table("b", 11, 20, Precision.BF16)),
                blocks=two,
                bounds=bounds,
                outside=0.3,
                pooling=pooling,
                weighted=weighted,
                ids=torch.int32,
            )
    for kind, optimizer in OPTIMIZERS.items():
        yield Case(
            name=f"gradients that are not finite, {kind}",
            tables=(table("a", 37, 20), table("b", 11, 64, Precision.FP16)),
            blocks=two,
            optimizer=optimizer,
            bad_gradients=True,
        )
    for scale in (1e-4, 1e-38, 3e4):  # Subnormal numbers of fp16 and of float32, and overflow of fp16.
        for precision in Precision:
            for rounding in Rounding:
                yield Case(
                    name=f"scale {scale} {precision.name.lower()} {rounding.value}",
                    tables=(table("a", 37, 68, precision),),
                    blocks=(BlockShape(table=0, bags=BAGS),),
                    optimizer=OptimizerSpec(kind=Optimizer.SGD),
                    rounding=rounding,
                    scale=scale,
                )
    yield Case(
        name="rows above 2^32 of a spread table",
        tables=(table("part", 37, 70, Precision.BF16, first_row=(5 << 32) + 4_294_967_280),),
        blocks=(BlockShape(table=0, bags=40),),
    )


def _sliced_cases() -> Iterator[Case]:
    def eight(*, bags: int, most: int = 9) -> tuple[BlockShape, ...]:
        return tuple(BlockShape(table=n, bags=bags, most=most, slice=at) for at in range(8) for n in range(2))

    for pooling, weighted in ((Pooling.SUM, False), (Pooling.SUM, True), (Pooling.MEAN, False), (Pooling.NONE, False)):
        yield Case(
            name=f"slices {'weighted' if weighted else pooling.value}",
            tables=(table("wide", 37, 64, Precision.BF16), table("odd", 200, 20)),
            blocks=eight(bags=12),
            pooling=pooling,
            weighted=weighted,
        )
    for kind, optimizer in OPTIMIZERS.items():
        yield Case(
            name=f"slices {kind}",
            tables=(table("a", 37, 16), table("b", 5, 33, Precision.FP16)),
            blocks=eight(bags=5),
            optimizer=dataclasses.replace(optimizer, max_gradient_norm=4.0),
        )
    # Runs in a slice end before, at and after the end of a chunk. Slices of the second table are far apart.
    for most in (1, 4, 9):
        yield Case(
            name=f"slices of few rows, bags of up to {most}",
            tables=(table("one", 1, 32), table("three", 3, 8)),
            blocks=(
                *(BlockShape(table=0, bags=9, most=most, slice=at) for at in (0, 1, 1, 1, 2, 3, 6, 9)),
                *(BlockShape(table=1, bags=40, most=most, slice=at) for at in (1, 2, 4, 511, 512, 40_000, 65_535)),
            ),
        )
    # More lookups of a row in a slice than two chunks have.
    yield Case(
        name="slices of one row",
        tables=(table("one", 1, 32),),
        blocks=tuple(BlockShape(table=0, bags=40, most=4, slice=at) for at in (0, 1, 3)),
    )
    # Of a width that 16-byte accesses cannot read, of narrow and of wide rows, in any order; with long rows in each.
    yield Case(
        name="three classes in slices",
        tables=(table("wide", 3, 128), table("one", 2, 1), table("narrow", 3, 16, Precision.FP16), table("odd", 90, 7)),
        blocks=tuple(BlockShape(table=n, bags=24, slice=at) for at in range(3) for n in (3, 0, 2, 1)),
    )
    yield Case(
        name="slices skewed",
        tables=(table("heads", 3000, 16),),
        blocks=tuple(BlockShape(table=0, bags=60, most=20, slice=at) for at in range(8)),
        skew=6.0,
        weighted=True,
    )
    yield Case(
        name="slices ignore",
        tables=(table("a", 37, 16), table("b", 11, 20, Precision.BF16)),
        blocks=eight(bags=6),
        bounds=Bounds.IGNORE,
        outside=0.4,
        bad_gradients=True,
    )
    yield Case(
        name="slices, one for each table",
        tables=(table("a", 5, 16), table("b", 3, 20)),
        blocks=(BlockShape(table=1, bags=30, slice=5), BlockShape(table=0, bags=30, slice=3)),
    )


CASES = {case.name: case for case in itertools.chain(_cases(), _sliced_cases())}


def batch_of(case: Case, step: int, generator: torch.Generator) -> Batch:
    """Returns the lookups of one step."""
    lengths, values = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for block in case.blocks:
        rows = case.tables[block.table].row_count
        lengths.append(torch.randint(block.most + 1, (block.bags,), generator=generator))
        count = int(lengths[-1].sum())
        ids = (torch.rand(count, generator=generator, dtype=torch.float64) ** case.skew * rows).to(torch.int64)
        wrong = torch.rand(count, generator=generator) < case.outside
        values.append(
            torch.where(wrong, torch.randint(-3 * rows - 1, 4 * rows + 1, (count,), generator=generator), ids)
        )
    ids, slices = torch.cat(values), tuple(block.slice for block in case.blocks)
    return Batch(
        table_of_block=tuple(block.table for block in case.blocks),
        bags_of_block=tuple(block.bags for block in case.blocks),
        lengths=torch.cat(lengths).to(case.lengths),
        values=ids.to(case.ids),
        weights=torch.randn(len(ids), generator=generator) if case.weighted else None,
        pooling=case.pooling,
        slice_of_block=slices if any(slices) else None,
    )


def on(device: torch.device | str, batch: Batch) -> Batch:
    return dataclasses.replace(
        batch,
        lengths=batch.lengths.to(device),
        values=batch.values.to(device),
        weights=None if batch.weights is None else batch.weights.to(device),
    )


def run(case: Case, implementation: str, device: torch.device | str = "cpu", *, threads: int = 1) -> dict[str, Tensor]:
    """Runs the steps of a case. Returns all results by name, on the CPU."""
    engine = EmbeddingEngine(
        case.tables,
        case.optimizer,
        implementation_name=implementation,
        bounds=case.bounds,
        rounding=case.rounding,
        seed=0x0123_4567_89AB_CDEF,
        device=device,
        threads=threads,
    )
    is_plain = engine.names == tuple(spec.name for spec in case.tables)
    generator = torch_stream(1, case.name)
    for name in engine.names:
        start = torch.randn(engine.weight(name).shape, generator=generator) * case.scale
        engine.weight(name).copy_(start)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = batch_of(case, step, generator)
        result = engine.lookup(on(device, batch))
        found[f"result {step}"] = result.cpu()
        gradient = torch.randn(len(result), generator=generator) * case.scale
        if case.bad_gradients and step == 1 and len(gradient):
            gradient[torch.randint(len(gradient), (3,), generator=generator)] = torch.tensor(
                [float("nan"), float("inf"), float("-inf")]
            )
        gradient = gradient.to(device)
        for sums in engine.sum_rows(on(device, batch), gradient) if is_plain else ():
            found[f"rows {step} {sums.table}"], found[f"sums {step} {sums.table}"] = sums.rows.cpu(), sums.sums.cpu()
        if case.weighted:
            found[f"weight gradient {step}"] = engine.weight_gradient(on(device, batch), gradient).cpu()
        try:
            engine.update(on(device, batch), gradient, rate=0.05 * (step + 1))
        except GradientError as error:
            found[f"error {step}"] = torch.tensor(list(str(error).encode()))
    for table in engine.names:
        found[f"weight {table}"] = engine.weight(table).cpu()
        for name, state in engine.states(table).items():
            found[f"{name} {table}"] = state.cpu()
    for table in {*engine.names, *(spec.name for spec in case.tables)}:
        counters = [engine.ids_outside[table], engine.rows_skipped[table]]
        found[f"counters {table}"] = torch.tensor(counters)
    return found


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    """Returns the results of a case from the reference."""
    return run(CASES[name], "reference")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Returns whether shapes, dtypes and bits are equal. Every NaN is equal to every other."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    integers = torch.int32 if left.dtype is torch.float32 else torch.int16
    return bool(((left.view(integers) == right.view(integers)) | (left.isnan() & right.isnan())).all())


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for part, tensor in wanted.items():
        assert same_bits(found[part], tensor), f"{part}: {found[part]} instead of {tensor}"
