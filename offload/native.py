# SPDX-License-Identifier: Apache-2.0
"""Operators on the CPU: a graph of columns compiled to a native program that one call runs on a whole batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sennit.offload._native import Program
from sennit.offload.columns import ColumnValues, DenseType, DenseValues, Ragged
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
from sennit.offload.tables import function_table, id_table


class NativeTransform:
    """Computes columns of a graph from its sources in C++, like `reference.evaluate`."""

    def __init__(self, graph: Graph, outputs: tuple[str, ...]) -> None:
        needed = graph.needed(outputs)
        self.outputs = outputs
        self.program = Program()
        self.sources = [name for name in graph.sources if name in needed]
        self.numbers: dict[str, int] = {}
        """The number of columns in the program."""

        for name in self.sources:
            is_dense = isinstance(graph.sources[name], DenseType)
            self.numbers[name] = self.program.dense_source() if is_dense else self.program.ids_source()
        for name in graph.order:
            if name in needed:
                operator = graph.columns[name]
                self.numbers[name] = self._add(operator, *(self.numbers[source] for source in operator.inputs))

    def __call__(self, columns: Mapping[str, ColumnValues]) -> dict[str, ColumnValues]:
        """Computes the output columns of these rows."""
        sources = [_given(columns[name]) for name in self.sources]
        found = self.program.run(sources, [self.numbers[name] for name in self.outputs])
        return {name: _taken(column) for name, column in zip(self.outputs, found, strict=True)}

    def _add(self, operator: Operator, first: int, second: int = 0) -> int:
        program = self.program
        match operator:
            case Clamp():
                return program.clamp(first, float(np.float32(operator.low)), float(np.float32(operator.high)))
            case TableOperator():
                return program.look_up(first, operator.bits, function_table(operator).tolist())
            case Bucketize():
                return program.bucketize(first, np.array(operator.borders, np.float32).tolist())
            case SigridHash():
                return program.sigrid_hash(first, operator.salt, operator.max_value)
            case PositiveModulus():
                return program.positive_modulus(first, operator.divisor)
            case ClampList():
                return program.clamp_list(first, operator.low, operator.high)
            case MapId():
                table = id_table(operator)
                places = table.keys.tolist(), table.values.tolist()
                return program.map_id(first, table.multiplier, table.shift, table.probes, *places, operator.default)
            case Enumerate():
                return program.enumerate(first)
            case FirstX():
                return program.first_x(first, operator.count)
            case NGram():
                return program.ngram(first, operator.count)
            case Cross():
                return program.cross(first, second)
        raise AssertionError(f"no native {type(operator).__name__}")


_NativeColumn = DenseValues | tuple[NDArray[np.int32], NDArray[np.int64]]


def _given(values: ColumnValues) -> _NativeColumn:
    if isinstance(values, Ragged):
        return np.ascontiguousarray(values.lengths), np.ascontiguousarray(values.values)
    return np.ascontiguousarray(values)


def _taken(found: _NativeColumn) -> ColumnValues:
    return Ragged(*found) if isinstance(found, tuple) else found
