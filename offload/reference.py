# SPDX-License-Identifier: Apache-2.0
"""Every operator in NumPy, written for reading. The other targets are tested against it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sennit.offload import hashing
from sennit.offload.columns import ColumnValues, DenseValues, Ragged
from sennit.offload.operators import (
    Bucketize,
    Clamp,
    ClampList,
    Cross,
    Enumerate,
    FirstX,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    SigridHash,
    TableOperator,
)
from sennit.offload.plan import Graph
from sennit.offload.tables import NAN_BITS, function_table


def evaluate(graph: Graph, sources: Mapping[str, ColumnValues], outputs: tuple[str, ...]) -> dict[str, ColumnValues]:
    """Computes the columns `outputs` of these rows."""
    values = dict(sources)
    needed = graph.needed(outputs)
    for name in graph.order:
        if name in needed:
            operator = graph.columns[name]
            values[name] = apply(operator, *(values[source] for source in operator.inputs))
    return {name: values[name] for name in outputs}


@functools.singledispatch
def apply(operator: Operator, *inputs: ColumnValues) -> ColumnValues:
    """Applies one operator to its inputs."""
    raise NotImplementedError(type(operator).__name__)


@apply.register
def _(operator: Clamp, x: DenseValues) -> DenseValues:
    low, high = np.float32(operator.low), np.float32(operator.high)
    return np.where(x < low, low, np.where(x > high, high, x))


@functools.cache
def _function_table(operator: TableOperator) -> NDArray[np.uint32]:
    return function_table(operator)


@apply.register
def _(operator: TableOperator, x: DenseValues) -> DenseValues:
    shift = 32 - operator.bits
    # Rounds half up in the last kept bit. bfloat16 differs only in ties.
    index = (x.view(np.uint32).astype(np.uint64) + np.uint64(1 << shift - 1)) >> np.uint64(shift)
    is_nan = np.isnan(x)
    found = _function_table(operator)[np.where(is_nan, np.uint64(0), index)]
    return np.where(is_nan, np.uint32(NAN_BITS), found).astype(np.uint32).view(np.float32)


@apply.register
def _(operator: Bucketize, x: DenseValues) -> Ragged:
    # NumPy sorts NaN last, which agrees with TorchArrow's comparison.
    found = np.searchsorted(np.array(operator.borders, np.float32), x, side="left")
    return Ragged(np.ones(len(x), np.int32), found.astype(np.int64))


@apply.register
def _(operator: SigridHash, ids: Ragged) -> Ragged:
    mixed = hashing.twang_mix64(ids.values.view(np.uint64))
    salt = np.full(len(mixed), operator.salt, np.int64).view(np.uint64)
    # NumPy's remainder takes the sign of the divisor, as the operator does.
    return Ragged(ids.lengths, hashing.hash_combine(salt, mixed).view(np.int64) % np.int64(operator.max_value))


@apply.register
def _(operator: PositiveModulus, ids: Ragged) -> Ragged:
    return Ragged(ids.lengths, ids.values % np.int64(operator.divisor))


@apply.register
def _(operator: ClampList, ids: Ragged) -> Ragged:
    return Ragged(ids.lengths, np.clip(ids.values, operator.low, operator.high))


@apply.register
def _(operator: MapId, ids: Ragged) -> Ragged:
    found = [operator.mapping.get(int(value), operator.default) for value in ids.values]
    return Ragged(ids.lengths, np.array(found, np.int64))


@apply.register
def _(operator: Enumerate, ids: Ragged) -> Ragged:
    return Ragged(ids.lengths, ids.positions)


@apply.register
def _(operator: FirstX, ids: Ragged) -> Ragged:
    lengths = np.minimum(ids.lengths, np.int32(operator.count))
    return Ragged(lengths, ids.values[ids.positions < operator.count])


@apply.register
def _(operator: NGram, ids: Ragged) -> Ragged:
    lengths = np.maximum(ids.lengths - np.int32(operator.count - 1), np.int32(0))
    starts = np.repeat(ids.starts, lengths) + Ragged(lengths, np.zeros(lengths.sum(), np.int64)).positions
    values = ids.values.view(np.uint64)
    combined = values[starts + operator.count - 1]
    for step in range(operator.count - 2, -1, -1):
        combined = hashing.hash_combine(values[starts + step], combined)
    return Ragged(lengths, combined.view(np.int64))


@apply.register
def _(operator: Cross, left: Ragged, right: Ragged) -> Ragged:
    lengths = left.lengths * right.lengths
    position = Ragged(lengths, np.zeros(lengths.sum(), np.int64)).positions
    width = np.repeat(right.lengths, lengths)
    a = left.values[np.repeat(left.starts, lengths) + position // width]
    b = right.values[np.repeat(right.starts, lengths) + position % width]
    return Ragged(lengths, hashing.hash_combine(a.view(np.uint64), b.view(np.uint64)).view(np.int64))
