# SPDX-License-Identifier: Apache-2.0
"""The codecs of docs/reference/codecs.md in NumPy, from their definition: the reference of the native kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.plans.arithmetic import widen
from sennit.transport.plans.elements import Dtype

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]

_LEAST_NORMAL: Final = np.float32(2.0**-126)
_STREAM: Final = 0x636F6465


@dataclass(frozen=True)
class Minifloat:
    """A floating-point format of up to 16 bits. `infinity` and `nan` are codes, 0 where it has none."""

    bits: int
    mantissa: int
    bias: int
    infinity: int
    nan: int
    largest: float

    @property
    def least_scale(self) -> int:
        """The least scale that the encoder takes, as E8M0: the least code then means 2^-126."""
        return self.bias + self.mantissa


FORMATS: Final = {
    CodecKind.FP16: Minifloat(16, 10, 15, 0x7C00, 0x7E00, 65504.0),
    CodecKind.FP8_E4M3: Minifloat(8, 3, 7, 0x7E, 0x7F, 416.0),
    CodecKind.FP8_E5M2: Minifloat(8, 2, 15, 0x7C, 0x7E, 57344.0),
    CodecKind.MX4: Minifloat(4, 1, 1, 0, 0, 6.0),
}


@functools.cache
def _magnitudes(form: Minifloat) -> npt.NDArray[np.float64]:
    """The number of each code without its sign."""
    code = np.arange(1 << (form.bits - 1))
    exponent, mantissa = code >> form.mantissa, code & (1 << form.mantissa) - 1
    normal = np.ldexp((1 << form.mantissa) + mantissa, exponent - form.bias - form.mantissa)
    found: npt.NDArray[np.float64] = np.where(
        exponent == 0, np.ldexp(1.0 * mantissa, 1 - form.bias - form.mantissa), normal
    )
    if form.infinity:
        found[form.infinity] = np.inf
        found[form.infinity + 1 :] = np.nan
    found.setflags(write=False)
    return found


def philox(counter: tuple[Words, Words, Words, Words], key: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-7 (Salmon et al., SC 2011): four words of 32 bits, as uint64."""
    (c0, c1, c2, c3), (k0, k1) = counter, (key & 0xFFFFFFFF, key >> 32)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(7):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = second >> half ^ c1 ^ np.uint64(k0), first >> half ^ c3 ^ np.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_numbers(seed: int, first_index: int, count: int) -> npt.NDArray[np.int64]:
    """16 bits an element: number i mod 8 of counter i / 8."""
    number = np.arange(first_index // 8, (first_index + count + 7) // 8, dtype=np.uint64)
    low, high = number & np.uint64(0xFFFFFFFF), number >> np.uint64(32)
    words = philox((low, high, np.zeros_like(low), np.full_like(low, _STREAM)), seed)
    numbers = np.stack(words, axis=1).astype("<u4").view("<u2").reshape(-1)
    return numbers[first_index % 8 :][:count].astype(np.int64)


def encode(
    codec: Codec, array: Array, *, dtype: Dtype = Dtype.F32, first_index: int = 0, residual: Floats | None = None
) -> Bytes:
    """Returns what `Codec.encode` returns."""
    values = np.asarray(widen(array.reshape(-1).view(np.uint8), dtype), dtype=np.float32)
    with np.errstate(all="ignore"):
        if residual is not None:
            values = values + residual.reshape(-1)
        coded = _encode(codec, values, first_index)
        if residual is not None:
            lost = values - decode(codec, coded, values.size)
            residual.reshape(-1)[:] = np.where(np.isfinite(values), lost, 0)
    return coded


def decode(codec: Codec, coded: Bytes, count: int) -> Floats:
    """Returns float32, flat."""
    if codec.kind is CodecKind.BF16:
        wide = coded.view("<u2").astype(np.uint32)
        quiet = np.where(wide & 0x7FFF > 0x7F80, wide & 0x8000 | 0x7FC0, wide).astype(np.uint32)
        return np.left_shift(quiet, 16).view(np.float32)
    with np.errstate(all="ignore"):
        if codec.kind is CodecKind.FP16:
            return _values(FORMATS[codec.kind], coded.view("<u2"), np.ones(count))
        assert codec.block is not None
        blocks = -(-count // codec.block)
        scales = coded[: blocks * (4 if codec.kind is CodecKind.INT8 else 1)]
        codes = coded[len(scales) :]
        if codec.kind is CodecKind.INT8:
            scale = np.repeat(scales.view("<f4"), codec.block)[:count]
            signed = codes.view(np.int8)
            special = [signed == 127, signed == -127, signed == -128]
            return np.select(special, [np.inf, -np.inf, np.nan], signed.astype(np.float32) * scale).astype(np.float32)
        shared = np.repeat(scales, codec.block)[:count]
        if codec.kind is CodecKind.MX4:
            codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:count]
        scale = np.where(shared == 0xFF, np.nan, np.ldexp(1.0, shared.astype(np.int64) - 127))
        values = _values(FORMATS[codec.kind], codes, scale)
        if codec.kind is CodecKind.MX4:
            kind = codes & 7
            odd = np.select([kind == 7, kind == 6], [np.inf, np.nan], 0.0) * np.where(codes & 8, -1.0, 1.0)
            values = np.where(shared == 0xFF, odd, values).astype(np.float32)
        return values


def _encode(codec: Codec, values: Floats, first_index: int) -> Bytes:
    random = random_numbers(codec.seed, first_index, values.size) if codec.stochastic else None
    if codec.kind is CodecKind.BF16:
        return _bfloat16(values, random)
    if codec.kind is CodecKind.FP16:
        return _codes(FORMATS[codec.kind], values, np.zeros(values.size, int), random).astype("<u2").view(np.uint8)
    assert codec.block is not None
    largest = _largest_of_blocks(values, codec.block)
    # Denormal numbers count as zero.
    flushed = np.where(np.abs(values) < _LEAST_NORMAL, np.copysign(np.float32(0), values), values)
    if codec.kind is CodecKind.INT8:
        scales = np.maximum(np.maximum(largest, _LEAST_NORMAL) / np.float32(126), _LEAST_NORMAL).astype("<f4")
        inverse = np.repeat(np.float32(1) / scales, codec.block)[: values.size]
        y = np.clip(flushed * inverse, np.float32(-126), np.float32(126))
        codes = np.rint(y if random is None else y + _dither(random))
        special = [np.isposinf(values), np.isneginf(values), np.isnan(values)]
        codes = np.select(special, [127, -127, -128], codes).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])
    form = FORMATS[codec.kind]
    # The least power of two with which no number is beyond the format's largest.
    power = np.ceil(np.log2(np.maximum(largest, _LEAST_NORMAL).astype(np.float64) / form.largest)).astype(int)
    shared = np.maximum(power + 127, form.least_scale)
    exponents = np.repeat(shared - 127, codec.block)[: values.size]
    codes = _codes(form, flushed, exponents, random)
    if codec.kind is CodecKind.MX4:
        is_odd = np.logical_or.reduceat(~np.isfinite(values), np.arange(0, values.size, 32)) if values.size else shared
        shared = np.where(is_odd, 0xFF, shared)
        kind = np.select([np.isinf(values), np.isnan(values)], [7, 6], 0) | np.where(np.signbit(values), 8, 0)
        codes = np.where(np.repeat(is_odd, 32)[: values.size], kind, codes).astype(np.uint8)
        pairs = np.append(codes, np.zeros(codes.size % 2, np.uint8)).reshape(-1, 2)
        codes = pairs[:, 0] | pairs[:, 1] << 4
    return np.concatenate([shared.astype(np.uint8), codes.astype(np.uint8)])


def _largest_of_blocks(values: Floats, block: int) -> Floats:
    """The largest finite magnitude of each block."""
    finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
    starts = np.arange(0, values.size, block)
    found: Floats = np.maximum.reduceat(finite, starts) if values.size else finite
    return found


def _dither(random: npt.NDArray[np.int64], bits: int = 16) -> Floats:
    """Offsets of stochastic rounding, between -1/2 and 1/2, from the upper `bits` of the random numbers."""
    drawn = random >> 16 - bits
    return ((2 * drawn + 1 - (1 << bits)) * 2.0 ** -(bits + 1)).astype(np.float32)


def _codes(
    form: Minifloat, values: Floats, exponents: npt.NDArray[np.int64], random: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """The codes of values / 2^exponents. The quotient is exact but for numbers that are rounded to 0 anyway."""
    y = np.ldexp(np.abs(values), -exponents).astype(np.float32)
    # No number of the format that means 2^128 or more.
    allowed = _magnitudes(form)[: form.infinity or None]
    last = np.searchsorted(allowed, np.ldexp(1.0, 128 - exponents)) - 1
    y = np.minimum(np.where(np.isnan(y), 0, y), allowed[last]).astype(np.float32)
    exponent = np.maximum(np.where(y == 0, -200, np.frexp(y)[1] - 1), 1 - form.bias)
    step = np.ldexp(np.float32(1), exponent - form.mantissa).astype(np.float32)
    moved = y if random is None else y + _dither(random, min(16, 22 - form.mantissa)) * step
    steps = np.rint(moved.astype(np.float64) / step).astype(np.int64)
    codes = (exponent - 1 + form.bias << form.mantissa) + steps
    if form.infinity:
        codes = np.select([np.isinf(values), np.isnan(values)], [form.infinity, form.nan], codes)
    signed: npt.NDArray[np.int64] = codes | np.where(np.signbit(values), 1 << (form.bits - 1), 0)
    return signed


def _values(form: Minifloat, codes: Array, scale: Array) -> Floats:
    magnitude = _magnitudes(form)[codes & (1 << (form.bits - 1)) - 1]
    sign = np.where(codes >> (form.bits - 1), -1.0, 1.0)
    # An element's own infinity or NaN counts before the scale's.
    values = np.where(np.isfinite(magnitude), magnitude * scale, magnitude)
    found: Floats = np.copysign(values, sign).astype(np.float32)
    return found


def _bfloat16(values: Floats, random: npt.NDArray[np.int64] | None) -> Bytes:
    bits = values.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    moved = magnitude + (0x7FFF + (magnitude >> 16 & 1) if random is None else random)
    found = np.select([np.isinf(values), np.isnan(values)], [0x7F80, 0x7FC0], np.minimum(moved >> 16, 0x7F7F))
    coded: Bytes = (found | bits >> 31 << 15).astype("<u2").view(np.uint8)
    return coded
