# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the embedding operator makes the bits of the reference, in every case of the table."""

from __future__ import annotations

import pytest
import torch

from sennit.runtime.kernels.engine import IMPLEMENTATIONS, implementation
from sennit.transport.errors import Unsupported
from tests.runtime.embedding_cases import CASES, expected, run, same_bits


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "reference"])
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    try:
        implementation(chosen)
    except Unsupported as reason:
        pytest.skip(str(reason))
    return chosen


@pytest.mark.parametrize("case", CASES)
def test_bits_equal_the_reference(case: str, name: str) -> None:
    found, wanted = run(CASES[case], name), expected(case)
    assert found.keys() == wanted.keys()
    for part, tensor in wanted.items():
        assert same_bits(found[part], tensor), f"{part}: {found[part]} instead of {tensor}"


def test_cases_do_what_their_names_say() -> None:
    """A case that skips what it is for would agree with anything."""
    assert any("error 1" in expected(name) for name in CASES if name.startswith("gradients"))
    ignored = expected("ignore sum")
    assert int(ignored["counters a"][0]) > 0
    assert bool(expected("scale 30000.0 fp16 nearest")["weight a"].isinf().any())
    small = expected("scale 0.0001 fp16 stochastic")["weight a"]
    assert bool(((small.abs() < 2**-14) & (small != 0)).any())
    assert not torch.equal(small, expected("scale 0.0001 fp16 nearest")["weight a"])
