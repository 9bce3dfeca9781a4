# SPDX-License-Identifier: Apache-2.0
"""Random schemas, plans and records for hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from sennit.offload.columns import ColumnValues, DenseType, IdsType, Ragged
from sennit.offload.errors import PlanError
from sennit.offload.operators import (
    BoxCox,
    Bucketize,
    Clamp,
    ClampList,
    Cross,
    Enumerate,
    FirstX,
    KeepLength,
    KeepRange,
    Log1p,
    Logit,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    RowFilter,
    Sample,
    SigridHash,
)
from sennit.offload.plan import FeaturePlan, Graph, Sparse
from sennit.offload.records import Rows
from sennit.offload.schema import ByteOrder, Dense, DenseKind, Ids, LabelKind, Schema
from sennit.offload.sketch import DEPTH_MAX, SketchShape

int64s = st.integers(-(1 << 63), (1 << 63) - 1)
# Around zero, and at all limits.
float32s = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 1e-45, -1e-45, 3.4028234663852886e38]),
    st.floats(width=32, allow_nan=False),
)
moduli = st.one_of(
    st.integers(1, 1 << 20),
    st.sampled_from([1, 2, 1 << 31, (1 << 32) + 1, (1 << 63) - 1]),
    st.integers(1, (1 << 63) - 1),
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    dense = [Dense(name=f"d{n}", kind=draw(st.sampled_from(DenseKind))) for n in range(draw(st.integers(0, 4)))]
    ids = [
        Ids(
            name=f"s{n}",
            width_bytes=draw(st.sampled_from([1, 2, 4, 8])),
            signed=draw(st.booleans()),
            length=draw(st.sampled_from([1, 1, 2, 5, 9, 20])),
            is_list=draw(st.booleans()),
        )
        for n in range(draw(st.integers(0 if dense else 1, 5)))
    ]
    return Schema(
        dense=tuple(dense),
        ids=tuple(ids),
        label=draw(st.sampled_from(LabelKind)),
        byte_order=draw(st.sampled_from(ByteOrder)),
    )


def _ordered(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    low, high = sorted([draw(values), draw(values)])
    return low, high


def _dense_operator(draw: st.DrawFn, column: str) -> Operator:
    kind = draw(st.sampled_from([Clamp, Log1p, Logit, BoxCox, Bucketize]))
    if kind is Clamp:
        low, high = _ordered(draw, float32s)
        return Clamp(column=column, low=low, high=high)
    if kind is Bucketize:
        borders = sorted(draw(st.lists(float32s, min_size=1, max_size=20)))
        return Bucketize(column=column, borders=tuple(borders))
    if kind is BoxCox:
        return BoxCox(
            column=column, power=draw(st.sampled_from([0.0, 0.5, 2.0, -1.0])), bits=draw(st.sampled_from([12, 16]))
        )
    if kind is Logit:
        return Logit(column=column, eps=draw(st.sampled_from([1e-6, 0.1])), bits=draw(st.sampled_from([12, 17])))
    return Log1p(column=column, bits=draw(st.sampled_from([10, 16])))


def _ids_operator(draw: st.DrawFn, columns: list[str]) -> Operator:
    column = draw(st.sampled_from(columns))
    kind = draw(st.sampled_from([SigridHash, PositiveModulus, ClampList, MapId, Enumerate, FirstX, NGram, Cross]))
    if kind is SigridHash:
        return SigridHash(column=column, salt=draw(int64s), max_value=draw(moduli))
    if kind is PositiveModulus:
        return PositiveModulus(column=column, divisor=draw(moduli))
    if kind is ClampList:
        low, high = _ordered(draw, int64s)
        return ClampList(column=column, low=low, high=high)
    if kind is MapId:
        keys = st.one_of(st.integers(0, 20), int64s)
        return MapId(
            column=column, mapping=draw(st.dictionaries(keys, int64s, min_size=1, max_size=30)), default=draw(int64s)
        )
    if kind is Enumerate:
        return Enumerate(column=column)
    if kind is FirstX:
        return FirstX(column=column, count=draw(st.integers(1, 12)))
    if kind is NGram:
        return NGram(column=column, count=draw(st.integers(2, 4)))
    return Cross(left=column, right=draw(st.sampled_from(columns)))


def _filter(draw: st.DrawFn, schema: Schema) -> RowFilter:
    lists = [part.name for part in schema.lists]
    kinds = ["sample", *(["range"] if schema.dense else []), *(["length"] if lists else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "range":
        low, high = _ordered(draw, float32s)
        return KeepRange(column=draw(st.sampled_from(schema.dense)).name, low=low, high=high)
    if kind == "length":
        return KeepLength(
            column=draw(st.sampled_from(lists)), least=draw(st.integers(0, 3)), most=draw(st.integers(0, 20))
        )
    return Sample(fraction=draw(st.floats(0, 1)), seed=draw(st.integers(0, (1 << 64) - 1)))


@st.composite
def plans(draw: st.DrawFn) -> FeaturePlan:
    """Draws only valid plans: leaves out an operator that does not fit its input."""
    schema = draw(schemas())
    types = {part.name: DenseType() for part in schema.dense} | {part.name: part.type for part in schema.ids}
    columns: dict[str, Operator] = {}
    for n in range(draw(st.integers(0, 8))):
        known = Graph(sources=types, columns=columns).types
        dense = [name for name, kind in known.items() if isinstance(kind, DenseType)]
        ids = [name for name, kind in known.items() if isinstance(kind, IdsType) and kind.length <= 100]
        if dense and (not ids or draw(st.booleans())):
            operator = _dense_operator(draw, draw(st.sampled_from(dense)))
        elif ids:
            operator = _ids_operator(draw, ids)
        else:
            continue
        try:
            Graph(sources=types, columns={**columns, f"m{n}": operator})
        except PlanError:
            continue
        columns[f"m{n}"] = operator
    found = Graph(sources=types, columns=columns).types
    some = [name for name in found if draw(st.booleans())]
    return FeaturePlan(
        schema=schema,
        columns=columns,
        dense=tuple(name for name in some if isinstance(found[name], DenseType)),
        sparse=tuple(Sparse(column=name) for name in some if isinstance(found[name], IdsType)),
        keep=tuple(_filter(draw, schema) for _ in range(draw(st.integers(0, 2)))),
    )


def sketch_shapes() -> st.SearchStrategy[SketchShape]:
    """Shapes so small that ids share cells, and so dense that small batches have sampled rows."""
    return st.builds(
        SketchShape,
        width=st.sampled_from([1, 16, 4096]),
        depth=st.integers(1, DEPTH_MAX),
        one_row_in=st.sampled_from([1, 2, 8, 32]),
    )


def random_rows(schema: Schema, count: int, rng: np.random.Generator) -> Rows:
    """Returns records with every kind of number: NaN, infinities, zeros, limits of the integers."""
    columns: dict[str, ColumnValues] = {}
    specials = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x3F800000, 1], np.uint32)
    for dense in schema.dense:
        bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
        near = (rng.standard_normal(count) * 3).astype(np.float32).view(np.uint32)
        choice = rng.integers(0, 3, count)
        bits = np.where(choice == 0, bits, np.where(choice == 1, near, rng.choice(specials, count)))
        if dense.kind is DenseKind.BFLOAT16:
            bits &= np.uint32(0xFFFF0000)
        columns[dense.name] = bits.view(np.float32)
    for ids in schema.ids:
        lengths = rng.integers(0, ids.length + 1, count) if ids.is_list else np.full(count, ids.length)
        bounds = np.iinfo(ids.dtype)
        wide = rng.integers(bounds.min, bounds.max, lengths.sum(), dtype=np.int64, endpoint=True)
        narrow = rng.integers(0, 24, lengths.sum(), dtype=np.int64)
        values = np.where(rng.random(lengths.sum()) < 0.5, wide, narrow)
        columns[ids.name] = Ragged(lengths.astype(np.int32), values)
    labels = rng.integers(0, 2, count).astype(np.float32)
    return Rows(labels=labels, columns=columns)
