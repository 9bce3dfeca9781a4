# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""Attention of bfloat16: tiles of AMX, and fused multiply-adds in their place, have the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels, jagged_attention
from sennit.runtime.kernels.reference_attention import flushed_fused, narrowed
from tests.runtime.test_attention import CASES, Batch, batch_of, biases_of, same_bits

SETS = [name for name in ("avx512", "avx2", "portable") if name in _kernels.attention_sets()]
NAMES = ["native", *(f"native-{name}" for name in SETS)]
LENGTHS = (1, 15, 16, 17, 0, 31, 32, 33, 49, 64, 65)


def of_all_sets(batch: Batch) -> list[Tensor]:
    """Results that all implementations have in common."""
    expected = batch.run("reference")
    for name in NAMES:
        found = batch.run(name)
        assert same_bits(found, expected), name
    return expected


def half_batch(seed: int, lengths: tuple[int, ...], **more: int) -> Batch:
    return batch_of(seed, lengths, dtype=torch.bfloat16, **more)


@pytest.mark.needs("amx")
def test_this_processor_uses_its_tiles() -> None:
    assert _kernels.attention_sets()[0] == "amx"


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_lengths_around_tiles(activation: str) -> None:
    batch = half_batch(1, LENGTHS, heads=1, dim=33, width=17)
    batch.options = {"activation": activation}
    of_all_sets(batch)


@pytest.mark.parametrize(("dim", "width"), [(1, 1), (15, 64), (64, 16), (65, 31)])
def test_columns_around_tiles(dim: int, width: int) -> None:
    of_all_sets(half_batch(2, (5, 34), heads=2, dim=dim, width=width))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("case", CASES)
def test_all_masks(case: str, biased: bool) -> None:
    batch = half_batch(3, (17, 0, 1, 50, 7, 64), heads=1)
    batch.options = CASES[case] | (biases_of(batch) if biased else {})
    of_all_sets(batch)


def test_candidates_beyond_the_blocks_of_their_history() -> None:
    """Those of the first block attend within it, those of others in one of their own."""
    batch = half_batch(4, (80, 70, 40, 64), heads=1)
    for activation in ("softmax", "silu"):
        batch.options = {"targets": torch.tensor([70, 6, 40, 32]), "activation": activation, "window": 20}
        of_all_sets(batch)


@pytest.mark.parametrize("exponent", [-126, -100, -66, -63, 40, 100])
def test_small_and_large_numbers(exponent: int) -> None:
    """Products near the least normal number, which tiles take for 0, and near infinity."""
    batch = half_batch(5, (40,), heads=1, dim=16, width=16)
    for rows in (batch.query, batch.key, batch.value):
        rows.mul_(2.0**exponent)
    batch.query[::3] *= 2.0**-10
    batch.options = {"activation": "silu", "scale": 2.0 ** -min(exponent, 100)}
    of_all_sets(batch)


@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", ["query", "key", "value"])
def test_numbers_that_are_none_stay_where_they_may_be_seen(rows: str, what: float) -> None:
    batch = half_batch(6, (40, 33), heads=2, dim=16, width=16)
    batch.options = {"targets": torch.tensor([3, 0])}
    clean = batch.run("native")
    getattr(batch, rows)[20, 0, 3] = what
    poisoned = of_all_sets(batch)
    assert poisoned[0][20, 0].isnan().any() or what != torch.nan
    # Neither rows before it, nor the other head, nor the other sequence.
    assert torch.equal(poisoned[0][:20], clean[0][:20])
    for ours, theirs in zip(poisoned, clean, strict=True):
        assert torch.equal(ours[:, 1], theirs[:, 1])
        assert torch.equal(ours[40:], theirs[40:])


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_neighbours_and_threads_change_no_bit(activation: str) -> None:
    batch = half_batch(7, (70, 0, 33, 5, 128), heads=3, dim=32, width=32)
    batch.options = {"activation": activation}
    together = batch.run("native")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same_bits(batch.run("native"), together)
    finally:
        torch.set_num_threads(threads)
    alone = slice(70, 103)
    one = Batch(batch.query[alone], batch.key[alone], batch.value[alone], torch.tensor([0, 33]), batch.options)
    assert torch.equal(one.run("native")[0], together[0][alone])


def test_a_long_sequence() -> None:
    batch = half_batch(8, (10_000,), heads=1, dim=8, width=8)
    batch.options = {"window": 700, "activation": "silu", "divisor": 700.0}
    found = batch.run("native")
    assert all(same_bits(batch.run(f"native-{name}"), found) for name in SETS if name != "portable")
    first = slice(0, 300)
    start = jagged_attention(
        batch.query[first], batch.key[first], batch.value[first], torch.tensor([0, 300]), **batch.options
    )
    assert torch.equal(found[0][first], start)


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_rows_that_begin_anywhere(shift: int) -> None:
    """Of a view, at an address that is a multiple of 2 alone."""
    batch = half_batch(9, (37, 20), heads=2, dim=19, width=19)
    together = torch.zeros(57, 200, dtype=torch.bfloat16)
    parts = []
    for place, rows in enumerate((batch.query, batch.key, batch.value)):
        part = together[:, shift + 45 * place :][:, :38].unflatten(1, (2, 19))
        part.copy_(rows)
        parts.append(part)
    moved = Batch(parts[0], parts[1], parts[2], batch.offsets)
    assert same_bits(moved.run("native"), batch.run("native"))


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_values_are_near_those_of_float32(activation: str) -> None:
    batch = half_batch(10, (60, 90), dim=32, width=32)
    batch.options = {"activation": activation, "divisor": 60.0 if activation == "silu" else 1.0}
    whole = Batch(batch.query.float(), batch.key.float(), batch.value.float(), batch.offsets, batch.options)
    for ours, exact in zip(batch.run("native"), whole.run("native"), strict=True):
        assert float((ours.float() - exact).norm() / exact.norm()) < 2.0**-7


def test_small_results_are_flushed_as_if_exponents_had_no_limit() -> None:
    """What rounds up to the least normal number with 24 bits stays. With the bits that are left there, more would."""
    one, least = torch.tensor(1.0), 2.0**-126
    for below, expected in ((2.0**-152, least), (2.0**-151, least), (2.0**-150, 0.0), (2.0**-149, 0.0)):
        assert float(flushed_fused(one * (-below * 2.0**30), one * 2.0**-30, one * least)) == expected, below


def test_weights_are_rounded_to_nearest_even_and_small_ones_are_none() -> None:
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(2.0**-126), 2.0**-127, -(2.0**-149)])
    assert narrowed(x).tolist() == [1.0, 1 + 2.0**-6, -(2.0**-126), 0.0, 0.0]
