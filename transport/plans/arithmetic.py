# SPDX-License-Identifier: Apache-2.0
"""The exact result of a REDUCE in NumPy: the reference of the native kernels.

docs/reference/plans.md defines it under "Arithmetic".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import COMPLEXES, FLOATS, Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.plans.tree import balanced

Array: TypeAlias = npt.NDArray[Any]

# How elements lie in memory. A complex number is a pair; bfloat16 is stored as its bits.
_STORED: Final[dict[Dtype, str]] = {
    Dtype.U8: "u1", Dtype.I8: "i1", Dtype.I16: "i2", Dtype.I32: "i4", Dtype.I64: "i8",
    Dtype.F16: "f2", Dtype.BF16: "u2", Dtype.F32: "f4", Dtype.F64: "f8",
    Dtype.C64: "f4", Dtype.C128: "f8", Dtype.BOOL: "u1",
    Dtype.U16: "u2", Dtype.U32: "u4", Dtype.U64: "u8", Dtype.C32: "f2",
}  # fmt: skip

_FUNCTIONS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def widen(data: Array, dtype: Dtype) -> Array:
    """Returns stored bytes as accumulators; complex numbers as rows of (real, imaginary)."""
    stored: Array = data.view(_STORED[dtype])
    if dtype is Dtype.BF16:
        return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    if dtype is Dtype.BOOL:
        return np.not_equal(stored, 0).astype(np.uint8)
    if dtype in (Dtype.F16, Dtype.C32):
        stored = stored.astype(np.float32)
    return stored.reshape(-1, 2) if dtype in COMPLEXES else stored


def narrow(values: Array, dtype: Dtype) -> Array:
    """Returns accumulators as stored bytes, rounded to nearest even."""
    if dtype is Dtype.BF16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        stored: Array = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    else:
        stored = values.astype(_STORED[dtype])
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)


def fold(leaves: Sequence[Array], dtype: Dtype, op: ReduceOp, *, scalar: float = 1.0) -> Array:
    """Returns the fold of byte arrays of equal size over the tree of tree.py, as bytes."""
    return run_program(
        leaves, balanced(len(leaves)), dtype, op, partial=[False] * len(leaves), divisor=len(leaves), scalar=scalar
    )


def scaled(data: Array, dtype: Dtype, factor: float) -> Array:
    """Returns stored bytes with each number multiplied by `factor`: what a rank gives to a PREMUL_SUM.

    Products are rounded to the accumulator's type, and then to the element's. Raises ArgumentError for a factor that
    integers of 64 bits do not have.
    """
    check_reducible(dtype, ReduceOp.PREMUL_SUM)
    if dtype not in FLOATS | COMPLEXES and not (abs(factor) < 1 << 63 and float(factor).is_integer()):
        raise ArgumentError(
            f"the factor {factor:g} of PREMUL_SUM of {dtype.name}; allowed: whole numbers between -2^63 and 2^63"
        )
    with np.errstate(all="ignore"):
        return narrow(_prepare(data, dtype, ReduceOp.PREMUL_SUM, factor), dtype)


def run_program(
    operands: Sequence[Array],
    program: Sequence[int],
    dtype: Dtype,
    op: ReduceOp,
    *,
    partial: Sequence[bool],
    divisor: int,
    scalar: float = 1.0,
    gives_partial: bool = False,
) -> Array:
    """Returns what a REDUCE computes: each operand is pushed, and `program[i]` pairs are combined after the i-th.

    `partial[i]` says that operand i is a partial sum: of the accumulator's type, and not scaled again. With
    `gives_partial` the result is a partial sum too: AVG does not divide by `divisor`, and nothing is rounded.
    """
    check_reducible(dtype, op)
    stack: list[Array] = []
    # Overflow to infinity and NaN from infinities are expected results here.
    with np.errstate(all="ignore"):
        for operand, count, is_partial in zip(operands, program, partial, strict=True):
            stack.append(widen(operand, accumulator(dtype)) if is_partial else _prepare(operand, dtype, op, scalar))
            for _ in range(count):
                right = stack.pop()
                stack[-1] = _apply(stack[-1], right, dtype, op)
        (total,) = stack
        if gives_partial:
            return narrow(total, accumulator(dtype))
        if op is ReduceOp.AVG:
            total = _divide(total, divisor)
        return narrow(total, dtype)


def _prepare(operand: Array, dtype: Dtype, op: ReduceOp, scalar: float) -> Array:
    values = widen(operand, dtype)
    if op is not ReduceOp.PREMUL_SUM:
        return values
    # Integers are converted to 64 bits, so that the product wraps as in two's complement.
    factor = np.array(scalar if values.dtype.kind == "f" else int(scalar)).astype(values.dtype)
    scaled: Array = values * factor
    return scaled


def _apply(left: Array, right: Array, dtype: Dtype, op: ReduceOp) -> Array:
    if op is ReduceOp.MIN:
        return np.where((left < right) | (left != left), left, right)
    if op is ReduceOp.MAX:
        return np.where((left > right) | (left != left), left, right)
    if op is ReduceOp.PRODUCT and dtype in COMPLEXES:
        (a, b), (c, d) = left.T, right.T
        return np.stack([a * c - b * d, a * d + b * c], axis=1)
    function = _FUNCTIONS[ReduceOp.BOR if dtype is Dtype.BOOL and op is ReduceOp.SUM else op]
    result: Array = function(left, right)
    return result


def _divide(total: Array, divisor: int) -> Array:
    quotient: Array
    if total.dtype.kind == "f":
        quotient = total / np.array(divisor).astype(total.dtype)
    elif total.dtype.kind == "u":
        quotient = total.astype(np.uint64) // np.uint64(divisor)
    else:
        wide = total.astype(np.int64)
        # Floor division rounds down, but we want rounding towards zero.
        quotient = wide // divisor + ((wide < 0) & (wide % divisor != 0))
    return quotient.astype(total.dtype)
