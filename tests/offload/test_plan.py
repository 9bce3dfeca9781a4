# SPDX-License-Identifier: Apache-2.0
"""Invalid schemas and plans are refused, and the error names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sennit.offload.batches import BatchLayout
from sennit.offload.errors import NotOffloadable, PlanError, SchemaError
from sennit.offload.operators import (
    Bucketize,
    Clamp,
    Cross,
    FirstX,
    KeepLength,
    KeepRange,
    Log1p,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    Sample,
    SigridHash,
)
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.split import split
from sennit.offload.xdp_source import generate

SCHEMA = Schema(
    dense=(Dense(name="price"),),
    ids=(Ids(name="user"), Ids(name="seen", length=100, is_list=True), Ids(name="liked", length=100, is_list=True)),
)


def plan(columns: dict[str, Operator] | None = None, **options: Any) -> FeaturePlan:
    return FeaturePlan(schema=SCHEMA, columns=columns or {}, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan({"a": Clamp(column="prize", low=0, high=1)}), "'a': Clamp takes 'prize', known are a, liked"),
        (lambda: plan({"a": FirstX(column="b", count=1), "b": FirstX(column="a", count=1)}), "cycle: .* <- "),
        (lambda: plan({"a": FirstX(column="price", count=1)}), "'a': FirstX takes ids, but 'price' is dense"),
        (lambda: plan({"a": Clamp(column="user", low=0, high=1)}), "Clamp takes a dense column, but 'user' holds ids"),
        (lambda: plan({"user": FirstX(column="seen", count=1)}), "'user' is a field of the schema"),
        (lambda: plan({"a": Cross(left="seen", right="liked")}), "'a': Cross: 100 × 100 = 10000 ids a row overflow"),
        (lambda: plan({"a": NGram(column="user", count=2)}), "'user' has at most 1 ids, so never 2 in a row"),
        (
            lambda: plan(sparse=(Sparse(column="user", rows=1000),)),
            "'user': ids from 0 to 4294967295 overflow a table of 1000",
        ),
        (lambda: plan(sparse=(Sparse(column="nobody"),)), "has 'nobody', known are"),
        (lambda: plan(sparse=(Sparse(column="user"), Sparse(column="user"))), "'user' is in the batch twice"),
        (lambda: plan(sparse=(Sparse(column="price"),)), "'price' of the batch is dense"),
        (lambda: plan(dense=("user",)), "'user' of the batch holds ids"),
        (lambda: plan(keep=(KeepRange(column="user", low=0, high=1),)), "'user' is no dense field"),
        (lambda: plan(keep=(KeepLength(column="user"),)), "'user' is no list"),
        (lambda: SigridHash(column="user", salt=0, max_value=0), "max_value 0; allowed: 1 to 9223372036854775807"),
        (lambda: SigridHash(column="user", salt=1 << 63, max_value=5), "salt 9223372036854775808 overflows 64 bits"),
        (lambda: PositiveModulus(column="user", divisor=-3), "divisor -3; allowed: 1 to"),
        (lambda: MapId(column="user", mapping={1: 1 << 70}), "greatest 1180591620717411303424 overflows 64 bits"),
        (lambda: Bucketize(column="price", borders=(2.0, 1.0)), "not in ascending order"),
        (lambda: Bucketize(column="price", borders=()), "0 borders; allowed: 1 to 4096"),
        (lambda: Clamp(column="price", low=2, high=1), "low 2 is above high 1"),
        (lambda: Clamp(column="price", low=float("nan"), high=1), "low nan is not in the range of float32"),
        (lambda: Log1p(column="price", bits=40), "bits 40; allowed: 10 to 24"),
        (lambda: Sample(fraction=1.5), "fraction 1.5; allowed: 0 to 1"),
        (lambda: BatchLayout(plan=plan(), batch_rows=0), "a batch of 0 rows; allowed: 1 to"),
        (lambda: BatchLayout(plan=plan(), batch_rows=8, slots=3), "3 slots; allowed: powers of two"),
        (
            lambda: BatchLayout(plan=plan(sparse=(Sparse(column="seen"),)), batch_rows=1 << 20, slots=8),
            "take .* bytes; allowed: 4294967296",
        ),
    ],
)
def test_wrong_plans_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schema(), "0 fields; allowed: 1 to 512"),
        (lambda: Schema(dense=(Dense(name="a"), Dense(name="a"))), "'a' is there twice"),
        (lambda: Schema(ids=(Ids(name="no id"),)), "'no id': allowed are names like"),
        (lambda: Schema(ids=(Ids(name="a", width_bytes=3),)), "width 3 bytes; allowed: 1, 2, 4, 8"),
        (lambda: Schema(ids=(Ids(name="a", length=0),)), "length 0; allowed: 1 to 1024"),
        (lambda: Schema(ids=(Ids(name="a", length=1024),)), "at least 4097 bytes; allowed: 3392"),
        (lambda: Schema.from_json({"label": "binary"}), "not a schema"),
    ],
)
def test_wrong_schemas_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


def test_a_schema_survives_json_and_its_number_says_what_it_is() -> None:
    assert Schema.from_json(SCHEMA.as_json()) == SCHEMA
    assert Schema.from_json(SCHEMA.as_json()).schema_id == SCHEMA.schema_id
    other = Schema(dense=SCHEMA.dense, ids=SCHEMA.ids[:-1])
    assert other.schema_id != SCHEMA.schema_id


def test_what_xdp_cannot_do_is_split_off() -> None:
    """A cross of two lists stays on the CPU, with everything computed from it. The hash of a list does not."""
    whole = plan(
        {
            "few_seen": FirstX(column="seen", count=8),
            "few_liked": FirstX(column="liked", count=8),
            "both": Cross(left="few_seen", right="few_liked"),
            "pair": SigridHash(column="both", salt=0, max_value=1000),
            "hashed": SigridHash(column="few_seen", salt=0, max_value=1000),
        },
        sparse=(Sparse(column="pair", rows=1000), Sparse(column="hashed", rows=1000)),
    )
    with pytest.raises(NotOffloadable, match=r"'pair': SigridHash cannot run in XDP: it is made of two lists.* 320 ns"):
        generate(BatchLayout(plan=whole, batch_rows=16))
    halves = split(whole, on_cpu=["both"])
    assert [table.column for table in halves.prefix.sparse] == ["few_seen", "few_liked", "hashed"]
    assert halves.rest is not None
    assert set(halves.rest.columns) == {"both", "pair"}
    assert not halves.refused
    refused = split(whole).refused
    assert [error.column for error in refused] == ["pair", "both"]
    with pytest.raises(PlanError, match="'nothing' is to be made on the CPU"):
        split(whole, on_cpu=["nothing"])
