# SPDX-License-Identifier: Apache-2.0
"""A feature plan: columns computed from columns, and the columns that a batch holds. Checked on construction."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sennit.offload.columns import ColumnType, DenseType, IdsType
from sennit.offload.errors import PlanError
from sennit.offload.operators import KeepLength, KeepRange, Operator, RowFilter
from sennit.offload.schema import Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """A column of ids in the batch: the input of one embedding table."""

    column: str
    rows: int | None = None
    """Rows of the table. If given, a plan that could produce ids outside [0, rows) is refused."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph of columns, whatever its sources are."""

    sources: Mapping[str, ColumnType]
    columns: Mapping[str, Operator]
    types: Mapping[str, ColumnType] = field(init=False)
    """The type of every column, sources included."""

    order: tuple[str, ...] = field(init=False)
    """The computed columns in topological order."""

    def __post_init__(self) -> None:
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        for name, operator in self.columns.items():
            if not name.isidentifier():
                raise PlanError(f"column {name!r}: allowed are names like those of variables")
            if name in self.sources:
                raise PlanError(f"column {name!r} is a field of the schema already")
            for source in operator.inputs:
                if source not in self.columns and source not in self.sources:
                    known = ", ".join(sorted({*self.columns, *self.sources}))
                    raise PlanError(f"column {name!r}: {type(operator).__name__} takes {source!r}, known are {known}")
            sorter.add(name, *(source for source in operator.inputs if source in self.columns))
        try:
            order = tuple(sorter.static_order())
        except graphlib.CycleError as error:
            raise PlanError(f"columns depend on each other in a cycle: {' <- '.join(error.args[1])}") from None
        types = dict(self.sources)
        for name in order:
            operator = self.columns[name]
            try:
                types[name] = operator.infer(*(types[source] for source in operator.inputs))
            except PlanError as error:
                raise PlanError(f"column {name!r}: {error}") from None
        object.__setattr__(self, "types", MappingProxyType(types))
        object.__setattr__(self, "order", order)

    def needed(self, outputs: tuple[str, ...]) -> set[str]:
        """These columns and everything that they are computed from."""
        found: set[str] = set()
        waiting = list(outputs)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self.columns[name].inputs if name in self.columns else ())
        return found


@dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """What to compute from a record."""

    schema: Schema
    columns: Mapping[str, Operator] = field(default_factory=dict)
    """Name of each computed column -> operator."""

    dense: tuple[str, ...] = ()
    """The dense columns of a batch."""

    sparse: tuple[Sparse, ...] = ()
    """The columns of ids in a batch, one for each table."""

    keep: tuple[RowFilter, ...] = ()
    """A record is dropped unless all of these keep it."""

    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        sources: dict[str, ColumnType] = {part.name: DenseType() for part in self.schema.dense}
        sources |= {part.name: part.type for part in self.schema.ids}
        graph = Graph(sources=sources, columns=self.columns)
        object.__setattr__(self, "graph", graph)
        for name in self.dense:
            if not isinstance(self._type(name), DenseType):
                raise PlanError(f"dense column {name!r} of the batch holds ids")
        tables = [table.column for table in self.sparse]
        for table in self.sparse:
            found = self._type(table.column)
            if not isinstance(found, IdsType):
                raise PlanError(f"sparse column {table.column!r} of the batch is dense")
            if tables.count(table.column) > 1:
                raise PlanError(f"sparse column {table.column!r} is in the batch twice")
            if table.rows is not None and not 0 <= found.low <= found.high < table.rows:
                raise PlanError(
                    f"sparse column {table.column!r}: ids from {found.low} to {found.high} overflow a table of "
                    f"{table.rows} rows (SigridHash, PositiveModulus and ClampList bound them)"
                )
        for condition in self.keep:
            self._check_filter(condition)

    def _type(self, name: str) -> ColumnType:
        if name not in self.graph.types:
            raise PlanError(f"the batch has {name!r}, known are {', '.join(sorted(self.graph.types))}")
        return self.graph.types[name]

    def _check_filter(self, condition: RowFilter) -> None:
        kind = type(condition).__name__
        if isinstance(condition, KeepRange) and condition.column not in {part.name for part in self.schema.dense}:
            raise PlanError(f"{kind}: {condition.column!r} is no dense field of the schema")
        if isinstance(condition, KeepLength) and condition.column not in {part.name for part in self.schema.lists}:
            raise PlanError(f"{kind}: {condition.column!r} is no list of the schema")

    @property
    def outputs(self) -> tuple[str, ...]:
        """All columns of the batch, each once."""
        return tuple(dict.fromkeys([*self.dense, *(table.column for table in self.sparse)]))

    @property
    def tables(self) -> tuple[IdsType, ...]:
        """The type of each sparse column of the batch."""
        return tuple(found for table in self.sparse if isinstance(found := self.graph.types[table.column], IdsType))
