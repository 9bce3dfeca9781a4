# SPDX-License-Identifier: Apache-2.0
"""The lossless codec of docs/reference/codecs.md in NumPy, from its definition: the reference of the native one."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sennit.transport.errors import SennitError
from sennit.transport.plans.coding import LOSSLESS_BLOCK
from sennit.transport.plans.elements import FLOATS, Dtype

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_RAW, _ONE_BYTE, _HUFFMAN = range(3)
_MAX_LENGTH: Final = 11
_STREAMS: Final = 4


class Malformed(SennitError):
    """These bytes are no coded form of so many elements."""


def encode(array: Array, dtype: Dtype) -> bytes:
    """Returns what `Codec.encode` with LOSSLESS returns."""
    width = dtype.item_bytes
    words = array.reshape(-1).view(f"<u{width}")
    if dtype in FLOATS:
        words = words << 1 | words >> 8 * width - 1
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, width)
    out = bytearray()
    for start in range(0, len(planes), LOSSLESS_BLOCK):
        for plane in planes[start : start + LOSSLESS_BLOCK].T:
            out += _encode_plane(np.ascontiguousarray(plane))
    return bytes(out)


def decode(coded: bytes, count: int, dtype: Dtype) -> Bytes:
    """Returns the bytes of the elements. Raises Malformed."""
    width = dtype.item_bytes
    planes = np.empty((count, width), np.uint8)
    at = 0
    for start in range(0, count, LOSSLESS_BLOCK):
        length = min(LOSSLESS_BLOCK, count - start)
        for plane in range(width):
            planes[start : start + length, plane], at = _decode_plane(coded, at, length)
    if at != len(coded):
        raise Malformed
    words = planes.reshape(-1).view(f"<u{width}")
    if dtype in FLOATS:
        words = words >> 1 | words << 8 * width - 1
    return np.ascontiguousarray(words).view(np.uint8)


def lengths_of(counts: dict[int, int]) -> dict[int, int]:
    """The length of each byte's code: Huffman's, with counts halved until none is longer than 11."""
    while True:
        # (weight, the bytes below it); leaves by weight and byte, pairs in the order of their making.
        leaves = [(count, [byte]) for count, byte in sorted((count, byte) for byte, count in counts.items())]
        pairs: list[tuple[int, list[int]]] = []
        lengths = dict.fromkeys(counts, 0)
        while len(leaves) + len(pairs) > 1:
            chosen = []
            for _ in range(2):
                takes_leaf = leaves and (not pairs or leaves[0][0] <= pairs[0][0])
                chosen.append((leaves if takes_leaf else pairs).pop(0))
            below = chosen[0][1] + chosen[1][1]
            for byte in below:
                lengths[byte] += 1
            pairs.append((chosen[0][0] + chosen[1][0], below))
        if max(lengths.values()) <= _MAX_LENGTH:
            return lengths
        counts = {byte: (count + 1) // 2 for byte, count in counts.items()}


def codes_of(lengths: dict[int, int]) -> dict[int, str]:
    """The canonical code (RFC 1951, section 3.2.2): bits, the first one first."""
    codes, code, before = {}, 0, 0
    for length, byte in sorted((length, byte) for byte, length in lengths.items()):
        code <<= length - before
        codes[byte] = f"{code:0{length}b}"
        code, before = code + 1, length
    return codes


def _stream_borders(count: int) -> list[int]:
    return [min(stream * ((count + 3) // _STREAMS), count) for stream in range(_STREAMS + 1)]


def _encode_plane(plane: Bytes) -> bytes:
    if (plane == plane[0]).all():
        return bytes([_ONE_BYTE, plane[0]])
    raw = bytes([_RAW]) + plane.tobytes()
    counts = {byte: int(count) for byte, count in enumerate(np.bincount(plane)) if count}
    lengths = lengths_of(counts)
    first, last = min(lengths), max(lengths)
    bits = sum(counts[byte] * lengths[byte] for byte in counts)
    head_bytes = 2 + (last - first + 2) // 2 + 2 * _STREAMS
    if head_bytes + bits // 8 + _STREAMS + max(8, plane.size // 32) > plane.size:
        return raw
    halves = [lengths.get(byte, 0) for byte in range(first, last + 1)] + [0]
    head = bytes([first, last]) + bytes(low | high << 4 for low, high in zip(halves[0:-1:2], halves[1::2], strict=True))
    codes = codes_of(lengths)
    borders = _stream_borders(plane.size)
    streams = []
    for low, high in pairwise(borders):
        stream = "".join(codes[byte] for byte in plane[low:high].tolist())
        streams.append(np.packbits(np.array([*stream], "u1"), bitorder="little").tobytes())
    sizes = struct.pack("<4H", *(len(stream) for stream in streams))
    return bytes([_HUFFMAN]) + head + sizes + b"".join(streams)


def _take(coded: bytes, at: int, size: int) -> tuple[bytes, int]:
    if len(coded) - at < size:
        raise Malformed
    return coded[at : at + size], at + size


def _decode_plane(coded: bytes, at: int, count: int) -> tuple[Bytes, int]:
    (form,), at = _take(coded, at, 1)
    if form == _RAW:
        raw, at = _take(coded, at, count)
        return np.frombuffer(raw, np.uint8), at
    if form == _ONE_BYTE:
        (byte,), at = _take(coded, at, 1)
        return np.full(count, byte, np.uint8), at
    if form != _HUFFMAN:
        raise Malformed
    (first, last), at = _take(coded, at, 2)
    if first > last:
        raise Malformed
    halves, at = _take(coded, at, (last - first + 2) // 2)
    lengths = {}
    for byte in range(first, last + 1):
        length = halves[(byte - first) // 2] >> 4 * ((byte - first) % 2) & 15
        if length > _MAX_LENGTH:
            raise Malformed
        if length:
            lengths[byte] = length
    if sum(2.0**-length for length in lengths.values()) != 1:
        raise Malformed
    byte_of = {code: byte for byte, code in codes_of(lengths).items()}
    packed, at = _take(coded, at, 2 * _STREAMS)
    streams = []
    for size in struct.unpack("<4H", packed):
        stream, at = _take(coded, at, size)
        streams.append(stream)
    found = []
    borders = _stream_borders(count)
    for stream, (low, high) in zip(streams, pairwise(borders), strict=True):
        bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little").tolist()
        used, code = 0, ""
        # Zeros follow the end, so that a code that reads beyond the end is known to be too long.
        for _ in range(high - low):
            while code not in byte_of:
                code += str(bits[used]) if used < len(bits) else "0"
                used += 1
            found.append(byte_of[code])
            code = ""
        if -(-used // 8) != len(stream):
            raise Malformed
    return np.array(found, np.uint8), at
