# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: the Triton kernels must give the bits of the native ones, smallest shapes first.

Each case runs both operators on equal tables and batches: a lookup, or two updates. A case that fails stops no other.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.implementations import Implementation, implementation
from sennit.runtime.kernels.layout import ShardMemory, allocate
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding, ShardSpec
from sennit.testbed.bench.gpu.gpu import Settings

TABLES: Final = 3
EQUAL: Final = "equal bits"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of each table and of its batch."""

    rows: int
    dim: int
    bags: int
    lookups_a_bag: int


SHAPES: Final = (
    Shape(rows=5, dim=4, bags=3, lookups_a_bag=2),
    Shape(rows=60, dim=17, bags=24, lookups_a_bag=3),
    Shape(rows=2_000, dim=64, bags=512, lookups_a_bag=20),
    Shape(rows=50_000, dim=128, bags=4_096, lookups_a_bag=20),
)
IN_THE_INTERPRETER: Final = SHAPES[1:2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lookup, or two updates if there is an optimizer."""

    shape: Shape
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    optimizer: Optimizer | None = None
    precision: Precision = Precision.FP32
    sliced: bool = False

    @property
    def name(self) -> str:
        shape = self.shape
        what = "lookup" if self.optimizer is None else self.optimizer.value
        extra = [word for word, there in (("weighted", self.weighted), ("sliced", self.sliced)) if there]
        return " ".join(
            (f"{shape.rows}x{shape.dim}", f"{shape.bags}x{shape.lookups_a_bag}", what, self.pooling.value)
        ) + "".join(f" {word}" for word in (self.precision.name.lower(), *extra))


def cases(shape: Shape) -> Iterator[Case]:
    """All kernels, all optimizers and all precisions."""
    for pooling in Pooling:
        yield Case(shape=shape, pooling=pooling)
    for precision in (Precision.FP16, Precision.BF16):
        yield Case(shape=shape, precision=precision)
    yield Case(shape=shape, weighted=True)
    for optimizer in Optimizer:
        yield Case(shape=shape, optimizer=optimizer)
    yield Case(shape=shape, optimizer=Optimizer.SGD, pooling=Pooling.NONE)
    yield Case(shape=shape, optimizer=Optimizer.ADAM, pooling=Pooling.MEAN, precision=Precision.FP16)
    yield Case(shape=shape, optimizer=Optimizer.ROW_WISE_ADAGRAD, sliced=True)
    yield Case(shape=shape, optimizer=Optimizer.ROW_WISE_ADAGRAD, weighted=True, precision=Precision.BF16)


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Raises RuntimeError with the first failure in full, after all cases, if one differs or fails."""
    device = torch.device("cpu" if settings.interpreter else "cuda")
    native, triton = implementation("native"), implementation("triton")
    results: list[dict[str, Any]] = []
    first = ""
    for shape in IN_THE_INTERPRETER if settings.interpreter else SHAPES:
        for case in cases(shape):
            began_s = time.monotonic()
            try:
                different = differences(case, native, triton, device, settings.seed)
                outcome = f"other bits: {', '.join(different)}" if different else EQUAL
                first = first or (f"{case.name}: {outcome}" if different else "")
            except Exception as error:  # A kernel that does not compile says nothing of the others.
                outcome = f"{type(error).__name__}: {error}"
                first = first or f"{case.name}: {traceback.format_exc()}"
            took_s = round(time.monotonic() - began_s, 3)
            results.append({"name": case.name, "outcome": outcome, "took_s": took_s})
            save({"results": results, "first_failure": first})
    wrong = [one["name"] for one in results if one["outcome"] != EQUAL]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(results)} cases are wrong. The first: {first}")
    return {"results": results}


def differences(
    case: Case, native: Implementation, triton: Implementation, device: torch.device, seed: int
) -> list[str]:
    """Names of the tensors that differ, with the number of elements."""
    found = [outcome(case, native, torch.device("cpu"), seed), outcome(case, triton, device, seed)]
    different = []
    for name, expected in found[0].items():
        given = found[1][name].cpu()
        count = int((_bits(expected) != _bits(given)).sum()) if expected.shape == given.shape else expected.numel()
        if count:
            different.append(f"{name} in {count} of {expected.numel()} elements")
    return different


def outcome(case: Case, operator: Implementation, device: torch.device, seed: int) -> dict[str, Tensor]:
    """All that an operator returns or changes, by name. The same on each device, if its kernels are right."""
    generator = torch_stream(seed, f"bench gpu {case.name}")
    spec = OptimizerSpec(kind=case.optimizer or Optimizer.SGD)
    tables = [_table(case, number, spec, device, generator) for number in range(TABLES)]
    batch = _batch(case, device, generator)
    if case.optimizer is None:
        found = {"result": operator.lookup(tables, batch)}
        if case.weighted:
            gradient = torch.randn(len(found["result"]), generator=generator).to(device)
            found["gradient of weights"] = operator.weight_gradient(tables, batch, gradient)
        return found
    size = batch.output_size(tuple(table.spec for table in tables))
    for step in (1, 2):
        gradient = torch.randn(size, generator=generator).to(device)
        operator.update(
            tables,
            batch,
            gradient,
            kind=spec.kind,
            constants=spec.constants(step=step, rate=0.1),
            rounding=Rounding.NEAREST if case.precision is Precision.FP32 else Rounding.STOCHASTIC,
            seed=seed + step,
        )
    found = {f"rows of table {number}": table.weight for number, table in enumerate(tables)}
    for number, table in enumerate(tables):
        found |= {f"{name} of table {number}": state for name, state in table.states.items()}
    return found


def _table(
    case: Case, number: int, optimizer: OptimizerSpec, device: torch.device, generator: torch.Generator
) -> ShardMemory:
    spec = ShardSpec(name=str(number), row_count=case.shape.rows, dim=case.shape.dim, precision=case.precision)
    table = allocate(spec, optimizer, device)
    table.weight.copy_(torch.randn(spec.row_count, spec.dim, generator=generator).to(case.precision.dtype))
    return table


def _batch(case: Case, device: torch.device, generator: torch.Generator) -> Batch:
    """A block for each table and slice; half of the ids are drawn from few rows, so that sums are long."""
    shape, slices = case.shape, 2 if case.sliced else 1
    blocks = [(table, part) for table in range(TABLES) for part in range(slices)]
    bags = shape.bags * len(blocks)
    count = bags * shape.lookups_a_bag
    values = torch.randint(shape.rows, (count,), generator=generator)
    values[::2] = torch.randint(min(3, shape.rows), (len(values[::2]),), generator=generator)
    weights = torch.randn(count, generator=generator).to(device) if case.weighted else None
    return Batch(
        table_of_block=tuple(table for table, _ in blocks),
        bags_of_block=(shape.bags,) * len(blocks),
        slice_of_block=tuple(part for _, part in blocks) if case.sliced else None,
        lengths=torch.full((bags,), shape.lookups_a_bag, dtype=torch.int64, device=device),
        values=values.to(device),
        weights=weights,
        pooling=case.pooling,
    )


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals NaN and -0 is not 0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
