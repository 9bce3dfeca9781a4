# SPDX-License-Identifier: Apache-2.0
"""The hash of text against published values and a second implementation, and what native columns refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload import arrow_columns
from sennit.offload.arrow_columns import SamplesInMemory

arrow = pytest.importorskip("pyarrow")

PRIMES = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)
MASK = 2**64 - 1


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, as doc/xxhash_spec.md of github.com/Cyan4973/xxHash describes it."""
    one, two, three, four, five = PRIMES

    def rotate(number: int, bits: int) -> int:
        return (number << bits | number >> (64 - bits)) & MASK

    def rounded(sum_: int, word: int) -> int:
        return rotate((sum_ + word * two) & MASK, 31) * one & MASK

    def word(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    at = 0
    if len(data) < 32:
        all_ = five
    else:
        sums = [(one + two) & MASK, two, 0, -one & MASK]
        for at in range(0, len(data) - 31, 32):
            sums = [rounded(sum_, word(at + 8 * lane, 8)) for lane, sum_ in enumerate(sums)]
        at += 32
        all_ = sum(rotate(sum_, bits) for sum_, bits in zip(sums, (1, 7, 12, 18), strict=True)) & MASK
        for sum_ in sums:
            all_ = ((all_ ^ rounded(0, sum_)) * one + four) & MASK
    all_ = (all_ + len(data)) & MASK
    while len(data) - at >= 8:
        all_ = (rotate(all_ ^ rounded(0, word(at, 8)), 27) * one + four) & MASK
        at += 8
    if len(data) - at >= 4:
        all_ = (rotate(all_ ^ (word(at, 4) * one & MASK), 23) * two + three) & MASK
        at += 4
    for byte in data[at:]:
        all_ = rotate(all_ ^ (byte * five & MASK), 11) * one & MASK
    all_ = (all_ ^ all_ >> 33) * two & MASK
    all_ = (all_ ^ all_ >> 29) * three & MASK
    return all_ ^ all_ >> 32


def ids(*texts: str) -> list[int]:
    found = arrow_columns.text_ids(arrow.array(texts, arrow.large_string()))
    return [int(number) for number in found.view(np.uint64)]


def test_text_has_the_published_hash() -> None:
    """The first is of the specification; the others are of the READMEs and tests of xxhash for Python and Go."""
    assert ids("", "a", "abc", "Nobody inspects the spammish repetition") == [
        0xEF46DB3751D8E999,
        0xD24EC4F1A98C6E5B,
        0x44BC2CF5AD770999,
        0xFBCEA83C8A378BF1,
    ]


@given(st.lists(st.text(max_size=80), max_size=5))
def test_text_of_any_length_has_the_hash_of_the_specification(texts: list[str]) -> None:
    assert ids(*texts) == [xxh64(text.encode()) for text in texts]
    assert [arrow_columns.content_hash(text.encode()) for text in texts] == ids(*texts)


def test_a_batch_has_only_samples_that_there_are() -> None:
    ids, dense = np.array([5, 6], np.int32), np.array([[0.5, 1.5], [2.5, 3.5]], np.float32)
    samples = SamplesInMemory(dense, [(ids, None), (ids, np.array([0, 0, 2]))])
    assert [part.tolist() for part in samples.gather(np.array([1, 1, 0]))] == [
        [[2.5, 3.5], [2.5, 3.5], [0.5, 1.5]],
        [[1, 1, 1], [2, 2, 0]],
        [6, 6, 5, 5, 6, 5, 6],
    ]
    for row in (-1, 2):
        with pytest.raises(IndexError, match=rf"sample {row}; allowed: \[0, 2\)"):
            samples.gather(np.array([0, row]))
    with pytest.raises(ValueError, match="2 ids; allowed: 3"):
        SamplesInMemory(np.empty((3, 1), np.float32), [(ids, None)])
    with pytest.raises(ValueError, match="offsets of another number of samples"):
        SamplesInMemory(dense, [(ids, np.array([0, 2]))])


def test_only_columns_of_64_bits_and_large_text_are_vocabularies() -> None:
    with pytest.raises(ValueError, match="a vocabulary of format u; allowed: l, L and U"):
        arrow_columns.vocabulary(arrow.array(["a"]))
