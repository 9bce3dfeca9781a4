# SPDX-License-Identifier: Apache-2.0
"""Random tables, batches and optimizers: every implementation makes the bits of the reference.

The cases of the test table (`embedding_cases`) are chosen by hand. hypothesis finds further ones, and shrinks them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.kernels.implementations import implementation
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Bounds, Pooling, Precision, Rounding, ShardSpec
from sennit.transport.errors import Unsupported
from tests.extent import examples
from tests.runtime.embedding_cases import BlockShape, Case, run, same_bits

NATIVE = ("native", "native-avx2", "native-portable")
# Around the widths of vectors (16 lanes), of the kernels for one dim (16, 32, 64, 128), and of random words (64).
DIMS = st.one_of(st.integers(1, 40), st.sampled_from((47, 48, 63, 64, 65, 96, 100, 127, 128, 129, 160, 256)))
# Around the range of one digit of the sort: 4 bits in Triton, 9 in C++.
ROWS = st.one_of(st.integers(1, 40), st.sampled_from((511, 512, 513)))
FIRST_ROWS = st.one_of(st.just(0), st.integers(0, (1 << 48) - (1 << 20)))


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerSpec:
    kind = draw(st.sampled_from(Optimizer))
    own: dict[str, Any] = {}
    if kind is Optimizer.SGD:
        own["momentum"] = draw(st.sampled_from((0.0, 0.9)))
        own["nesterov"] = own["momentum"] > 0 and draw(st.booleans())
    elif kind is Optimizer.FTRL:
        own = {"beta": draw(st.sampled_from((1.0, 1e-3))), "l1": draw(st.sampled_from((0.0, 0.3)))}
        own["l2"] = draw(st.sampled_from((0.0, 2.0)))
    return OptimizerSpec(
        kind=kind,
        **own,
        epsilon=draw(st.sampled_from((1e-8, 0.0, 0.5))),
        beta1=draw(st.sampled_from((0.9, 0.0, 0.5))),
        beta2=draw(st.sampled_from((0.999, 0.0, 0.9))),
        weight_decay=draw(st.sampled_from((0.0, 0.01, 30.0))),
        decay=Decay.L2 if kind is Optimizer.FTRL else draw(st.sampled_from(Decay)),
        max_gradient=draw(st.sampled_from((None, 0.7, 1e-30))),
        max_gradient_norm=draw(st.sampled_from((None, 0.7, 4.0))),
    )


@st.composite
def cases(draw: st.DrawFn, *, most_lookups: int) -> Case:
    tables = tuple(
        ShardSpec(
            name=f"t{number}",
            row_count=draw(ROWS),
            dim=draw(DIMS),
            precision=draw(st.sampled_from(Precision)),
            first_row=draw(FIRST_ROWS),
        )
        for number in range(draw(st.integers(1, 3)))
    )
    blocks = []
    is_sliced, at = draw(st.booleans()), 0
    for _ in range(draw(st.integers(0, 6))):
        bags = draw(st.integers(0, 60))
        most = draw(st.integers(0, most_lookups // (6 * bags) if bags else most_lookups))
        at += draw(st.sampled_from((0, 1, 2, 5, 10_000))) if is_sliced else 0
        blocks.append(BlockShape(table=draw(st.integers(0, len(tables) - 1)), bags=bags, most=most, slice=at))
    pooling = draw(st.sampled_from(Pooling))
    bounds = draw(st.sampled_from(Bounds))
    return Case(
        name=f"random {draw(st.integers(0, 1 << 16))}",
        tables=tables,
        blocks=tuple(blocks),
        optimizer=draw(optimizers()),
        pooling=pooling,
        weighted=pooling is Pooling.SUM and draw(st.booleans()),
        bounds=bounds,
        rounding=draw(st.sampled_from(Rounding)),
        ids=draw(st.sampled_from((torch.int32, torch.int64))),
        lengths=draw(st.sampled_from((torch.int32, torch.int64))),
        # Half of all lookups go to one row, as at the head of a Zipf distribution.
        skew=draw(st.sampled_from((1.0, 4.0, 20.0))),
        outside=0.0 if bounds is Bounds.ERROR else draw(st.sampled_from((0.0, 0.3, 1.0))),
        bad_gradients=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 1e-4, 1e-38, 1e18, 3e38))),
    )


def differing(case: Case, names: tuple[str, ...], *, threads: int) -> list[str]:
    """Returns the results of a case that differ from the reference's, by implementation."""
    wanted, wrong = run(case, "reference"), []
    for name in names:
        found = run(case, name, threads=threads)
        assert found.keys() == wanted.keys()
        wrong += [f"{name}: {part}" for part, tensor in wanted.items() if not same_bits(found[part], tensor)]
    return wrong


def available(names: tuple[str, ...]) -> tuple[str, ...]:
    there = []
    for name in names:
        try:
            implementation(name)
        except Unsupported:
            continue
        there.append(name)
    return tuple(there)


@examples(20)
@given(case=cases(most_lookups=1200))
def test_any_case_makes_the_bits_of_the_reference(case: Case) -> None:
    """Runs natively, with each instruction set of this processor, and with several threads."""
    assert not differing(case, available(NATIVE), threads=1)
    assert not differing(case, ("native",), threads=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the whole test table")
@examples(6)
@given(case=cases(most_lookups=150))
def test_any_case_makes_the_bits_of_the_reference_in_triton(case: Case) -> None:
    if not available(("triton",)):
        pytest.skip("no Triton here")
    with np.errstate(all="ignore"):  # The interpreter computes with NumPy, which warns of infinities.
        assert not differing(case, ("triton",), threads=1)
