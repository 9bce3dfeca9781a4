# SPDX-License-Identifier: Apache-2.0
"""The lossless codec: every bit comes back, native and reference write the same bytes, bad bytes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError
from sennit.transport.oracle import lossless_reference
from sennit.transport.oracle.lossless_reference import Malformed
from sennit.transport.plans.elements import Dtype
from tests.extent import examples

Array = npt.NDArray[Any]
CODEC = Codec(kind=CodecKind.LOSSLESS)
STORED = {
    Dtype.F32: np.float32, Dtype.F16: np.float16, Dtype.BF16: np.uint16, Dtype.I32: np.int32, Dtype.I64: np.int64
}  # fmt: skip
dtypes = st.sampled_from(sorted(STORED))
counts = st.one_of(st.integers(0, 300), st.sampled_from([1_000, 8_191, 8_192, 8_193, 20_000]))
seeds = st.integers(0, 1 << 30)


def elements(seed: int, count: int, dtype: Dtype, form: str) -> Array:
    random = np.random.default_rng(seed)
    if form == "noise":
        return random.integers(0, 256, count * dtype.item_bytes, dtype=np.uint8).view(STORED[dtype])
    if form == "skewed":  # bytes whose best code is longer than 11 bits: it is limited
        weights = 0.5 ** np.arange(1, 21)
        drawn = random.choice(20, count * dtype.item_bytes, p=weights / weights.sum())
        return drawn.astype(np.uint8).view(STORED[dtype])
    if form == "equal":
        return np.full(count, random.integers(0, 100)).astype(STORED[dtype])
    if dtype in (Dtype.I32, Dtype.I64):
        return (random.zipf(1.3, count) % 100_000 - (form == "signed")).astype(STORED[dtype])
    values = (random.standard_normal(count) * 1e-4).astype(np.float32)
    if dtype is Dtype.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORED[dtype])


forms = st.sampled_from(["noise", "skewed", "equal", "usual", "signed"])


@examples(40)
@given(seeds, counts, dtypes, forms)
def test_every_bit_comes_back(seed: int, count: int, dtype: Dtype, form: str) -> None:
    array = elements(seed, count, dtype, form)
    coded = CODEC.encode(array, dtype=dtype)
    blocks = -(-count // 8_192)
    assert coded.size <= CODEC.coded_bytes(count, dtype=dtype) == (count + blocks) * dtype.item_bytes
    decoded = CODEC.decode(coded, count, dtype=dtype)
    assert decoded.tobytes() == array.tobytes()
    if dtype in (Dtype.F16, Dtype.BF16):
        wide = CODEC.decode(coded, count, dtype=dtype, result=Dtype.F32)
        bits = array.view(np.uint16).astype(np.uint32) << 16
        expected = array.astype(np.float32) if dtype is Dtype.F16 else bits.view(np.float32)
        assert np.array_equal(wide, expected, equal_nan=True)


@examples(15)
@given(seeds, counts, dtypes, forms)
def test_native_is_the_reference(seed: int, count: int, dtype: Dtype, form: str) -> None:
    array = elements(seed, count, dtype, form)
    coded = CODEC.encode(array, dtype=dtype)
    assert coded.tobytes() == lossless_reference.encode(array, dtype)
    assert lossless_reference.decode(coded.tobytes(), count, dtype).tobytes() == array.tobytes()


@examples(50)
@given(st.data(), seeds, st.sampled_from([1, 40, 500, 3_000]), dtypes, st.sampled_from(["skewed", "usual", "equal"]))
def test_changed_bytes_are_refused_or_mean_what_the_reference_reads(
    data: st.DataObject, seed: int, count: int, dtype: Dtype, form: str
) -> None:
    coded = CODEC.encode(elements(seed, count, dtype, form), dtype=dtype).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        coded[data.draw(st.integers(0, min(coded.size - 1, 60)))] = data.draw(st.integers(0, 255))
    given_bytes = coded[: data.draw(st.integers(max(0, coded.size - 5), coded.size))].tobytes()
    try:
        expected = lossless_reference.decode(given_bytes, count, dtype)
    except Malformed:
        with pytest.raises(ArgumentError, match="no coded form"):
            CODEC.decode(given_bytes, count, dtype=dtype)
    else:
        assert CODEC.decode(given_bytes, count, dtype=dtype).tobytes() == expected.tobytes()


def test_golden_bytes() -> None:
    """By hand from docs/reference/codecs.md: 64 float32 of two exponents, in codes of one bit; other planes are 0."""
    array = np.where(np.arange(64) % 4 == 0, 1.0, 2.0).astype(np.float32)  # exponents 127, 128; mantissas 0
    # Exponent 127 for every fourth number: its code is 0, as that of the lower byte. Bits 0111 0111, lowest first.
    plane = "02" + "7f80" + "11" + "0200" * 4 + "eeee" * 4
    assert CODEC.encode(array).tobytes().hex() == "0100" * 3 + plane
    assert np.array_equal(CODEC.decode(bytes.fromhex("0100" * 3 + plane), 64), array)


def test_ids_and_gradients_shrink() -> None:
    """What a step sends: gradients of about one size, and ids of tables with a few thousand rows."""
    random = np.random.default_rng(1)
    gradient = (random.standard_normal(147_456) * 1e-4).astype(np.float32)
    ids = (random.zipf(1.2, 9_216) % 4_000).astype(np.int64)
    coded = CODEC.encode(gradient).size, CODEC.encode(ids).size
    assert gradient.nbytes / coded[0] > 1.15
    assert ids.nbytes / coded[1] > 5
    assert (gradient.nbytes + ids.nbytes) / sum(coded) > 1.25


def test_a_small_message_cannot_ask_for_much_memory() -> None:
    coded = CODEC.encode(np.zeros(10, np.float32))
    assert coded.size == 8
    with pytest.raises(ArgumentError, match="8 bytes are no coded form of 1000000000000 elements"):
        CODEC.decode(coded, 10**12)


@pytest.mark.parametrize("dtype", sorted(set(Dtype) - set(STORED)))
def test_types_without_a_meaning_are_refused(dtype: Dtype) -> None:
    with pytest.raises(ArgumentError, match="allowed: F32, F16, BF16, I32, I64"):
        CODEC.coded_bytes(1, dtype=dtype)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="loses nothing"):
        CODEC.encode(np.zeros(4, np.float32), residual=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="allowed: I64"):
        CODEC.decode(b"", 0, dtype=Dtype.I64, result=Dtype.F32)
