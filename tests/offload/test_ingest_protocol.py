# SPDX-License-Identifier: Apache-2.0
"""Messages between feeders and ranks: written messages can be read, and anything else is refused with a reason."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.errors import PlanError
from sennit.offload.ingest.facts import Facts, TableFacts
from sennit.offload.ingest.protocol import (
    LINE_MAX_BYTES,
    TEXT_MAX,
    VERSION,
    Apart,
    End,
    Error,
    FactsOf,
    Hello,
    LineReader,
    Message,
    Preparing,
    ProtocolError,
    Reconfigured,
    Send,
    Taken,
    Terms,
    decode,
    encode,
    error,
)
from sennit.offload.operators import ClampList, FirstX, MapId, Sample, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.plan_json import columns_as_json, columns_from_json
from sennit.offload.schema import Dense, Ids, Schema
from tests.offload.strategies import plans

FACTS = Facts(
    name="small",
    fingerprint="00ff",
    sample_count=100,
    numbering={"version": 1, "train": 90, "evaluation": 10},
    tables=(
        TableFacts(name="user", rows=50, mean_length=1.0),
        TableFacts(name="seen", rows=9, mean_length=2.5),
    ),
    dense_names=("age",),
    plan=FeaturePlan(
        schema=Schema(dense=(Dense(name="d0"),), ids=(Ids(name="t0"), Ids(name="t1", length=4, is_list=True))),
        columns={
            "c0": ClampList(column="t0", low=0, high=49),
            "x1": FirstX(column="t1", count=3),
            "c1": SigridHash(column="x1", salt=1, max_value=9),
        },
        dense=("d0",),
        sparse=(Sparse(column="c0", rows=50), Sparse(column="c1", rows=9)),
    ),
)  # fmt: skip
TERMS = Terms(
    version=VERSION,
    session=5,
    rank=1,
    world_size=2,
    endpoints=[["::1", 4800], ["::1", 4801]],
    packet_bytes=1400,
    window_packets=48,
    order={"seed": 1, "split": "random", "max_steps": None},
)
MESSAGES: list[Message] = [
    Hello(version=VERSION, feeder="one"),
    TERMS,
    Preparing(),
    Apart(),
    FactsOf(facts=FACTS.as_json()),
    Send(batch=(1 << 32) - 1, row=3),
    Taken(batch=0, row=0),
    End(),
    Reconfigured(),
    Error(text="no"),
]


@given(cuts=st.lists(st.integers(0, 4000), max_size=30))
def test_messages_come_whole_out_of_any_pieces(cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    reader = LineReader()
    found: list[Message] = []
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        found += reader.feed(stream[begin:end])
    assert found == MESSAGES


def test_facts_come_back_as_they_were() -> None:
    assert Facts.from_json(json.loads(json.dumps(FACTS.as_json()))) == FACTS


@given(plan=plans())
def test_columns_come_back_as_they_were(plan: FeaturePlan) -> None:
    written = json.loads(json.dumps(columns_as_json(plan.columns)))
    assert columns_from_json(written) == plan.columns


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "other"}, "name 'other', not 'small'"),
        ({"sample_count": 99}, "sample_count 99, not 100"),
        ({"fingerprint": "00fe"}, "fingerprint '00fe', not '00ff'"),
        ({"dense_names": ("height",)}, "dense_names"),
        ({"numbering": {}}, "numbering {}, not {'version': 1"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], words: str) -> None:
    assert words in str(Facts(**{**vars(FACTS), **change}).difference(FACTS))
    assert FACTS.difference(FACTS) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"9" * 10_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "without a known kind"),
        (b'{"kind":["end"]}', "without a known kind"),
        (b'{"kind":"stop"}', "without a known kind"),
        (b'{"kind":"end","now":1}', "unknown field 'now'"),
        (b'{"kind":"send","batch":1}', "missing field 'row'"),
        (b'{"kind":"send","batch":true,"row":0}', "batch True"),
        (b'{"kind":"send","batch":1.0,"row":0}', "batch 1.0"),
        (b'{"kind":"send","batch":-1,"row":0}', "batch -1"),
        (b'{"kind":"taken","batch":1,"row":4294967296}', "row 4294967296"),
        (b'{"kind":"hello","version":1,"feeder":""}', "feeder"),
        (b'{"kind":"facts","facts":[]}', "facts; allowed: a JSON object"),
    ],
)
def test_what_no_message_is_is_refused(line: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(line)


@pytest.mark.parametrize(
    "change",
    [
        {"endpoints": [["::1", 4800]]},
        {"endpoints": [["::1", 4800], ["::1", 0]]},
        {"endpoints": [["::1", 4800], "::1"]},
        {"rank": 2},
        {"packet_bytes": 10},
        {"window_packets": 0},
        {"order": None},
        {"run": "x"},
        {"run": None},
        {"elastic": 1},
        {"epoch": -1},
        {"preprocessing": [1]},
    ],
)
def test_terms_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    content = {**json.loads(encode(TERMS)), **change}
    with pytest.raises(ProtocolError):
        decode(json.dumps(content).encode())


def test_a_line_has_a_greatest_length() -> None:
    reader = LineReader()
    assert list(reader.feed(encode(End()) + b"x" * LINE_MAX_BYTES)) == [End()]
    with pytest.raises(ProtocolError, match=f"more than {LINE_MAX_BYTES} bytes"):
        list(reader.feed(b"x"))
    with pytest.raises(ProtocolError, match="more than 9 bytes"):
        list(LineReader(9).feed(b"x" * 10 + b"\n"))
    assert len(error("x" * 5000).text) == TEXT_MAX


@given(junk=st.binary(max_size=200))
def test_junk_is_a_protocol_error_and_nothing_else(junk: bytes) -> None:
    try:
        list(LineReader().feed(junk + b"\n"))
    except ProtocolError:
        return
    assert not junk.strip(b"\n")


@given(seed=st.integers(0, 1 << 32))
def test_facts_with_anything_wrong_are_refused_in_words(seed: int) -> None:
    """Replaces one value by another of any type. The result is refused, or it is valid and has another meaning."""
    dice = random.Random(seed)
    content = copy.deepcopy(FACTS.as_json())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(content)
    node, key = dice.choice(places)
    wrong: list[Any] = [None, True, -1, 0, 1.5, 10**30, "", "x", "t0", "é", [], {}, [[]], [1, 2], {"a": 1}, "y" * 5000]
    node[key] = dice.choice(wrong)
    if dice.random() < 0.2 and isinstance(node, dict):
        del node[key]
    with contextlib.suppress(ProtocolError):
        found = Facts.from_json(content)
        assert Facts.from_json(json.loads(json.dumps(found.as_json()))) == found


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([], "no JSON object"),
        ({"a": {"operator": "Eval", "column": "t0"}}, "column 'a' has no known operator"),
        ({"a": {"operator": "ClampList", "column": "t0", "low": 0}}, "ClampList without high"),
        ({"a": {"operator": "ClampList", "column": "t0", "low": 0, "high": "9"}}, "high of ClampList has the wrong"),
        ({"a": {"operator": "ClampList", "column": "t0", "low": 9, "high": 0}}, "column 'a': ClampList: low 9"),
        ({"a": {"operator": "Enumerate", "column": "t0", "more": 1}}, "Enumerate has no 'more'"),
        ({"a": {"operator": "MapId", "column": "t0", "mapping": [[1]], "default": 0}}, "mapping of MapId"),
        ({"a": {"operator": "Bucketize", "column": "d0", "borders": [1, True]}}, "borders of Bucketize"),
    ],
)  # fmt: skip
def test_wrong_columns_are_named(columns: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        columns_from_json(columns)


def test_a_plan_that_leaves_out_rows_is_refused() -> None:
    """Batches would not be full, and the trainer's order counts every sample."""
    plan = replace(FACTS.plan, keep=(Sample(fraction=0.5, seed=3),))
    with pytest.raises(PlanError, match="one that keeps them all, so that batches are full"):
        replace(FACTS, plan=plan)


def test_mappings_keep_their_keys() -> None:
    columns = {"m": MapId(column="t0", mapping={-1: 5, 1 << 40: 6}, default=2)}
    assert columns_from_json(json.loads(json.dumps(columns_as_json(columns)))) == columns
