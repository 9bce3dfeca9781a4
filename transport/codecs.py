# SPDX-License-Identifier: Apache-2.0
"""Codecs: arrays of numbers in fewer bytes, and back (docs/reference/codecs.md).

codec = Codec(kind=CodecKind.INT8, block=64)
coded = codec.encode(gradient)
again = codec.decode(coded, gradient.size)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.transport import _core
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.coding import LOSSLESS_BLOCK, CodecKind, Coding
from sennit.transport.plans.elements import FLOATS, Dtype, dtype_of

__all__ = ["COLLECTIVE_CODECS", "EXCHANGE_CODECS", "Codec", "CodecKind"]

Array: TypeAlias = npt.NDArray[Any]


# The default number of elements that share a scale.
DEFAULT_BLOCK: Final[dict[CodecKind, int]] = {
    CodecKind.FP16: 0, CodecKind.BF16: 0, CodecKind.LOSSLESS: 0,
    CodecKind.FP8_E4M3: 32, CodecKind.FP8_E5M2: 32, CodecKind.MX4: 32, CodecKind.INT8: 64,
}  # fmt: skip
# The names on command lines of the codecs that all collectives take.
COLLECTIVE_CODECS: Final[dict[str, CodecKind]] = {
    "fp16": CodecKind.FP16, "bf16": CodecKind.BF16, "fp8": CodecKind.FP8_E4M3, "fp8_e5m2": CodecKind.FP8_E5M2,
    "int8": CodecKind.INT8, "mx4": CodecKind.MX4,
}  # fmt: skip
# The names of the codecs that alltoall and allgather take.
EXCHANGE_CODECS: Final[dict[str, CodecKind]] = {**COLLECTIVE_CODECS, "lossless": CodecKind.LOSSLESS}
_STORED: Final[dict[Dtype, np.dtype[Any]]] = {
    Dtype.F16: np.dtype(np.float16),
    Dtype.BF16: np.dtype(np.uint16),
    Dtype.F32: np.dtype(np.float32),
    Dtype.I32: np.dtype(np.int32),
    Dtype.I64: np.dtype(np.int64),
}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How numbers are coded. Ranks that exchange coded bytes need equal codecs.

    Raises ArgumentError for another kind, and for a block or a seed out of range.
    """

    kind: CodecKind
    """The format."""

    block: int | None = None
    """Elements that share a scale: 1 to 4,096; 32 of MX4; 0 of FP16, BF16 and LOSSLESS. None: 32, and 64 of INT8."""

    stochastic: bool = False
    """Round up or down at random, so that the mean is the number itself. Else to nearest, ties to even."""

    seed: int = 0
    """64 bits. With the logical index of an element it decides how that element is rounded, and nothing else does."""

    between_hosts: bool = False
    """In a collective: code what goes to other hosts, and nothing else. Bits then depend on which ranks share a host,
    except in an allgather (docs/reference/codecs.md, "Between hosts alone")."""

    def __post_init__(self) -> None:
        if self.kind not in DEFAULT_BLOCK:
            raise ArgumentError(f"codec {self.kind!r}; allowed: {', '.join(kind.name for kind in CodecKind)}")
        if self.block is None:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.kind])
        if not 0 <= self.seed < 1 << 64:
            raise ArgumentError(f"seed {self.seed}; allowed: 0 to 2^64 - 1")
        if not 0 <= self._block < 1 << 32:
            raise ArgumentError(f"block {self.block}; allowed: 0 to 4096")
        self._check(Dtype.F32)

    def coding(self, dtype: Dtype) -> Coding:
        """Returns what a plan that sums `dtype` knows of it: all but the seed.

        Raises ArgumentError for types that it does not code, and for LOSSLESS: sums are made of codes of fixed size.
        """
        if self.kind is CodecKind.LOSSLESS:
            raise ArgumentError("LOSSLESS in a collective that sums; allowed: the other codecs")
        return self.exchange_coding(dtype)

    def exchange_coding(self, dtype: Dtype) -> Coding:
        """As `coding`, for collectives that move elements. They take LOSSLESS, too."""
        self._check(dtype)
        return Coding(self.kind, self._block, self.stochastic, self.between_hosts)

    def coded_bytes(self, count: int, *, dtype: Dtype = Dtype.F32) -> int:
        """Returns the bytes of `count` coded elements; of LOSSLESS the most they may take.

        Raises ArgumentError for types that this codec does not code, and for counts below 0 or from 2^48.
        """
        self._check(dtype)
        if not 0 <= count < 1 << 48:
            raise ArgumentError(f"{count} elements; allowed: 0 to 2^48 - 1")
        return _core.coded_bytes(self._native, dtype, count)

    def encode(
        self, array: Array, *, dtype: Dtype | None = None, first_index: int = 0, residual: Array | None = None
    ) -> npt.NDArray[np.uint8]:
        """Returns `array` as coded bytes: uint8, flat.

        `array`: any shape, C-contiguous, float32 or float16; LOSSLESS takes int32 and int64 too.

        `dtype` names a type that NumPy does not have: BF16, whose array is uint16. `first_index`: the logical index of
        the first element, for stochastic rounding. A range may be coded in pieces that begin at borders of blocks.

        `residual` (float32, as many elements, written in place) is error feedback: it is added to the elements first,
        and then holds what coding took away; 0 where a number is infinite or NaN. LOSSLESS takes none.

        Raises ArgumentError for types that this codec does not code, for arrays of other sizes or layouts, and for a
        `first_index` below 0 or from 2^64.
        """
        kind = dtype_of(array) if dtype is None else dtype
        self._check(kind)
        if array.dtype != _STORED[kind] or not (array.flags.c_contiguous and array.flags.aligned):
            raise ArgumentError(f"an array of {array.dtype}; needed: {_STORED[kind]}, C-contiguous and aligned")
        if residual is not None and not (
            residual.dtype == np.float32
            and residual.size == array.size
            and residual.flags.c_contiguous
            and residual.flags.aligned
            and residual.flags.writeable
        ):
            raise ArgumentError(
                f"a residual of {residual.size} {residual.dtype}; needed: {array.size} float32, C-contiguous, writable"
            )
        coded = np.empty(_core.coded_bytes(self._native, kind, array.size), dtype=np.uint8)
        if not 0 <= first_index < 1 << 64:
            raise ArgumentError(f"first_index {first_index}; allowed: 0 to 2^64 - 1")
        if residual is not None and self.kind is CodecKind.LOSSLESS:
            raise ArgumentError("a residual of LOSSLESS, which loses nothing")
        size_bytes = _core.encode(self._native, kind, array, first_index, coded, residual)
        return coded[:size_bytes]

    def decode(self, coded: Any, count: int, *, dtype: Dtype = Dtype.F32, result: Dtype | None = None) -> Array:
        """Returns `count` elements as a flat array.

        `dtype`: what was coded. `result`: what is returned, `dtype` or, of floats, F32; None: `dtype`. BF16 comes as
        uint16.

        Raises ArgumentError if `coded` (any buffer of bytes) is no coded form of so many elements.
        """
        self._check(dtype)
        wanted = dtype if result is None else result
        allowed = {dtype, Dtype.F32} if dtype in FLOATS else {dtype}
        if wanted not in allowed:
            raise ArgumentError(f"result {wanted.name}; allowed: {', '.join(sorted(kind.name for kind in allowed))}")
        size_bytes = memoryview(coded).nbytes
        # Checked before memory is asked for: the count may be anything.
        if not self._may_hold(size_bytes, count, dtype):
            raise ArgumentError(f"{size_bytes} bytes are no coded form of {count} elements")
        out: Array = np.empty(count, dtype=_STORED[wanted])
        if not _core.decode(self._native, dtype, coded, count, wanted, out):
            raise ArgumentError(f"{size_bytes} bytes are no coded form of {count} elements")
        return out

    def _may_hold(self, size_bytes: int, count: int, dtype: Dtype) -> bool:
        most = self.coded_bytes(count, dtype=dtype)
        if self.kind is not CodecKind.LOSSLESS:
            return size_bytes == most
        blocks = -(-count // LOSSLESS_BLOCK)
        return 2 * dtype.item_bytes * blocks <= size_bytes <= most

    @property
    def _block(self) -> int:
        assert self.block is not None
        return self.block

    @property
    def _native(self) -> tuple[int, int, bool, int]:
        return (self.kind, self._block, self.stochastic, self.seed)

    def _check(self, dtype: Dtype) -> None:
        if refusal := _core.codec_refusal(self._native, dtype):
            raise ArgumentError(f"{self.kind.name}: {refusal}")
