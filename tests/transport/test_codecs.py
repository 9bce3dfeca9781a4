# SPDX-License-Identifier: Apache-2.0
"""Codecs: native kernels against the NumPy reference bit for bit, pieces against wholes, special numbers, refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError
from sennit.transport.oracle import codec_reference
from sennit.transport.plans.elements import Dtype
from tests.extent import examples

Floats = npt.NDArray[np.float32]
SPECIALS = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-38,
    2.0**-126,
    3.4e38,
    -3.4028235e38,
    65504.0,
    65520.0,
    1e-6,
    1.0,
]
LOSSY = sorted(set(CodecKind) - {CodecKind.LOSSLESS})
SCALED = [CodecKind.FP8_E4M3, CodecKind.FP8_E5M2, CodecKind.INT8, CodecKind.MX4]


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    kind = draw(st.sampled_from(LOSSY))
    blocks = st.sampled_from([1, 2, 7, 16, 32, 33, 64, 128, 1_000, 4_096])
    block = draw(blocks) if kind in SCALED and kind is not CodecKind.MX4 else None
    return Codec(kind=kind, block=block, stochastic=draw(st.booleans()), seed=draw(st.integers(0, (1 << 64) - 1)))


def numbers(seed: int, count: int, form: str) -> Floats:
    """Float32: of one scale, of any bits, or special ones among others."""
    random = np.random.default_rng(seed)
    if form == "any bits":
        bits: Floats = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        return bits
    values: Floats = (random.standard_normal(count) * 10.0 ** random.uniform(-44, 38)).astype(np.float32)
    if form == "specials":
        values[random.random(count) < 0.1] = random.choice(SPECIALS)
    if form == "few":
        values = (random.integers(-8, 9, count) / 4).astype(np.float32)
    return values


forms = st.sampled_from(["one scale", "any bits", "specials", "few"])
counts = st.one_of(st.integers(0, 200), st.sampled_from([1_023, 1_024, 1_025, 4_096, 5_000, 9_000]))
seeds = st.integers(0, 1 << 30)
indices = st.one_of(st.integers(0, 100), st.integers(1 << 34, 1 << 40))


def same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    """Equal bits, but any NaN is as good as another."""
    if left.dtype == np.float32:
        signs = [np.signbit(side) & ~np.isnan(side) for side in (left, right)]
        return np.array_equal(left, right, equal_nan=True) and np.array_equal(*signs)
    return np.array_equal(left, right)


@examples(100)
@given(codecs(), seeds, counts, forms, indices)
def test_native_is_the_reference(codec: Codec, seed: int, count: int, form: str, first_index: int) -> None:
    with np.errstate(all="ignore"):
        values = numbers(seed, count, form)
    coded = codec.encode(values, first_index=first_index)
    assert coded.size == codec.coded_bytes(count)
    assert np.array_equal(coded, codec_reference.encode(codec, values, first_index=first_index))
    decoded = codec.decode(coded, count)
    assert same(decoded, codec_reference.decode(codec, coded, count))
    # Every kind of number stays of its kind. Only MX4 gives up finite numbers beside others, and then to zero.
    assert np.array_equal(np.isnan(decoded), np.isnan(values))
    assert np.array_equal(np.isposinf(decoded), np.isposinf(values))
    assert np.array_equal(np.isneginf(decoded), np.isneginf(values))


@examples(25)
@given(codecs(), seeds, st.integers(0, 3_000), forms, st.sampled_from([Dtype.F16, Dtype.BF16]))
def test_elements_of_two_bytes(codec: Codec, seed: int, count: int, form: str, dtype: Dtype) -> None:
    with np.errstate(all="ignore"):
        values = numbers(seed, count, form)
        array = values.astype(np.float16) if dtype is Dtype.F16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    coded = codec.encode(array, dtype=dtype)
    assert np.array_equal(coded, codec_reference.encode(codec, array, dtype=dtype))
    wide = codec.decode(coded, count, dtype=dtype, result=Dtype.F32)
    assert same(wide, codec_reference.decode(codec, coded, count))
    own = codec.decode(coded, count, dtype=dtype)
    narrow = Codec(kind=CodecKind.FP16 if dtype is Dtype.F16 else CodecKind.BF16)
    assert np.array_equal(own.view(np.uint8), codec_reference.encode(narrow, wide))


@examples(25)
@given(codecs(), seeds, st.integers(1, 20_000), forms, st.lists(st.integers(0, 400), max_size=6), indices)
def test_pieces_are_the_whole(
    codec: Codec, seed: int, count: int, form: str, cuts: list[int], first_index: int
) -> None:
    with np.errstate(all="ignore"):
        values = numbers(seed, count, form)
    block = codec.block or 2
    borders = sorted({0, count, *(min(cut * block, count) for cut in cuts)})
    whole = codec.decode(codec.encode(values, first_index=first_index), count)
    pieces = [
        codec.decode(codec.encode(values[low:high], first_index=first_index + low), high - low)
        for low, high in pairwise(borders)
    ]
    assert same(np.concatenate(pieces), whole)


@examples(25)
@given(codecs(), seeds, st.integers(1, 5_000), forms)
def test_error_feedback_is_one_pass(codec: Codec, seed: int, count: int, form: str) -> None:
    with np.errstate(all="ignore"):
        values, before = numbers(seed, count, form), numbers(seed + 1, count, "one scale")
        ours, theirs = before.copy(), before.copy()
        coded = codec.encode(values, residual=ours)
        assert np.array_equal(coded, codec_reference.encode(codec, values, residual=theirs))
        assert same(ours, theirs)
        total = values + before
        assert np.isfinite(ours).all()
        expected = np.where(np.isfinite(total), total - codec.decode(coded, count), np.float32(0))
    assert same(ours, expected)


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("stochastic", [False, True])
def test_small_gradients_survive_and_errors_are_bounded(kind: CodecKind, stochastic: bool) -> None:
    values = (np.random.default_rng(3).standard_normal(64 * 1_024) * 1e-6).astype(np.float32)
    codec = Codec(kind=kind, stochastic=stochastic, seed=5)
    decoded = codec.decode(codec.encode(values), values.size)
    block = codec.block or 1
    largest = np.repeat(np.abs(values).reshape(-1, block).max(axis=1), block) if block > 1 else np.abs(values)
    # Half a step of the largest number, a whole one if rounding is stochastic.
    steps = {
        CodecKind.FP16: 0, CodecKind.BF16: 2**-8, CodecKind.FP8_E4M3: 2**-4, CodecKind.FP8_E5M2: 2**-3,
        CodecKind.INT8: 0.501 / 126, CodecKind.MX4: 2**-2,
    }[kind] * largest * (1 + stochastic)  # fmt: skip
    if kind is CodecKind.FP16:  # subnormal there
        steps = np.full(values.size, 2.0**-25 * (1 + stochastic), np.float32)
    assert (np.abs(decoded - values) <= steps * 1.0001).all()
    if kind is not CodecKind.FP16:
        assert np.count_nonzero(decoded) > 0.7 * values.size


@pytest.mark.parametrize("kind", LOSSY)
def test_stochastic_rounding_has_the_number_as_its_mean(kind: CodecKind) -> None:
    values = np.full(1 << 18, 0.3, np.float32)
    values[::32] = 1.0
    codec = Codec(kind=kind, stochastic=True, seed=9)
    decoded = codec.decode(codec.encode(values), values.size)
    others = decoded[np.arange(values.size) % 32 != 0].astype(np.float64)
    assert len(np.unique(others)) == 2
    step = np.ptp(others)
    # Five standard errors of a mean of 254,000 draws of one of two neighbours.
    assert abs(others.mean() - np.float64(np.float32(0.3))) < 5 * step / 2 / np.sqrt(others.size)
    assert (decoded[::32] == 1.0).all()  # what the format has stays
    assert not np.array_equal(decoded, Codec(kind=kind, stochastic=True, seed=10).decode(
        Codec(kind=kind, stochastic=True, seed=10).encode(values), values.size))  # fmt: skip


def test_torch_agrees_where_formats_are_the_same() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(4).standard_normal(200_000).astype(np.float32) * 100
    values = np.clip(values, -416, 416)
    values[::7] = np.float32(2.0**-8) * values[::7] / 100
    for kind, dtype in ((CodecKind.FP8_E4M3, torch.float8_e4m3fn), (CodecKind.FP8_E5M2, torch.float8_e5m2)):
        # With a block of one and the format's largest power of two in it, scales do not vary: take them out by hand.
        blocks = values.reshape(-1, 32).copy()
        blocks[:, 0] = 416.0 if kind is CodecKind.FP8_E4M3 else 57344.0
        codec = Codec(kind=kind)
        coded = codec.encode(blocks)
        assert (coded[: len(blocks)] == 127).all()
        theirs = torch.from_numpy(blocks.reshape(-1)).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal(coded[len(blocks) :], theirs)
    for kind, dtype in ((CodecKind.FP16, torch.float16), (CodecKind.BF16, torch.bfloat16)):
        theirs = torch.from_numpy(values).to(dtype).view(torch.uint16).numpy()
        assert np.array_equal(Codec(kind=kind).encode(values).view(np.uint16), theirs)


VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "codecs.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_bytes(vector: dict[str, Any]) -> None:
    """Written by hand from docs/reference/codecs.md, so that native and reference cannot be wrong together."""
    codec = Codec(
        kind=CodecKind[vector["kind"]], block=vector.get("block"), stochastic="seed" in vector,
        seed=vector.get("seed", 0),
    )  # fmt: skip
    values = np.array([float(value) for value in vector["values"]], np.float32)
    coded = bytes.fromhex(vector["coded"])
    assert codec.encode(values, first_index=vector.get("first_index", 0)).tobytes() == coded
    decoded = np.array([float(value) for value in vector["decoded"]], np.float32)
    assert same(codec.decode(coded, values.size), decoded)


def test_philox_is_the_published_one() -> None:
    """The known answers of Random123 (kat_vectors: philox4x32 7)."""

    def words(*given: int) -> Any:
        return tuple(np.array([word], np.uint64) for word in given)

    digits = codec_reference.philox(words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822)
    assert [int(word[0]) for word in digits] == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]
    zeros = codec_reference.philox(words(0, 0, 0, 0), 0)
    assert [int(word[0]) for word in zeros] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", sorted(set(Dtype) - {Dtype.F32, Dtype.F16, Dtype.BF16}))
def test_types_without_a_meaning_are_refused(kind: CodecKind, dtype: Dtype) -> None:
    codec = Codec(kind=kind)
    with pytest.raises(ArgumentError, match=f"{kind.name}: element type .*allowed: F32, F16, BF16"):
        codec.coded_bytes(1, dtype=dtype)
    with pytest.raises(ArgumentError, match="allowed"):
        codec.encode(np.zeros(4, np.int64))


def test_wrong_arguments_are_refused() -> None:
    for options in ({"kind": CodecKind.INT8, "block": 0}, {"kind": CodecKind.INT8, "block": 4_097},
                    {"kind": CodecKind.FP16, "block": 4}, {"kind": CodecKind.MX4, "block": 16},
                    {"kind": CodecKind.INT8, "block": -1}, {"kind": CodecKind.INT8, "seed": 1 << 64},
                    {"kind": CodecKind.INT8, "seed": -1}, {"kind": CodecKind.LOSSLESS, "stochastic": True},
                    {"kind": CodecKind.LOSSLESS, "block": 1}):  # fmt: skip
        with pytest.raises(ArgumentError, match="allowed"):
            Codec(**options)  # type: ignore[arg-type]
    codec = Codec(kind=CodecKind.INT8)
    values = np.ones((10, 10), np.float32)
    with pytest.raises(ArgumentError, match="C-contiguous"):
        codec.encode(values[:, ::2])
    with pytest.raises(ArgumentError, match="needed: uint16, C-contiguous"):
        codec.encode(values, dtype=Dtype.BF16)
    unaligned = np.frombuffer(bytes(41), np.uint8)[1:].view(np.float32)
    with pytest.raises(ArgumentError, match="aligned"):
        codec.encode(unaligned)
    read_only = np.zeros(100, np.float32)
    read_only.flags.writeable = False
    for residual in (np.zeros(99, np.float32), np.zeros(100), np.zeros(200, np.float32)[::2], read_only):
        with pytest.raises(ArgumentError, match="needed: 100 float32, C-contiguous, writable"):
            codec.encode(values, residual=residual)
    for index in (-1, 1 << 64):
        with pytest.raises(ArgumentError, match="first_index"):
            codec.encode(values, first_index=index)
    with pytest.raises(ArgumentError, match="codec 9; allowed: FP16, BF16"):
        Codec(kind=9)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="allowed: F16, F32"):
        codec.decode(b"", 0, dtype=Dtype.F16, result=Dtype.BF16)
    coded = codec.encode(values)
    for count in (99, 101, -1, 1 << 60):
        with pytest.raises(ArgumentError, match="elements"):
            codec.decode(coded, count)


@examples(25)
@given(codecs(), st.integers(0, 300), seeds)
def test_any_bytes_decode_to_something(codec: Codec, count: int, seed: int) -> None:
    coded = np.random.default_rng(seed).integers(0, 256, codec.coded_bytes(count), dtype=np.uint8)
    assert same(codec.decode(coded, count), codec_reference.decode(codec, coded, count))
