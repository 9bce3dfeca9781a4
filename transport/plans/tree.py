# SPDX-License-Identifier: Apache-2.0
"""The canonical order of every reduction: a balanced binary tree over leaves 0..V-1 (docs/reference/plans.md rule 1).

A *node* is a span of leaves [low, high): it starts at a multiple of a power of two, 2**k, and ends 2**k further on, or
at V if that comes first. Its value is the value of its left half combined with that of its right half; where the right
half lies beyond V, it is the value of its left half. The root is [0, V). Partial sums of nodes may be made anywhere, in
any order; a sum that is put together from nodes has the same bits whoever made them.
"""

from __future__ import annotations

from functools import cache

from sennit.transport.errors import ArgumentError
from sennit.transport.light_tuple import LightTuple


class Span(LightTuple):
    """Leaves `low` up to, not including, `high`."""

    low: int
    high: int


def is_node(span: Span, leaves: int) -> bool:
    """Whether the tree over `leaves` leaves has a node of exactly this span."""
    size = _full_size(span)
    return span.low % size == 0 and span.high in (span.low + size, leaves)


def cover(span: Span, leaves: int) -> list[Span]:
    """The largest nodes that together are `span`, from left to right: at most 2 * log2(leaves)."""
    if not 0 <= span.low <= span.high <= leaves:
        raise ArgumentError(f"leaves {span.low}..{span.high}; allowed: ascending, 0..{leaves}")
    nodes = []
    low = span.low
    while low < span.high:
        size = 1
        while low % (2 * size) == 0 and min(low + 2 * size, leaves) <= span.high and low + size < leaves:
            size *= 2
        nodes.append(Span(low, min(low + size, leaves)))
        low = nodes[-1].high
    return nodes


@cache
def combinations(nodes: tuple[Span, ...], leaves: int) -> tuple[int, ...]:
    """The postfix program that folds `nodes`, from left to right, into the node that they tile.

    Entry i is how many times the two topmost values of a stack are combined after node i was pushed. Raises
    ArgumentError if the nodes do not tile one node.
    """
    stack: list[Span] = []
    program = []
    for node in nodes:
        stack.append(node)
        count = 0
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], leaves):
            right = stack.pop()
            stack[-1] = Span(stack[-1].low, right.high)
            count += 1
        program.append(count)
    if len(stack) != 1 or not is_node(stack[0], leaves):
        spans = ", ".join(f"{node.low}..{node.high}" for node in nodes)
        raise ArgumentError(f"nodes {spans} of {leaves} leaves; allowed: nodes that together are one node")
    return tuple(program)


@cache
def balanced(leaves: int) -> tuple[int, ...]:
    """The program that folds all leaves one by one. It combines as often as a binary counter carries."""
    if not leaves:
        return ()
    return combinations(tuple(Span(leaf, leaf + 1) for leaf in range(leaves)), leaves)


def leaves_of(rank: int, world: int, leaves: int) -> Span:
    """The leaves that `rank` of `world` gives, if ranks give nearly equal numbers of `leaves` in all."""
    if leaves < world:
        raise ArgumentError(f"{leaves} leaves for {world} ranks; allowed: {world} or more, so that each rank has one")
    return Span(rank * leaves // world, (rank + 1) * leaves // world)


def given_spans(rank: int, world: int, leaves: int, *, partial: bool = False) -> list[Span]:
    """What `rank` gives, in order: its leaves, or the largest nodes that these make, if it gives partial sums."""
    span = leaves_of(rank, world, leaves)
    return cover(span, leaves) if partial else [Span(leaf, leaf + 1) for leaf in range(*span)]


def check_rows(rows: int, rank: int, world: int, leaves: int, *, partial: bool) -> None:
    """Raises ArgumentError if `rank` gives another number of rows than its leaves or partial sums."""
    spans = given_spans(rank, world, leaves, partial=partial)
    if rows == len(spans):
        return
    what = ", ".join(f"{span.low}..{span.high - 1}" for span in spans)
    if not partial:
        what = f"{spans[0].low}..{spans[-1].high - 1}"
    raise ArgumentError(
        f"rank {rank} of {world} gives {rows} {'partial sums' if partial else 'leaves'} of a tree of {leaves} leaves; "
        f"allowed: {len(spans)}, of leaves {what}"
    )


def _are_halves(left: Span, right: Span, leaves: int) -> bool:
    whole = Span(left.low, right.high)
    return left.high == right.low == whole.low + _full_size(whole) // 2 and is_node(whole, leaves)


def _full_size(span: Span) -> int:
    """Leaves of the smallest power of two that holds the span's."""
    return 1 << (span.high - span.low - 1).bit_length()
