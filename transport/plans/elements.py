# SPDX-License-Identifier: Apache-2.0
"""Element types and reduction operations, numbered as in `core.h`, and which operations each type has.

docs/reference/plans.md ("Arithmetic") defines each operation bit for bit. `reference.py` and the native kernels follow
it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sennit.transport.errors import ArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]


class Dtype(IntEnum):
    """`sennit_dtype`: the element types the core can do arithmetic on."""

    U8 = 0
    I8 = 1
    I16 = 2
    I32 = 3
    I64 = 4
    F16 = 5
    BF16 = 6
    F32 = 7
    F64 = 8
    C64 = 9
    C128 = 10
    BOOL = 11
    U16 = 12
    U32 = 13
    U64 = 14
    C32 = 15

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self]


class ReduceOp(IntEnum):
    """`sennit_reduce`."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


_ITEM_BYTES: Final[dict[Dtype, int]] = {
    Dtype.U8: 1, Dtype.I8: 1, Dtype.BOOL: 1,
    Dtype.I16: 2, Dtype.U16: 2, Dtype.F16: 2, Dtype.BF16: 2,
    Dtype.I32: 4, Dtype.U32: 4, Dtype.F32: 4, Dtype.C32: 4,
    Dtype.I64: 8, Dtype.U64: 8, Dtype.F64: 8, Dtype.C64: 8,
    Dtype.C128: 16,
}  # fmt: skip

FLOATS: Final = frozenset({Dtype.F16, Dtype.BF16, Dtype.F32, Dtype.F64})
COMPLEXES: Final = frozenset({Dtype.C32, Dtype.C64, Dtype.C128})
INTEGERS: Final = frozenset(Dtype) - FLOATS - COMPLEXES - {Dtype.BOOL}

_WIDER: Final = {Dtype.F16: Dtype.F32, Dtype.BF16: Dtype.F32, Dtype.C32: Dtype.C64}

_ORDERED: Final = {ReduceOp.MIN, ReduceOp.MAX}
_BITWISE: Final = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
_FIELD: Final = {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT}


def accumulator(dtype: Dtype) -> Dtype:
    """The type of partial sums of `dtype`."""
    return _WIDER.get(dtype, dtype)


def reduce_ops(dtype: Dtype) -> frozenset[ReduceOp]:
    """Returns the operations defined for `dtype`."""
    if dtype in FLOATS:
        return frozenset(_FIELD | _ORDERED | {ReduceOp.PREMUL_SUM})
    if dtype in COMPLEXES:
        return frozenset(_FIELD | {ReduceOp.PREMUL_SUM})
    if dtype is Dtype.BOOL:
        return frozenset({ReduceOp.SUM, ReduceOp.PRODUCT} | _ORDERED | _BITWISE)
    return frozenset(ReduceOp)


def check_reducible(dtype: Dtype, op: ReduceOp) -> None:
    """Raises ArgumentError, naming what is allowed, if `op` is not defined for `dtype`."""
    allowed = reduce_ops(dtype)
    if op not in allowed:
        names = ", ".join(sorted(allowed_op.name for allowed_op in allowed))
        raise ArgumentError(f"reduce op {op.name} is not defined for {dtype.name}; allowed: {names}")


# By their names in NumPy.
DTYPES: Final[dict[str, Dtype]] = {
    "uint8": Dtype.U8, "int8": Dtype.I8, "int16": Dtype.I16, "int32": Dtype.I32, "int64": Dtype.I64,
    "float16": Dtype.F16, "float32": Dtype.F32, "float64": Dtype.F64,
    "complex64": Dtype.C64, "complex128": Dtype.C128, "bool": Dtype.BOOL,
    "uint16": Dtype.U16, "uint32": Dtype.U32, "uint64": Dtype.U64,
}  # fmt: skip


# The type code of types without arithmetic. torch uses the codes from 0x80 up (runtime/backend/csrc).
OTHER_TYPE: Final = 0x7F


def dtype_of(array: Array) -> Dtype:
    """Returns the element type of `array`. The core must know the type, and the byte order must be native."""
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise ArgumentError(f"dtype {array.dtype.str}; allowed: {', '.join(DTYPES)}, in native byte order")
    return dtype
