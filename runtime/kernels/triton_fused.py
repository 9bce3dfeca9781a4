# SPDX-License-Identifier: Apache-2.0
"""Fused multiply-adds and products of tiles for attention: on a GPU, and in Triton's interpreter, with the same bits.

On a GPU `tl.dot` of float32 with `input_precision="ieee"` takes no tensor cores. Triton lowers it to a chain of fused
multiply-adds for each sum, over rising indices, from what is already there (its FMADotUtility.cpp). That is rule 1 of
docs/reference/attention.md. A test reads the compiled code. The interpreter rounds `tl.fma` twice and leaves the order
of `tl.dot` to NumPy, so there both are done here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from triton import knobs

Floats = npt.NDArray[np.float32]


def fused_array(x: Floats, y: Floats, z: Floats) -> Floats:
    """x · y + z of float32 arrays with one rounding, as `reference_attention.fused`."""
    with np.errstate(all="ignore"):
        product, wide = np.multiply(x, y, dtype=np.float64), z.astype(np.float64)
        total = product + wide
        other = total - product
        error = (product - (total - other)) + (wide - other)
        bits = total.view(np.int64)
        odd = np.where((error > 0) == (total > 0), bits | 1, (bits - 1) | 1)
        exact = np.where((error != 0) & np.isfinite(total), odd, bits).view(np.float64)
        return exact.astype(np.float32)


if knobs.runtime.interpret:
    from triton.runtime.interpreter import TensorHandle

    def _block(data: npt.NDArray[Any]) -> Any:
        return tl.tensor(TensorHandle(data, tl.float32), tl.block_type(tl.float32, list(data.shape)))

    def fused(x: Any, y: Any, z: Any) -> Any:
        x, y, z = np.broadcast_arrays(x.handle.data, y.handle.data, z.handle.data)
        return _block(fused_array(x, y, z))

    def products(a: Any, b: Any, sums: Any) -> Any:
        left, right, result = a.handle.data, b.handle.data, sums.handle.data
        for k in range(left.shape[1]):
            # What is padded with zeros changes nothing but the sign of a zero.
            if left[:, k].any() and right[k].any():
                result = fused_array(left[:, k, None], right[None, k], result)
        return _block(result)

    def narrowed(x: Any) -> Any:
        bits = x.handle.data.view(np.uint32)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        is_nan = np.isnan(x.handle.data)
        return _block(np.where(is_nan, np.uint32(0x7FC00000), near).astype(np.uint32).view(np.float32))

    def operand(x: Any) -> Any:
        return x.to(tl.float32)

else:

    @triton.jit
    def fused(x, y, z):
        """x · y + z with one rounding."""
        return tl.fma(x, y, z)

    @triton.jit
    def products(a, b, sums):
        """[M, K], [K, N], [M, N] -> [M, N]: of float32 in the order of the reference, of bfloat16 by tensor cores."""
        return tl.dot(a, b, sums, input_precision="ieee", out_dtype=tl.float32)

    @triton.jit
    def narrowed(x):
        """float32 as bfloat16, to nearest even. (The interpreter keeps them in float32.)"""
        return x.to(tl.bfloat16)

    @triton.jit
    def operand(x):
        """What was loaded, as `products` takes it."""
        return x
