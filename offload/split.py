# SPDX-License-Identifier: Apache-2.0
"""Splits a plan: what XDP can do runs there, the rest on the CPU over the columns that come out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sennit.offload.batches import BatchLayout
from sennit.offload.columns import DenseType
from sennit.offload.errors import NotOffloadable, PlanError
from sennit.offload.plan import Graph, Plan, Sparse
from sennit.offload.xdp_source import generate


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Two halves that make the same batch as the whole."""

    prefix: Plan
    """For XDP. Its batches have the columns that the rest begins with."""

    rest: Graph | None
    """For the CPU: from the prefix's columns to the whole plan's. None if XDP can do it all."""

    dense: tuple[str, ...]
    """The dense columns of the whole plan."""

    sparse: tuple[Sparse, ...]
    """The sparse columns of the whole plan."""

    refused: tuple[NotOffloadable, ...]
    """What XDP cannot do, and why."""


def split(plan: Plan, *, on_cpu: Iterable[str] = ()) -> SplitPlan:
    """`on_cpu` names columns that are to be made on the CPU even where XDP could."""
    moved, refused = set(on_cpu), []
    unknown = moved - plan.columns.keys()
    if unknown:
        raise PlanError(
            f"column {min(unknown)!r} is to be made on the CPU, known are {', '.join(sorted(plan.columns))}"
        )
    while True:
        prefix, rest = _divide(plan, moved)
        try:
            generate(BatchLayout(plan=prefix, batch_rows=1, slots=1))
        except NotOffloadable as error:
            moved.add(error.column)
            refused.append(error)
            continue
        return SplitPlan(prefix=prefix, rest=rest, dense=plan.dense, sparse=plan.sparse, refused=tuple(refused))


def _divide(plan: Plan, moved: set[str]) -> tuple[Plan, Graph | None]:
    graph = plan.graph
    # Whatever is made of a moved column moves too.
    later = set(moved)
    for name in graph.order:
        if later & set(graph.columns[name].inputs):
            later.add(name)
    needed = graph.needed(plan.outputs)
    later &= needed
    if not later:
        return plan, None
    border = [name for name in graph.types if name in needed and name not in later]
    border = [name for name in border if name in plan.outputs or _feeds(graph, name, later)]
    kept = graph.needed(tuple(border))
    prefix = Plan(
        schema=plan.schema,
        columns={name: plan.columns[name] for name in graph.order if name in kept},
        dense=tuple(name for name in border if isinstance(graph.types[name], DenseType)),
        sparse=tuple(Sparse(column=name) for name in border if not isinstance(graph.types[name], DenseType)),
        keep=plan.keep,
    )
    sources = {name: graph.types[name] for name in border}
    return prefix, Graph(sources=sources, columns={name: plan.columns[name] for name in graph.order if name in later})


def _feeds(graph: Graph, name: str, later: set[str]) -> bool:
    return any(name in graph.columns[column].inputs for column in later)
