# SPDX-License-Identifier: Apache-2.0
"""Splits a plan: XDP runs what it can, the CPU computes the rest from XDP's columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sennit.offload.batches import BatchLayout
from sennit.offload.columns import DenseType
from sennit.offload.errors import NotOffloadable, PlanError
from sennit.offload.plan import FeaturePlan, Graph, Sparse
from sennit.offload.xdp_source import generate


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Two halves that together make the batch of the whole plan."""

    prefix: FeaturePlan
    """The part for XDP. Its batches hold the columns that the rest starts from."""

    rest: Graph | None
    """The part for the CPU: from the prefix's columns to the plan's columns. None if XDP can run everything."""

    dense: tuple[str, ...]
    """The dense columns of the whole plan."""

    sparse: tuple[Sparse, ...]
    """The sparse columns of the whole plan."""

    refused: tuple[NotOffloadable, ...]
    """Columns that XDP cannot compute, and why."""


def split(plan: FeaturePlan, *, on_cpu: Iterable[str] = ()) -> SplitPlan:
    """`on_cpu` names columns that the CPU computes even if XDP could."""
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


def _divide(plan: FeaturePlan, moved: set[str]) -> tuple[FeaturePlan, Graph | None]:
    graph = plan.graph
    # Columns that depend on a moved column move too.
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
    prefix = FeaturePlan(
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
