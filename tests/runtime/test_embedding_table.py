# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the embedding operator makes the bits of the reference, in every case of the table."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from sennit.runtime.kernels.implementations import IMPLEMENTATIONS, implementation
from sennit.runtime.kernels.spec import Precision
from sennit.transport.errors import Unsupported
from tests.runtime.embedding_cases import CASES, BlockShape, Case, assert_equal, expected, run, table

# What the interpreter gets of products of values: each value at least once. What is ignored may change a mean. What is
# wrapped is an id like any other.
KEPT = {
    "dim": {"1 fp32", "257 bf16"},
    "ftrl": {"decay l2 clipped"},
    "ids": {"int32 lengths int64"},
    "momentum": set(),
    "pooling": {"weighted mean bf16", "none fp16"},
    "scale": {"0.0001 bf16 nearest", "1e-38 fp32 stochastic", "30000.0 fp16 stochastic"},
    "sgd": {"fp16 nearest", "decay l2 clipped", "clipped by norm after value"},
    "wrap": {"sum"},
}  # fmt: skip

# Cases that the interpreter gets in the long tests alone, because others cover them.
SPARED = {
    "skewed", "long runs 300 x 20", "slices skewed", "slices of few rows, bags of up to 9", "slices sum", "slices mean",
    "slices none", "slices sgd", "slices adagrad", "slices adam", "slices partial_row_wise_adam", "slices weighted",
    "slices lamb", "slices momentum", "slices nesterov", "slices ftrl", "slices of few rows, bags of up to 1",
    "long runs 128 x 9", "ignore mean", "ignore weighted mean",
    "gradients that are not finite, adagrad", "gradients that are not finite, row_wise_adagrad",
    "gradients that are not finite, partial_row_wise_adam", "gradients that are not finite, lamb",
    "gradients that are not finite, momentum", "gradients that are not finite, nesterov",
    "gradients that are not finite, ftrl", "gradients that are not finite, adam", "long runs 64 x 1",
    "ignore weighted sum", "ignore none", "slices row_wise_adagrad",
    "slices of few rows, bags of up to 4", "slices, one for each table", "three classes in slices",
    "slices of one row",  # in pieces: test_embedding_triton.py
}  # fmt: skip


def is_spared_the_interpreter(case: str) -> bool:
    """Returns whether other cases cover this one for Triton, whose interpreter takes 0.1 ms per operation.

    Optimizers and precisions are separate in the kernels, so each is combined with only some of the others. A GPU runs
    all cases.
    """
    kind, _, rest = case.partition(" ")
    if kind in {"adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam", "lamb", "nesterov"}:
        return rest != "decay decoupled clipped"
    if kind in KEPT:
        return rest not in KEPT[kind]
    return case in SPARED


PAIRS = [
    pytest.param(name, case, marks=[pytest.mark.long] if name == "triton" and is_spared_the_interpreter(case) else [])
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


@pytest.mark.parametrize("case", CASES)
def test_several_threads_make_the_bits_of_the_reference(case: str) -> None:
    assert_equal(run(CASES[case], "native", threads=3), expected(case))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_run_that_is_cut_among_threads_makes_the_bits_of_the_reference(threads: int) -> None:
    """Three in four of 30,000 lookups go to one row."""
    giant = Case(
        name="one giant run",
        tables=(table("a", 50, 20, Precision.FP16), table("b", 5000, 64)),
        blocks=(BlockShape(table=0, bags=3000, most=20), BlockShape(table=1, bags=3000, most=20)),
        skew=30.0,
    )
    assert_equal(run(giant, "native", threads=threads), _giant_expected(giant))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_run_of_many_slices_that_is_cut_among_threads_makes_the_bits_of_the_reference(threads: int) -> None:
    """One slice has far more lookups than a piece, some have a piece or less, and some lie far away."""
    blocks = [BlockShape(table=n, bags=1500, most=20, slice=at) for at in (0, 3) for n in range(2)]
    blocks += [BlockShape(table=n, bags=90 * n, most=20, slice=4 + at) for at in range(9) for n in range(2)]
    blocks += [BlockShape(table=n, bags=700, most=20, slice=60_000) for n in range(2)]
    giant = Case(
        name="one giant run of slices",
        tables=(table("a", 50, 20, Precision.FP16), table("b", 5000, 64)),
        blocks=tuple(blocks),
        skew=30.0,
    )
    assert_equal(run(giant, "native", threads=threads), _giant_expected(giant))


@functools.cache
def _giant_expected(case: Case) -> dict[str, Tensor]:
    return run(case, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_makes_the_bits_of_the_reference(case: str) -> None:
    assert_equal(run(CASES[case], "triton", "cuda"), expected(case))


def test_what_the_interpreter_gets_are_cases() -> None:
    """A name that no case has would spare the interpreter one more."""
    assert {f"{kind} {rest}" for kind, names in KEPT.items() for rest in names} | SPARED <= CASES.keys()


def test_cases_do_what_their_names_say() -> None:
    """Checks that each case covers what its name says. A case that covers nothing would always pass."""
    assert any("error 1" in expected(name) for name in CASES if name.startswith("gradients"))
    ignored = expected("ignore sum")
    assert int(ignored["counters a"][0]) > 0
    assert bool(expected("scale 30000.0 fp16 nearest")["weight a"].isinf().any())
    small = expected("scale 0.0001 fp16 stochastic")["weight a"]
    assert bool(((small.abs() < 2**-14) & (small != 0)).any())
    assert not torch.equal(small, expected("scale 0.0001 fp16 nearest")["weight a"])
