# SPDX-License-Identifier: Apache-2.0
"""How algorithms cut memory: shares of a vector, chunks of a share, pieces of a local copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.plan import MAX_LOAN_BYTES, Operand, PlanBuilder

# Shares and chunks start on cache lines of the vector, so that no two ranks write to one line.
ALIGNMENT_BYTES: Final = 64
# As large as a loan may be. Chunks of this size need few steps and still fit well into a core's second-level cache.
DEFAULT_CHUNK_BYTES: Final = MAX_LOAN_BYTES
# Local copies are cut so that the executor looks at the network in between.
COPY_PIECE_BYTES: Final = 262_144


@dataclass(frozen=True, slots=True)
class Range:
    """`size_bytes` from byte `offset`."""

    offset: int
    size_bytes: int


def shares(elements: int, world: int, item_bytes: int) -> list[Range]:
    """Returns `world` nearly equal parts of a vector, in order. Each begins on a cache line, so some may be empty."""
    unit = ALIGNMENT_BYTES // item_bytes
    units = -(-elements // unit)
    bounds = [min((units * part // world) * unit, elements) * item_bytes for part in range(world + 1)]
    return [Range(low, high - low) for low, high in pairwise(bounds)]


def chunks(size_bytes: int, chunk_bytes: int) -> list[Range]:
    """Cuts a range into parts of at most `chunk_bytes`.

    An empty range gives one empty chunk, because its message is sent.
    """
    if not size_bytes:
        return [Range(0, 0)]
    return [Range(low, min(chunk_bytes, size_bytes - low)) for low in range(0, size_bytes, chunk_bytes)]


def segments(part: Range, segment_bytes: int | None) -> list[Range]:
    """Cuts a message into pieces of `segment_bytes` and a shorter last one, or not at all.

    The last piece may be empty. So ranks that expect different sizes find out even if one of them has more pieces.
    """
    if segment_bytes is None:
        return [part]
    if segment_bytes < 1:
        raise ArgumentError(f"segment_bytes {segment_bytes}; allowed: 1 or more")
    full = part.size_bytes // segment_bytes
    pieces = [Range(part.offset + index * segment_bytes, segment_bytes) for index in range(full)]
    return [*pieces, Range(part.offset + full * segment_bytes, part.size_bytes - full * segment_bytes)]


def send_part(builder: PlanBuilder, peer: int, buffer: int, part: Range, segment_bytes: int | None) -> None:
    """Adds the SEND steps for one rank's part, segment `i` as message `i`."""
    for slot, piece in enumerate(segments(part, segment_bytes)):
        builder.send(peer, slot, Operand(buffer, piece.offset), piece.size_bytes)


def recv_part(builder: PlanBuilder, peer: int, buffer: int, part: Range, segment_bytes: int | None) -> None:
    """Adds the RECV steps for what `send_part` sends."""
    for slot, piece in enumerate(segments(part, segment_bytes)):
        builder.recv(peer, slot, buffer, piece.offset, piece.size_bytes)


def check_chunk(chunk_bytes: int) -> None:
    if chunk_bytes % ALIGNMENT_BYTES or not ALIGNMENT_BYTES <= chunk_bytes <= MAX_LOAN_BYTES:
        raise ArgumentError(
            f"chunk_bytes {chunk_bytes}; allowed: multiples of {ALIGNMENT_BYTES} up to {MAX_LOAN_BYTES}"
        )


def check_counts(name: str, counts: Sequence[int], world: int) -> None:
    if len(counts) != world:
        raise ArgumentError(f"{name} has {len(counts)} entries; allowed: {world}, one for each rank")
    if min(counts, default=0) < 0:
        raise ArgumentError(f"{name} {list(counts)} has a negative entry")


def check_root(root: int, world: int) -> None:
    if not 0 <= root < world:
        raise ArgumentError(f"root {root}; allowed: 0..{world - 1}")


def places(counts: Sequence[int], item_bytes: int, first_buffer: int, in_list: bool) -> list[tuple[int, Range]]:
    """Returns (buffer, range) of every rank's part: each in its own buffer, or one after another in one buffer."""
    sizes = [count * item_bytes for count in counts]
    if in_list:
        return [(first_buffer + rank, Range(0, size)) for rank, size in enumerate(sizes)]
    offsets = accumulate(sizes, initial=0)
    return [(first_buffer, Range(offset, size)) for offset, size in zip(offsets, sizes, strict=False)]


def buffer_sizes(counts: Sequence[int], item_bytes: int, in_list: bool) -> list[int]:
    """Returns the sizes of the buffers that `places` numbers."""
    return [count * item_bytes for count in counts] if in_list else [sum(counts) * item_bytes]


def peers_after(rank: int, world: int) -> Iterator[int]:
    """Returns every other rank, the next one first, so that at any time each rank sends to a different peer."""
    return ((rank + step) % world for step in range(1, world))


def peers_before(rank: int, world: int) -> Iterator[int]:
    """Returns every other rank, in the order in which they send to `rank` (see `peers_after`)."""
    return ((rank - step) % world for step in range(1, world))


def copy_local(
    builder: PlanBuilder, source_buffer: int, source_offset: int, buffer: int, offset: int, size_bytes: int
) -> None:
    """Adds the COPY steps for a range that stays on this rank."""
    if not size_bytes:
        return
    for piece in chunks(size_bytes, COPY_PIECE_BYTES):
        source = Operand(source_buffer, source_offset + piece.offset)
        builder.copy(source, buffer, offset + piece.offset, piece.size_bytes)
