# SPDX-License-Identifier: Apache-2.0
"""A plan as JSON, to send it to another process."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from sennit.offload.errors import PlanError
from sennit.offload.operators import (
    BoxCox,
    Bucketize,
    Clamp,
    ClampList,
    Cross,
    Enumerate,
    FirstX,
    Log1p,
    Logit,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    SigridHash,
)
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.schema import Schema

_OPERATORS: Final[dict[str, type[Operator]]] = {
    operator.__name__: operator
    for operator in (
        *(Clamp, Log1p, Logit, BoxCox, Bucketize),
        *(SigridHash, PositiveModulus, ClampList, MapId, Enumerate, FirstX, NGram, Cross),
    )
}


def columns_as_json(columns: Mapping[str, Operator]) -> dict[str, Any]:
    """name of each computed column -> {"operator": its name, and its parameters}; a mapping is a list of pairs."""
    return {
        name: {
            "operator": type(operator).__name__,
            **{part.name: _as_json(getattr(operator, part.name)) for part in fields(operator)},
        }
        for name, operator in columns.items()
    }


def columns_from_json(content: Any) -> dict[str, Operator]:
    """Raises PlanError that names the malformed column. Whether the columns fit together is checked by
    `FeaturePlan`."""
    if not isinstance(content, dict):
        raise PlanError("columns are no JSON object")
    return {name: _operator(name, entry) for name, entry in content.items()}


def plan_as_json(plan: FeaturePlan) -> dict[str, Any]:
    """Raises PlanError for a plan that leaves rows out, whose conditions have no JSON."""
    if plan.keep:
        raise PlanError("a plan that leaves out rows; allowed: one that keeps them all")
    return {
        "schema": plan.schema.as_json(),
        "columns": columns_as_json(plan.columns),
        "dense": list(plan.dense),
        "sparse": [[table.column, table.rows] for table in plan.sparse],
    }


def plan_from_json(content: Any) -> FeaturePlan:
    """Raises PlanError or SchemaError for whatever comes from outside."""
    keys = ("schema", "columns", "dense", "sparse")
    if not isinstance(content, dict) or content.keys() != set(keys):
        raise PlanError(f"not a plan; allowed: an object with {', '.join(keys)}")
    try:
        dense = tuple(_text(name) for name in _list(content["dense"]))
        sparse = tuple(
            Sparse(column=_text(name), rows=None if rows is None else _integer(rows))
            for name, rows in map(_list, _list(content["sparse"]))
        )
    except (TypeError, ValueError):
        raise PlanError("not a plan: dense has names, and sparse has pairs of name and rows") from None
    columns = columns_from_json(content["columns"])
    return FeaturePlan(schema=Schema.from_json(content["schema"]), columns=columns, dense=dense, sparse=sparse)


def _operator(name: str, entry: Any) -> Operator:
    kind = entry.get("operator") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _OPERATORS:
        raise PlanError(f"column {name!r} has no known operator; known are {', '.join(_OPERATORS)}")
    operator = _OPERATORS[kind]
    types = typing.get_type_hints(operator)
    values = {}
    for part in fields(operator):
        if part.name not in entry:
            raise PlanError(f"column {name!r}: {kind} without {part.name}")
        try:
            values[part.name] = _READERS[types[part.name]](entry[part.name])
        except (TypeError, ValueError, OverflowError):
            raise PlanError(f"column {name!r}: the {part.name} of {kind} has the wrong type") from None
    unknown = sorted(entry.keys() - values.keys() - {"operator"})
    if unknown:
        raise PlanError(f"column {name!r}: {kind} has no {unknown[0]!r}")
    try:
        return operator(**values)
    except PlanError as error:
        raise PlanError(f"column {name!r}: {error}") from None


def _as_json(value: Any) -> Any:
    return [list(pair) for pair in value.items()] if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _real(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    return float(value)


_READERS: Final[dict[Any, Any]] = {
    str: _text,
    int: _integer,
    float: _real,
    tuple[float, ...]: lambda value: tuple(_real(number) for number in value),
    Mapping[int, int]: lambda value: {_integer(key): _integer(found) for key, found in value},
}
