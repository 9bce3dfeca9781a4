# SPDX-License-Identifier: Apache-2.0
"""The canonical tree against its definition by recursion, over every span of leaves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.tree import Span, balanced, combinations, cover, is_node, leaves_of


def order(low: int, high: int, leaves: int) -> str:
    """How the full subtree of leaves [low, high) is put in brackets, from the definition."""
    if low >= leaves:
        return ""
    if high - low == 1:
        return str(low)
    middle = (low + high) // 2
    left, right = order(low, middle, leaves), order(middle, high, leaves)
    return f"({left} {right})" if right else left


def full_size(leaves: int) -> int:
    return 1 << (leaves - 1).bit_length()


def run(program: tuple[int, ...], values: list[str]) -> str:
    stack: list[str] = []
    for count, value in zip(program, values, strict=True):
        stack.append(value)
        for _ in range(count):
            right = stack.pop()
            stack.append(f"({stack.pop()} {right})")
    (total,) = stack
    return total


def nodes_of(leaves: int) -> dict[Span, str]:
    """Every node of the tree and how it is put in brackets."""
    found = {}
    size = 1
    while size <= full_size(leaves):
        for low in range(0, leaves, size):
            found[Span(low, min(low + size, leaves))] = order(low, low + size, leaves)
        size *= 2
    return found


def test_six_leaves_by_hand() -> None:
    assert balanced(6) == (0, 1, 0, 2, 0, 2)
    assert run(balanced(6), list("012345")) == "(((0 1) (2 3)) (4 5))"
    assert cover(Span(1, 6), 6) == [(1, 2), (2, 4), (4, 6)]
    assert combinations((Span(0, 1), Span(1, 2), Span(2, 4), Span(4, 6)), 6) == (0, 1, 1, 1)


@pytest.mark.parametrize("leaves", range(1, 34))
def test_the_program_of_all_leaves_is_the_tree(leaves: int) -> None:
    assert run(balanced(leaves), [str(leaf) for leaf in range(leaves)]) == order(0, full_size(leaves), leaves)


@pytest.mark.parametrize("leaves", range(1, 20))
def test_spans_are_nodes_where_the_tree_has_one(leaves: int) -> None:
    nodes = nodes_of(leaves)
    for low in range(leaves):
        for high in range(low + 1, leaves + 1):
            assert is_node(Span(low, high), leaves) == (Span(low, high) in nodes)


@given(st.data(), st.integers(1, 70))
def test_nodes_put_together_are_the_tree(data: st.DataObject, leaves: int) -> None:
    """Any way to spread the leaves: each part gives its largest nodes, and all of them give the root."""
    nodes = nodes_of(leaves)
    cuts = sorted({0, leaves, *data.draw(st.lists(st.integers(0, leaves)), "cuts")})
    spans = [Span(low, high) for low, high in pairwise(cuts)]
    covers = [cover(span, leaves) for span in spans]
    for span, covering in zip(spans, covers, strict=True):
        assert [span.low, *(node.high for node in covering)] == [*(node.low for node in covering), span.high]
        assert len(covering) <= 2 * leaves.bit_length()
        # None can be replaced by a larger one.
        for left, right in pairwise(covering):
            assert Span(left.low, right.high) not in nodes
    tiles = [node for covering in covers for node in covering]
    assert run(combinations(tuple(tiles), leaves), [nodes[tile] for tile in tiles]) == nodes[Span(0, leaves)]


@pytest.mark.parametrize(
    "nodes", [[], [(0, 3)], [(0, 2), (3, 4)], [(1, 2), (2, 3)], [(2, 4), (0, 2)], [(0, 2), (1, 4)]], ids=str
)
def test_what_tiles_no_node_is_refused(nodes: list[tuple[int, int]]) -> None:
    with pytest.raises(ArgumentError, match="of 8 leaves; allowed: nodes that together are one node"):
        combinations(tuple(Span(*node) for node in nodes), 8)


def test_ranks_share_the_leaves() -> None:
    assert [leaves_of(rank, 3, 8) for rank in range(3)] == [(0, 2), (2, 5), (5, 8)]
    with pytest.raises(ArgumentError, match="2 leaves for 3 ranks; allowed: 3 or more"):
        leaves_of(0, 3, 2)
    with pytest.raises(ArgumentError, match=r"leaves 3..9; allowed: ascending, 0..8"):
        cover(Span(3, 9), 8)
