# SPDX-License-Identifier: Apache-2.0
"""Rows with 8 bits per weight, each with its own scale and bias, for inference in torch's format.

The format is FBGEMM's "fused 8-bit row-wise", which `torch.ops.quantized.embedding_bag_byte_rowwise_offsets` reads:
dim bytes q, then the float32 `scale` and the float32 `bias`, little-endian. A weight is q · scale + bias.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sennit.transport.errors import ArgumentError

SCALE_AND_BIAS_BYTES: Final = 8
_LEVELS: Final = 255
_ROWS_AT_ONCE: Final = 4096


def int8_rows(weight: Tensor, *, name: str = "") -> Tensor:
    """Uint8 [rows, dim + 8] of float32, float16 or bfloat16 [rows, dim] on the CPU.

    Every weight is within scale / 2, before the reader rounds. bias is the least weight of the row. scale is the least
    float32 that is not below (greatest − least) / 255. q is the nearest integer to (weight − bias) / scale, ties to
    even; 0 if scale is 0. Computed in float64. If a weight is not finite, raises `ArgumentError` that has the row and
    the table's `name`.
    """
    row_count, dim = weight.shape
    packed = torch.empty(row_count, dim + SCALE_AND_BIAS_BYTES, dtype=torch.uint8)
    for first in range(0, row_count, _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        x = weight[part].to(torch.float64)
        finite = x.isfinite().all(1)
        if not bool(finite.all()):
            row = first + int((~finite).nonzero()[0])
            raise ArgumentError(f"table {name} row {row} has a weight that is not finite; it has no form in 8 bits")
        low, high = x.aminmax(dim=1, keepdim=True)
        exact = (high - low) / _LEVELS
        scale = exact.to(torch.float32)
        scale = torch.where(scale < exact, scale.nextafter(torch.tensor(torch.inf)), scale)
        steps = torch.where(scale == 0, 0.0, (x - low) / scale.to(torch.float64))
        packed[part, :dim] = steps.round().to(torch.uint8)
        packed[part, dim:] = torch.cat((scale, low.to(torch.float32)), 1).view(torch.uint8)
    return packed


def float_rows(packed: Tensor) -> Tensor:
    """Float32 [rows, dim]: q · scale + bias, each operation rounded once."""
    tail = packed[:, -SCALE_AND_BIAS_BYTES:].contiguous().view(torch.float32)
    return packed[:, :-SCALE_AND_BIAS_BYTES].to(torch.float32) * tail[:, :1] + tail[:, 1:]
