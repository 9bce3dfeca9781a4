# SPDX-License-Identifier: Apache-2.0
"""How algorithms cut memory: shares of a vector, chunks of a share, and parts whose sizes are counts of the post."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.plan import MAX_LOAN_BYTES, Operand, PlanBuilder
from sennit.transport.plans.vector_cut import LINE_BYTES, share_bounds

# Shares and chunks start on cache lines of the vector, so that no two ranks write to one line.
ALIGNMENT_BYTES: Final = LINE_BYTES
# A loan must hold a chunk. Chunks of this size need few steps and still fit well into a core's second-level cache. Over
# UDP each is two full sends: of 15 packets of 4,096 bytes, or of 3 packets of 20,480. A third, short send of each chunk
# would cost as many system calls again at both ends.
DEFAULT_CHUNK_BYTES: Final = 122_880


class Range(LightTuple):
    """`size_bytes` from byte `offset`."""

    offset: int
    size_bytes: int


def shares(elements: int, world: int, item_bytes: int) -> list[Range]:
    """Returns `world` nearly equal parts of a vector, in order. Each begins on a cache line, so some may be empty."""
    bounds = share_bounds(elements, world, item_bytes)
    return [Range(low * item_bytes, (high - low) * item_bytes) for low, high in pairwise(bounds)]


def chunks(size_bytes: int, chunk_bytes: int) -> list[Range]:
    """Cuts a range into parts of at most `chunk_bytes`.

    An empty range gives one empty chunk, because its message is sent.
    """
    if not size_bytes:
        return [Range(0, 0)]
    return [Range(low, min(chunk_bytes, size_bytes - low)) for low in range(0, size_bytes, chunk_bytes)]


def check_chunk(chunk_bytes: int) -> None:
    if chunk_bytes % ALIGNMENT_BYTES or not ALIGNMENT_BYTES <= chunk_bytes <= MAX_LOAN_BYTES:
        raise ArgumentError(
            f"chunk_bytes {chunk_bytes}; allowed: multiples of {ALIGNMENT_BYTES} up to {MAX_LOAN_BYTES}"
        )


def check_counts(counts: Sequence[int], world: int) -> None:
    if len(counts) != world:
        raise ArgumentError(f"counts has {len(counts)} entries; allowed: {world}, one for each rank")
    if min(counts, default=0) < 0:
        raise ArgumentError(f"counts {list(counts)} has a negative entry")


def check_world(world: int) -> None:
    if world < 2:
        raise ArgumentError(f"world {world}; allowed: 2 or more")


def check_root(root: int, world: int) -> None:
    if not 0 <= root < world:
        raise ArgumentError(f"root {root}; allowed: 0..{world - 1}")


class Part(LightTuple):
    """`size_bytes` from byte `offset` of `buffer`; both may be ranges of counts."""

    buffer: int
    offset: int
    size_bytes: int


def counted_parts(world: int, *, first_count: int, first_buffer: int, in_list: bool) -> list[Part]:
    """Every rank's part, as large as its count: each in its own buffer, or one after another in one buffer.

    Rank 0's count is number `first_count`, and its part begins buffer `first_buffer`.
    """
    parts = []
    for rank in range(world):
        count = first_count + rank
        offset = CountRange(count if in_list else first_count, count)
        parts.append(Part(first_buffer + (rank if in_list else 0), offset, CountRange(count, count + 1)))
    return parts


def counted_buffers(world: int, *, first_count: int, in_list: bool) -> list[int]:
    """Sizes of the buffers that `counted_parts` numbers."""
    if in_list:
        return [CountRange(count, count + 1) for count in range(first_count, first_count + world)]
    return [CountRange(first_count, first_count + world)]


def send_part(builder: PlanBuilder, peer: int, part: Part) -> None:
    """Sends `part` as the only message to `peer`."""
    builder.send(peer, 0, Operand(part.buffer, part.offset), part.size_bytes)


def recv_part(builder: PlanBuilder, peer: int, part: Part) -> None:
    """Receives what `send_part` sends."""
    builder.recv(peer, 0, part.buffer, part.offset, part.size_bytes)


def copy_part(builder: PlanBuilder, source: Part, target: Part) -> None:
    """Copies a part that stays on this rank."""
    builder.copy(Operand(source.buffer, source.offset), target.buffer, target.offset, target.size_bytes)


def places(counts: Sequence[int], item_bytes: int, in_list: bool) -> list[Part]:
    """Every rank's part where counts are fixed: each in its own buffer, or one after another in one buffer."""
    sizes = [count * item_bytes for count in counts]
    if in_list:
        return [Part(rank, 0, size) for rank, size in enumerate(sizes)]
    return [Part(0, offset, size) for offset, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def buffer_sizes(counts: Sequence[int], item_bytes: int, in_list: bool) -> list[int]:
    """Returns the sizes of the buffers that `places` numbers."""
    return [count * item_bytes for count in counts] if in_list else [sum(counts) * item_bytes]


def peers_after(rank: int, world: int) -> Iterator[int]:
    """Returns every other rank, the next one first, so that at any time each rank sends to a different peer."""
    return ((rank + step) % world for step in range(1, world))


def peers_before(rank: int, world: int) -> Iterator[int]:
    """Returns every other rank, in the order in which they send to `rank` (see `peers_after`)."""
    return ((rank - step) % world for step in range(1, world))
