# SPDX-License-Identifier: Apache-2.0
"""Every implementation makes the bits of the reference of tensor-train tables, in every case of their test table."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sennit.runtime.kernels.implementations import IMPLEMENTATIONS, implementation
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, Rounding
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.transport.errors import Unsupported
from tests.runtime.embedding_cases import OPTIMIZERS, BlockShape, Case, assert_equal, run, table


def train(
    rows: tuple[int, int, int],
    columns: tuple[int, int, int],
    ranks: tuple[int, int],
    *,
    row_count: int | None = None,
    name: str = "train",
    precision: Precision = Precision.FP32,
) -> TensorTrainSpec:
    return TensorTrainSpec(
        name=name,
        row_count=rows[0] * rows[1] * rows[2] if row_count is None else row_count,
        dim=columns[0] * columns[1] * columns[2],
        row_factors=rows,
        column_factors=columns,
        ranks=ranks,
        precision=precision,
    )


def tensor_train_cases() -> Iterator[Case]:
    """Trains alone, and beside plain tables in one batch."""
    beside = table("plain", 11, 20, Precision.FP16)
    small = train((3, 4, 5), (2, 2, 4), (3, 5), row_count=53)
    two = (BlockShape(table=0, bags=20), BlockShape(table=1, bags=20))
    for kind, optimizer in OPTIMIZERS.items():
        yield Case(name=f"train {kind}", tables=(small, beside), blocks=two, optimizer=optimizer)
    for precision in (Precision.FP16, Precision.BF16):
        for rounding in Rounding:
            yield Case(
                name=f"train {precision.name.lower()} {rounding.value}",
                tables=(train((3, 4, 5), (2, 2, 4), (3, 5), precision=precision),),
                blocks=(BlockShape(table=0, bags=20),),
                optimizer=OptimizerSpec(kind=Optimizer.SGD, weight_decay=0.03, decay=Decay.DECOUPLED),
                rounding=rounding,
            )
    for pooling, weighted in ((Pooling.SUM, True), (Pooling.MEAN, False), (Pooling.NONE, False)):
        yield Case(
            name=f"train pooling {'weighted' if weighted else pooling.value}",
            tables=(small, beside),
            blocks=(*two, BlockShape(table=0, bags=7), BlockShape(table=0, bags=0)),
            pooling=pooling,
            weighted=weighted,
        )
    yield Case(
        name="train slices",
        tables=(small, beside),
        blocks=tuple(BlockShape(table=n, bags=8, slice=at) for at in (0, 1, 3, 6, 7) for n in range(2)),
    )
    for bounds in (Bounds.WRAP, Bounds.IGNORE):
        yield Case(name=f"train {bounds.value}", tables=(small, beside), blocks=two, bounds=bounds, outside=0.3)
    for rows, columns, ranks in (
        ((1, 1, 1), (1, 1, 1), (1, 1)),
        ((2, 3, 4), (1, 1, 7), (1, 1)),
        ((7, 1, 9), (1, 1, 23), (2, 1)),
        ((3, 5, 70), (2, 2, 16), (8, 8)),  # Runs of more than two chunks; cores of whole vectors.
        ((40, 3, 2), (3, 1, 33), (9, 20)),
    ):
        yield Case(
            name=f"train {rows} x {columns} ranks {ranks}",
            tables=(train(rows, columns, ranks),),
            blocks=(BlockShape(table=0, bags=60),),
            optimizer=OptimizerSpec(kind=Optimizer.SGD),
        )
    yield Case(
        name="train, nothing looked up",
        tables=(beside, small),
        blocks=(BlockShape(table=0, bags=5), BlockShape(table=1, bags=5, most=0)),
    )
    yield Case(
        name="train without rows",
        tables=(train((1, 1, 1), (1, 1, 4), (1, 1), row_count=0),),
        blocks=(BlockShape(table=0, bags=3, most=0),),
    )
    yield Case(
        name="two trains, skewed",
        tables=(small, train((20, 20, 20), (1, 2, 4), (4, 4), name="other")),
        blocks=(BlockShape(table=1, bags=50), BlockShape(table=0, bags=30), BlockShape(table=1, bags=9)),
        optimizer=OptimizerSpec(kind=Optimizer.ADAM, max_gradient=0.5),
        skew=3.0,
    )
    for kind in ("adam", "sgd"):
        yield Case(
            name=f"train, gradients that are not finite, {kind}",
            tables=(small, beside),
            blocks=two,
            optimizer=OPTIMIZERS[kind],
            bad_gradients=True,
        )


CASES = {case.name: case for case in tensor_train_cases()}


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return run(CASES[name], "reference")


# What the interpreter gets in the long tests alone: it takes 0.1 ms per operation, and cores are updated like other
# tables.
SPARED = {f"train {kind}" for kind in OPTIMIZERS} | {
    "two trains, skewed",
    "train (40, 3, 2) x (3, 1, 33) ranks (9, 20)",
    "train bf16 nearest",
    "train fp16 nearest",
    "train ignore",
    "train fp16 stochastic",
    "train pooling mean",
    "train bf16 stochastic",
    "train pooling none",
    "train, gradients that are not finite, sgd",
    "train, gradients that are not finite, adam",
    "train wrap",
    "train pooling weighted",
    "train (2, 3, 4) x (1, 1, 7) ranks (1, 1)",
    "train (7, 1, 9) x (1, 1, 23) ranks (2, 1)",
    "train (3, 5, 70) x (2, 2, 16) ranks (8, 8)",
}
PAIRS = [
    pytest.param(name, case, marks=[pytest.mark.long] if name == "triton" and case in SPARED else [])
    for name in IMPLEMENTATIONS
    for case in CASES
    if name != "reference"
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_bits_equal_the_reference(name: str, case: str) -> None:
    try:
        implementation(name)
    except Unsupported as reason:
        pytest.skip(str(reason))
    if name == "triton" and torch.cuda.is_available():
        pytest.skip("runs on the GPU here, in the test below")
    with np.errstate(all="ignore"):  # The interpreter computes with NumPy, which warns of infinities.
        found = run(CASES[case], name)
    assert_equal(found, expected(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_makes_the_bits_of_the_reference(case: str) -> None:
    assert_equal(run(CASES[case], "triton", "cuda"), expected(case))


def test_cases_do_what_their_names_say() -> None:
    """Checks that each case covers what its name says. A case that covers nothing would always pass."""
    for kind in ("adam", "sgd"):
        found = expected(f"train, gradients that are not finite, {kind}")
        assert "error 1" in found
        assert int(found["counters train"][1]) > 0
    assert int(expected("train ignore")["counters train"][0]) > 0
