# SPDX-License-Identifier: Apache-2.0
"""What travels between ranks for pooled lookups: which ids, which sums, which gradients, in which order.

A *part* is the ids of one feature in one row shard. The owner of a part answers with sums: one for each of its column
shards, and for each node of the tree over row shards that it has whole. So a rank with all row shards of a table sends
one sum a bag, as with whole tables. The gradient of a feature's column shard travels once to each rank that has any of
its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sennit.runtime.sharded.features import features_of
from sennit.runtime.sharded.placement import EVERYWHERE, Placement
from sennit.runtime.sharded.tables import Shard, Table
from sennit.transport.plans.tree import Span, cover


class Part(NamedTuple):
    """Ids of a feature in a row shard."""

    feature: int
    row: int


class Sum(NamedTuple):
    """Sums of a feature's bags over a node of row shards, in one column shard."""

    feature: int
    column: int
    node: Span


class Columns(NamedTuple):
    """A feature's column shard. Each gradient belongs to one."""

    feature: int
    column: int


class Block(NamedTuple):
    """One lookup of an owner: a feature in one of its shards."""

    feature: int
    shard: Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """What one rank exchanges with its peers. Each list is in the order of the wire."""

    parts: tuple[tuple[Part, ...], ...]
    """The parts that are sent to each peer."""

    sums: tuple[tuple[Sum, ...], ...]
    """The sums that each peer answers with."""

    gradients: tuple[tuple[Columns, ...], ...]
    """The gradients that are sent to each peer."""


def routes(tables: Sequence[Table], placement: Placement, chosen: Sequence[int], peers: Sequence[int]) -> Routes:
    """The routes of the `chosen` features, by number, to each of the `peers`. All of these have the same."""
    features = features_of(tables)
    parts, sums, gradients = [], [], []
    for rank in peers:
        own_parts, own_sums, own_gradients = [], [], []
        for feature in chosen:
            number = features[feature][1]
            rows: set[int] = set()
            for column in range(tables[number].column_shards):
                of_column = [
                    row
                    for row in range(tables[number].row_shards)
                    if placement.owner_of[Shard(number, row, column)] in (rank, EVERYWHERE)
                ]
                if not of_column:
                    continue
                rows.update(of_column)
                own_gradients.append(Columns(feature, column))
                for span in _runs(of_column):
                    own_sums += [Sum(feature, column, node) for node in cover(span, tables[number].row_shards)]
            own_parts += [Part(feature, row) for row in sorted(rows)]
        parts.append(tuple(own_parts))
        sums.append(tuple(own_sums))
        gradients.append(tuple(own_gradients))
    return Routes(parts=tuple(parts), sums=tuple(sums), gradients=tuple(gradients))


def blocks_of(sums: Sequence[Sum], tables: Sequence[Table]) -> list[Block]:
    """The lookups from which an owner makes its sums: a block for each row shard of each node."""
    features = features_of(tables)
    return [
        Block(one.feature, Shard(features[one.feature][1], row, one.column))
        for one in sums
        for row in range(one.node.low, one.node.high)
    ]


def _runs(rows: Sequence[int]) -> list[Span]:
    """Contiguous runs of rising numbers."""
    runs: list[Span] = []
    for row in rows:
        if runs and runs[-1].high == row:
            runs[-1] = Span(runs[-1].low, row + 1)
        else:
            runs.append(Span(row, row + 1))
    return runs
