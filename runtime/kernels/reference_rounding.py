# SPDX-License-Identifier: Apache-2.0
"""Stores to fp16 and bf16 in plain torch: to nearest, or stochastic with numbers from Philox4x32-10.

A counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
makes a number from its position alone, so no implementation has to keep an order of draws.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import Precision, Rounding, ShardSpec

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = 0xFFFFFFFF
# Bits of float32.
_INFINITY: Final = 0x7F800000
_LEAST_NORMAL_HALF: Final = 0x38800000  # 2^-14
_BEYOND_HALF: Final = 0x47800000  # 2^16
_HALF_EXPONENT_STEP: Final = 112 << 10  # the exponents' biases differ by 112


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, as int64, from four 32-bit counter words and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> 32 & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_words(spec: ShardSpec, rows: Tensor, *, step: int, seed: int) -> Tensor:
    """The 32-bit word of each element of `rows` (int64 [n], global numbers) of a table, as int64 [n, dim].

    Counter: low 32 bits of the global row; bits 32 to 47 of it above a 16-bit block; step; table. Column c takes word
    (c / 16) mod 4 of block (c / 64) · 16 + c mod 16, so that 16 lanes make 64 columns without moving between lanes.
    """
    columns = torch.arange(spec.dim)
    block = columns // 64 * 16 + columns % 16
    row = rows.unsqueeze(1)
    shape = torch.zeros(len(rows), spec.dim, dtype=torch.int64)
    words = philox(
        (
            shape + (row & _LOW),
            shape + (row >> 32 << 16 | block),
            shape + (step & _LOW),
            shape + spec.stream,
        ),
        seed,
    )
    return torch.stack(words).gather(0, (columns // 16 % 4).expand_as(shape).unsqueeze(0)).squeeze(0)


def rounded(spec: ShardSpec, x: Tensor, rows: Tensor, rounding: Rounding, *, step: int, seed: int) -> Tensor:
    """Float32 [n, dim] rounded to the precision of the table. `rows` are int64 [n], global numbers."""
    if spec.precision is Precision.FP32:
        return x
    if rounding is Rounding.NEAREST:
        return x.to(spec.precision.dtype)
    words = random_words(spec, rows, step=step, seed=seed)
    return (_bfloat16 if spec.precision is Precision.BF16 else _float16)(x, words)


def _bfloat16(x: Tensor, words: Tensor) -> Tensor:
    bits = x.view(torch.int32).to(torch.int64) & _LOW
    magnitude = bits & 0x7FFFFFFF
    moved = magnitude + (words & 0xFFFF)
    kept = torch.where(magnitude < _INFINITY, moved >> 16, 0x7F80) | bits >> 31 << 15
    return torch.where(x.isnan(), 0x7FC0, kept).to(torch.uint16).view(torch.bfloat16)


def _float16(x: Tensor, words: Tensor) -> Tensor:
    bits = x.view(torch.int32).to(torch.int64) & _LOW
    magnitude = bits & 0x7FFFFFFF
    moved = magnitude + (words & 0x1FFF)
    normal = torch.where(moved < _BEYOND_HALF, (moved >> 13) - _HALF_EXPONENT_STEP, 0x7C00)
    # Below 2^-14 the unit is 2^-24: the mantissa, with its leading one, is shifted by 14 or more. Numbers below 2^-33
    # become 0.
    shift = (126 - (magnitude >> 23)).clamp(0, 32)
    mantissa = magnitude & 0x7FFFFF | 0x800000
    subnormal = torch.where(shift <= 31, mantissa + (words & ((1 << shift) - 1)) >> shift, 0)
    kept = torch.where(magnitude < _LEAST_NORMAL_HALF, subnormal, normal) | bits >> 31 << 15
    return torch.where(x.isnan(), 0x7E00, kept).to(torch.uint16).view(torch.float16)


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of the product of 32-bit words, computed in halves because int64 has no unsigned 64-bit
    product.
    """
    low, high = x & 0xFFFF, x >> 16
    first = low * constant
    second = high * constant + (first >> 16)
    return second >> 16, (second & 0xFFFF) << 16 | first & 0xFFFF
