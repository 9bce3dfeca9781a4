# SPDX-License-Identifier: Apache-2.0
"""Every implementation makes the bits of the reference of tensor-train tables, in every case of their test table."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from sennit.runtime.kernels.implementations import IMPLEMENTATIONS, implementation
from sennit.runtime.kernels.optimizers import Optimizer
from sennit.transport.errors import Unsupported
from tests.runtime.embedding_cases import run, same_bits
from tests.runtime.tensor_train_cases import tensor_train_cases

CASES = {case.name: case for case in tensor_train_cases()}


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return run(CASES[name], "reference")


# What the interpreter gets in the long tests alone: it takes 0.1 ms per operation, and cores are updated like other
# tables.
SPARED = {f"train {kind.value}" for kind in Optimizer} | {
    "two trains, skewed",
    "train (40, 3, 2) x (3, 1, 33) ranks (9, 20)",
    "train fp16 nearest",
    "train fp16 stochastic",
    "train pooling mean",
    "train bf16 stochastic",
    "train pooling none",
    "train, gradients that are not finite, sgd",
    "train, gradients that are not finite, adam",
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


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for part, tensor in wanted.items():
        assert same_bits(found[part], tensor), f"{part}: {found[part]} instead of {tensor}"


def test_cases_do_what_their_names_say() -> None:
    """Checks that each case covers what its name says. A case that covers nothing would always pass."""
    for kind in ("adam", "sgd"):
        found = expected(f"train, gradients that are not finite, {kind}")
        assert "error 1" in found
        assert int(found["counters train"][1]) > 0
    assert int(expected("train ignore")["counters train"][0]) > 0
