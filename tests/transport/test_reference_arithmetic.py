# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of docs/reference/plans.md in NumPy, against other implementations of the same definitions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.arithmetic import fold, narrow, run_program, widen
from sennit.transport.plans.elements import COMPLEXES, FLOATS, INTEGERS, Dtype, ReduceOp, accumulator, reduce_ops
from sennit.transport.plans.tree import Span, combinations, cover

NUMPY: dict[Dtype, Any] = {
    Dtype.U8: np.uint8, Dtype.I8: np.int8, Dtype.I16: np.int16, Dtype.I32: np.int32, Dtype.I64: np.int64,
    Dtype.U16: np.uint16, Dtype.U32: np.uint32, Dtype.U64: np.uint64,
    Dtype.F32: np.float32, Dtype.F64: np.float64, Dtype.F16: np.float16,
    Dtype.C64: np.complex64, Dtype.C128: np.complex128,
}  # fmt: skip


def folded(arrays: list[Any], dtype: Dtype, op: ReduceOp, **options: float) -> Any:
    data = fold([np.array(a).view(np.uint8) for a in arrays], dtype, op, **options)
    return data.view(np.array(arrays[0]).dtype)


@pytest.mark.parametrize("dtype", sorted(INTEGERS))
def test_integers_wrap_and_divide_towards_zero(dtype: Dtype) -> None:
    kind = np.dtype(NUMPY[dtype])
    bits, signed = 8 * kind.itemsize, kind.kind == "i"
    rng = np.random.default_rng(dtype)
    info = np.iinfo(kind)
    arrays = [rng.integers(info.min, info.max, 500, kind, endpoint=True) for _ in range(3)]

    def wrap(value: int) -> int:
        value &= (1 << bits) - 1
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    def divide(value: int) -> int:
        return -(-value // 3) if value < 0 else value // 3

    rows = list(zip(*(a.tolist() for a in arrays), strict=True))
    expected = {
        ReduceOp.SUM: [wrap(sum(row)) for row in rows],
        ReduceOp.AVG: [divide(wrap(sum(row))) for row in rows],
        ReduceOp.PRODUCT: [wrap(math.prod(row)) for row in rows],
        ReduceOp.MIN: [min(row) for row in rows],
        ReduceOp.MAX: [max(row) for row in rows],
        ReduceOp.BAND: [a & b & c for a, b, c in rows],
        ReduceOp.BOR: [a | b | c for a, b, c in rows],
        ReduceOp.BXOR: [a ^ b ^ c for a, b, c in rows],
        ReduceOp.PREMUL_SUM: [wrap(-3 * sum(row)) for row in rows],
    }
    assert expected.keys() == reduce_ops(dtype)
    for op, values in expected.items():
        assert folded(arrays, dtype, op, scalar=-3.7).tolist() == values, op.name


@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.F64])
def test_floats_are_folded_over_a_balanced_tree(dtype: Dtype) -> None:
    rng = np.random.default_rng(7)
    given = [rng.standard_normal(1_000).astype(NUMPY[dtype]) for _ in range(6)]
    a, b, c, d, e, f = given
    total = ((a + b) + (c + d)) + (e + f)
    np.testing.assert_array_equal(folded(given, dtype, ReduceOp.SUM), total)
    np.testing.assert_array_equal(folded(given, dtype, ReduceOp.AVG), total / NUMPY[dtype](6))
    np.testing.assert_array_equal(folded(given[:5], dtype, ReduceOp.SUM), ((a + b) + (c + d)) + e)
    np.testing.assert_array_equal(folded(given[:3], dtype, ReduceOp.PRODUCT), (a * b) * c)
    tenth = NUMPY[dtype](0.1)
    premultiplied = (a * tenth + b * tenth) + (c * tenth + d * tenth)
    np.testing.assert_array_equal(folded(given[:4], dtype, ReduceOp.PREMUL_SUM, scalar=0.1), premultiplied)
    assert not np.array_equal(total, ((((a + b) + c) + d) + e) + f)


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))])
def test_partial_sums_put_together_give_the_same_bits(dtype: Dtype, op: ReduceOp) -> None:
    """However the leaves are spread, and whoever folds the nodes: nothing is rounded, scaled or divided in between."""
    rng = np.random.default_rng(dtype)
    for leaves in range(1, 18):
        data = [finite_bytes(rng, dtype, 40) for _ in range(leaves)]
        expected = fold(data, dtype, op, scalar=0.75)
        cuts = sorted({0, leaves, *rng.integers(0, leaves + 1, 3).tolist()})
        nodes = [node for low, high in pairwise(cuts) for node in cover(Span(low, high), leaves)]
        sums = [
            run_program(
                data[node.low : node.high],
                combinations(tuple(Span(leaf, leaf + 1) for leaf in range(*node)), leaves),
                dtype, op, partial=[False] * (node.high - node.low), divisor=leaves, scalar=0.75, gives_partial=True,
            )
            for node in nodes
        ]  # fmt: skip
        assert {len(data) for data in sums} == {40 // dtype.item_bytes * accumulator(dtype).item_bytes}
        total = run_program(
            sums, combinations(tuple(nodes), leaves), dtype, op, partial=[True] * len(sums), divisor=leaves, scalar=0.75
        )
        np.testing.assert_array_equal(total, expected)


def finite_bytes(rng: np.random.Generator, dtype: Dtype, size_bytes: int) -> Any:
    """Numbers that rarely overflow."""
    size_bytes -= size_bytes % dtype.item_bytes
    if dtype in FLOATS | COMPLEXES:
        part = {Dtype.C32: Dtype.F16, Dtype.C64: Dtype.F32, Dtype.C128: Dtype.F64}.get(dtype, dtype)
        wide = np.float64 if part is Dtype.F64 else np.float32
        return narrow(rng.standard_normal(size_bytes // part.item_bytes).astype(wide), part)
    return rng.integers(0, 256, size_bytes, np.uint8)


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.F32, Dtype.F64])
def test_min_and_max_keep_nan_and_the_last_of_equals(dtype: Dtype) -> None:
    nan, kind = np.nan, NUMPY[dtype]
    a = np.array([nan, 1, -0.0, 0.0, 2, -np.inf], kind)
    b = np.array([1, nan, 0.0, -0.0, 1, np.inf], kind)
    low, high = folded([a, b], dtype, ReduceOp.MIN), folded([a, b], dtype, ReduceOp.MAX)
    np.testing.assert_array_equal(low, np.array([nan, nan, 0.0, -0.0, 1, -np.inf], kind))
    np.testing.assert_array_equal(high, np.array([nan, nan, 0.0, -0.0, 2, np.inf], kind))
    assert np.signbit(low[2:4]).tolist() == np.signbit(high[2:4]).tolist() == [False, True]


def nearest_bfloat16(value: float) -> int:
    """Returns the bits of the bfloat16 nearest to a finite fp32 value, ties to even, by exact fractions."""
    bits = int(np.float32(value).view(np.uint32))
    low, high = bits >> 16, (bits >> 16) + 1

    def exact(half: int) -> Fraction:
        number = float(np.array([(half & 0xFFFF) << 16], np.uint32).view(np.float32)[0])
        # The step above the largest number counts as the next power of two, as IEEE 754 rounds.
        return Fraction(number) if math.isfinite(number) else Fraction(2) ** 128 * (-1 if bits >> 31 else 1)

    down, up = abs(Fraction(value) - exact(low)), abs(exact(high) - Fraction(value))
    return low if down < up or (down == up and low % 2 == 0) else high


def test_bfloat16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 5_000, np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, [0x7F7FFFFF, 0xFF7FFFFF, 0, 0x80000000, 1]]).astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    rounded = narrow(values, Dtype.BF16).view(np.uint16)
    assert rounded.tolist() == [nearest_bfloat16(float(value)) for value in values]
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    assert narrow(special, Dtype.BF16).view(np.uint16).tolist() == [0x7FC0, 0x7F80, 0xFF80]


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.BF16])
def test_half_floats_are_folded_in_fp32_and_rounded_once(dtype: Dtype) -> None:
    rng = np.random.default_rng(4)
    data = [narrow(rng.standard_normal(2_000).astype(np.float32), dtype) for _ in range(4)]
    a, b, c, d = (widen(x, dtype) for x in data)
    assert a.dtype == np.float32
    total = (a + b) + (c + d)
    np.testing.assert_array_equal(fold(data, dtype, ReduceOp.SUM), narrow(total, dtype))
    np.testing.assert_array_equal(fold(data, dtype, ReduceOp.AVG), narrow(total / np.float32(4), dtype))
    step_by_step = fold([fold(pair, dtype, ReduceOp.SUM) for pair in (data[:2], data[2:])], dtype, ReduceOp.SUM)
    assert not np.array_equal(step_by_step, narrow(total, dtype))


@pytest.mark.parametrize("dtype", [Dtype.C64, Dtype.C128])
def test_complex_numbers_multiply_by_parts(dtype: Dtype) -> None:
    rng = np.random.default_rng(5)
    real: Any = np.float32 if dtype is Dtype.C64 else np.float64
    x, y = (rng.standard_normal((300, 2)).astype(real) for _ in range(2))
    result = fold([x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8)], dtype, ReduceOp.PRODUCT)
    parts = result.view(real).reshape(-1, 2)
    np.testing.assert_array_equal(parts[:, 0], x[:, 0] * y[:, 0] - x[:, 1] * y[:, 1])
    np.testing.assert_array_equal(parts[:, 1], x[:, 0] * y[:, 1] + x[:, 1] * y[:, 0])
    numbers = [a.reshape(-1).view(NUMPY[dtype]) for a in (x, y)]
    np.testing.assert_array_equal(folded(numbers, dtype, ReduceOp.SUM), numbers[0] + numbers[1])


def test_bool_is_logical_and_any_byte_but_zero_is_true() -> None:
    a, b = np.array([0, 0, 2, 255], np.uint8), np.array([0, 4, 0, 1], np.uint8)
    either, both, one = [0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]
    for op, expected in {
        ReduceOp.SUM: either, ReduceOp.MAX: either, ReduceOp.BOR: either,
        ReduceOp.PRODUCT: both, ReduceOp.MIN: both, ReduceOp.BAND: both, ReduceOp.BXOR: one,
    }.items():  # fmt: skip
        assert folded([a, b], Dtype.BOOL, op).tolist() == expected, op.name


def test_what_has_no_meaning_is_refused() -> None:
    for dtype in Dtype:
        for op in set(ReduceOp) - reduce_ops(dtype):
            with pytest.raises(ArgumentError, match=f"{op.name} is not defined for {dtype.name}; allowed: "):
                fold([np.zeros(16, np.uint8)], dtype, op)
    assert INTEGERS | FLOATS | COMPLEXES | {Dtype.BOOL} == set(Dtype)
