# SPDX-License-Identifier: Apache-2.0
"""The encoder of streams gives the samples that loading and preprocessing whole files give, however they are cut."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.arrow_columns import PartOfFile, Piece, check_types, raw_samples
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import Schema, parse_schema
from sennit.runtime.stream import encoder as encoding
from sennit.runtime.stream.encoder import Encoder

arrow = pytest.importorskip("pyarrow")

HERE = PartOfFile("clicks.parquet", "row group 3")
WORDS = ["", "a", "b", "Ulm", "Ülm", "0a1b2c3d", "x" * 31, "y" * 32, "z" * 100, "\x00"]
BYTES = [b"Ulm!", b"\xff\x00\xfe\x80", b"", b"\xc3\x28" * 40]
ID, HASH, DICTIONARY = {"rows": 9}, {"encode": "hash", "rows": 1_000, "salt": 7}, {"encode": "dictionary"}
DYNAMIC = {"encode": "dynamic", "rows": 9}
SMALL, WIDE = [0, 1, 7, 8], [0, 1, 2**31, 2**63 - 1]


class Kind(NamedTuple):
    """A way in which a column of ids may be written."""

    type: Any
    entry: dict[str, Any]
    """Its part of the schema file."""

    values: list[Any]


SINGLES = [
    Kind(arrow.int64(), ID, SMALL),
    Kind(arrow.uint8(), ID, SMALL),
    Kind(arrow.uint64(), ID, SMALL),
    Kind(arrow.int32(), {"rows": 2**33}, [0, 5, 2**31 - 1]),
    Kind(arrow.int64(), HASH, [-(2**63), -1, *WIDE]),
    Kind(arrow.uint64(), HASH, [*WIDE, 2**64 - 1]),
    Kind(arrow.int16(), HASH | {"rows": 2**40 - 1}, [-(2**15), -1, 0, 9]),
    Kind(arrow.int64(), DICTIONARY, [-(2**63), -1, *WIDE]),
    Kind(arrow.uint64(), DICTIONARY | {"min_frequency": 2}, [*WIDE, 2**64 - 2, 2**64 - 1]),
    Kind(arrow.dictionary(arrow.int8(), arrow.int64()), ID, SMALL),
    Kind(arrow.string(), HASH, WORDS),
    Kind(arrow.large_string(), HASH | {"rows": 2**40 - 1}, WORDS),
    Kind(arrow.dictionary(arrow.int8(), arrow.string()), HASH, WORDS),
    Kind(arrow.binary(), HASH, BYTES),
    Kind(arrow.large_binary(), DYNAMIC, BYTES),
    Kind(arrow.binary(4), HASH, BYTES[:2]),
    Kind(arrow.binary_view(), HASH, BYTES),
    Kind(arrow.dictionary(arrow.int8(), arrow.binary()), HASH, BYTES),
    Kind(arrow.int64(), DYNAMIC, [-(2**63), -1, *WIDE]),
    Kind(arrow.uint64(), DYNAMIC, [*WIDE, 2**64 - 1]),
    Kind(arrow.string(), DYNAMIC, WORDS),
    Kind(arrow.string(), DICTIONARY, WORDS),
    Kind(arrow.large_string(), DICTIONARY | {"min_frequency": 2}, WORDS),
    Kind(arrow.string_view(), DICTIONARY, WORDS),
    Kind(arrow.dictionary(arrow.int32(), arrow.string()), DICTIONARY, WORDS),
    Kind(arrow.null(), ID, [None]),
    Kind(arrow.null(), DICTIONARY, [None]),
]
BAGS = [
    Kind(make(kind.type), kind.entry | first, kind.values)
    for kind in SINGLES
    for make in (arrow.list_, arrow.large_list, lambda inner: arrow.list_(inner, 3))
    for first in ({}, {"first": 2})
]
NUMBERS: list[tuple[Any, list[Any]]] = [
    (arrow.float64(), [-1e30, -0.5, -0.0, 1.0, 0.1, 300.7, 1e6]),
    (arrow.float32(), [-1.0, 0.5, 3.25, 1e30]),
    (arrow.float16(), [-1.5, 0.0, 2.0]),
    (arrow.int64(), [-(2**63), -1, 0, 1, 2, 300, 2**53 + 1, 2**63 - 1]),
    (arrow.uint64(), [0, 1, 2, 300, 2**63 + 1, 2**64 - 1]),
    (arrow.int32(), [-5, 0, 1, 1000, 2**31 - 1]),
    (arrow.int8(), [-128, -1, 0, 1, 127]),
    (arrow.uint16(), [0, 1, 2**16 - 1]),
    (arrow.bool_(), [False, True]),
    (arrow.decimal128(20, 3), [Decimal("-1.5"), Decimal("0.1"), Decimal("98765432109876543.21")]),
    (arrow.null(), [None]),
]
OPERATORS: list[dict[str, Any]] = [{}, {"clamp": [0, 10]}, {"clamp": [-0.5, 1e6], "log1p": True}]
LABELS: list[tuple[Any, list[Any]]] = [
    (arrow.int8(), [0, 1]),
    (arrow.uint64(), [0, 1]),
    (arrow.float16(), [0.0, 1.0]),
    (arrow.float32(), [-0.0, 1.0]),
    (arrow.bool_(), [False, True]),
    (arrow.decimal128(9, 2), [Decimal(0), Decimal(1)]),
]


@st.composite
def tables(draw: Any) -> tuple[Any, Schema]:
    """A `pyarrow.Table` and the schema for it."""
    rows, nulls = draw(st.integers(1, 30)), draw(st.sampled_from([0.0, 0.3]))
    chance = draw(st.randoms(use_true_random=False))

    def value(kind: Any, values: list[Any], share: float) -> Any:
        if chance.random() < share:
            return None
        if not isinstance(kind, arrow.ListType | arrow.LargeListType | arrow.FixedSizeListType):
            return chance.choice(values)
        count = kind.list_size if isinstance(kind, arrow.FixedSizeListType) else chance.randrange(5)
        return [value(kind.value_type, values, share) for _ in range(count)]

    def column(kind: Any, values: list[Any], share: float = 0.0) -> Any:
        return arrow.array([value(kind, values, share) for _ in range(rows)], kind)

    content = {"clicked": column(*draw(st.sampled_from(LABELS)))}
    if weighed := draw(st.booleans()):
        content["worth"] = column(arrow.float32(), [0.0, 1.5, 8.0])
    dense, sparse = {}, {}
    for number, (kind, values) in enumerate(draw(st.lists(st.sampled_from(NUMBERS), max_size=3))):
        dense[f"d{number}"] = draw(st.sampled_from(OPERATORS))
        content[f"d{number}"] = column(kind, values, nulls)
    for number, one in enumerate(draw(st.lists(st.sampled_from(SINGLES + BAGS), min_size=1, max_size=4))):
        sparse[f"s{number}"] = one.entry
        content[f"s{number}"] = column(one.type, one.values, nulls)
    weight = {"sample_weight": "worth"} if weighed else {}
    return arrow.table(content), parse_schema({"label": "clicked", "dense": dense, "sparse": sparse} | weight)


def empty(schema: Any) -> Any:
    return arrow.RecordBatch.from_arrays([arrow.array([], field.type) for field in schema], schema=schema)


def same(ours: Batch, theirs: Batch) -> bool:
    pairs = [(ours.dense, theirs.dense), (ours.labels, theirs.labels), (ours.lengths, theirs.lengths)]
    pairs.append((ours.values, theirs.values))
    if ours.sample_weights is not None and theirs.sample_weights is not None:
        pairs.append((ours.sample_weights, theirs.sample_weights))
    alike = (ours.sample_weights is None) == (theirs.sample_weights is None)
    return alike and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@given(tables(), st.data())
def test_gives_what_loading_the_whole_gives_however_it_is_cut(made: tuple[Any, Schema], data: st.DataObject) -> None:
    table, schema = made
    raw = raw_samples("clicks", [Piece(table, HERE)], schema)
    preprocessing = Preprocessing.fit(raw, torch.arange(len(raw)) % 3 != 0)
    expected = preprocessing.apply(raw).samples()
    encoder = Encoder(schema, preprocessing)
    begin, end = sorted(data.draw(st.integers(0, len(table))) for _ in range(2))
    for first, last in ((0, len(table)), (0, begin), (begin, end), (end, len(table))):
        # Slices of one buffer, which has the other rows, too.
        (batch,) = table.slice(first, last - first).to_batches() or [empty(table.schema)]
        samples = encoder.encode(batch, HERE)
        assert [column.row_count for column in samples.columns] == [one.row_count for one in preprocessing.encodings]
        assert same(samples.batch(torch.arange(last - first)), expected.batch(torch.arange(first, last)))


@pytest.mark.parametrize("has_nulls", [False, True])
def test_texts_that_are_hashed_some_at_a_time_are_as_the_whole(has_nulls: bool) -> None:
    """Several times as many as native code hashes at once, from a row in the middle."""
    texts = [None if has_nulls and row % 7 == 3 else f"{row * row:08x}"[: row % 12] for row in range(1_500)]
    table = arrow.table({"clicked": [row % 2 for row in range(1_500)], "word": texts})
    schema = parse_schema({"label": "clicked", "sparse": {"word": HASH}})
    raw = raw_samples("clicks", [Piece(table, HERE)], schema)
    preprocessing = Preprocessing.fit(raw, torch.ones(len(raw), dtype=torch.bool))
    (batch,) = table.slice(5).to_batches()
    (found,) = Encoder(schema, preprocessing).encode(batch, HERE).columns
    (expected,) = preprocessing.apply(raw_samples("clicks", [Piece(table.slice(5), HERE)], schema)).samples().columns
    assert torch.equal(found.values, expected.values)
    assert (found.offsets is None) == (expected.offsets is None)
    if found.offsets is not None and expected.offsets is not None:
        assert torch.equal(found.offsets, expected.offsets)


def test_bytes_have_no_dictionary() -> None:
    schema = parse_schema({"label": "y", "sparse": {"s": DICTIONARY}})
    found = arrow.schema([("y", arrow.int8()), ("s", arrow.binary())])
    with pytest.raises(DataError, match=r'column s is binary; allowed .*list of these; bytes with encode = "hash"'):
        check_types("clicks.parquet", schema, found)


def test_no_usual_type_takes_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests would compare the definition with itself."""
    sparse = {f"s{number}": kind.entry for number, kind in enumerate(SINGLES + BAGS)}
    dense = {f"d{number}": OPERATORS[number % 3] for number in range(len(NUMBERS))}
    labels = {
        f"y{number}": arrow.array([values[0], values[-1], values[0]], kind)
        for number, (kind, values) in enumerate(LABELS)
    }
    schema = parse_schema({"label": [*labels], "sample_weight": "w", "dense": dense, "sparse": sparse})
    content = labels | {"w": arrow.array([0, Decimal("2.5"), 1], arrow.decimal128(9, 2))}
    content |= {
        f"d{number}": arrow.array([None, *values * 2][:3], kind) for number, (kind, values) in enumerate(NUMBERS)
    }
    for number, kind in enumerate(SINGLES + BAGS):
        values: list[Any] = [*kind.values * 3][:3]
        if isinstance(kind.type, arrow.ListType | arrow.LargeListType | arrow.FixedSizeListType):
            values = [values, None, values]
        content[f"s{number}"] = arrow.array(values, kind.type)
    batch = arrow.table(content).to_batches()[0]
    raw = raw_samples("clicks", [Piece(batch, HERE)], schema)
    encoder = Encoder(schema, Preprocessing.fit(raw, torch.tensor([True, True, False])))
    monkeypatch.setattr(encoding, "raw_samples", None)
    found = encoder.encode(batch, HERE)
    assert found.labels.tolist() == [[0.0] * len(LABELS), [1.0] * len(LABELS), [0.0] * len(LABELS)]
    assert found.sample_weights is not None
    assert found.sample_weights.tolist() == [0.0, 2.5, 1.0]


WRONG = {
    "label 2": ("y", arrow.array([0, 2], arrow.int8())),
    "label nan": ("y", arrow.array([0.0, float("nan")])),
    "label null": ("y", arrow.array([0, None], arrow.int8())),
    "weight -1": ("w", arrow.array([1.0, -1.0])),
    "weight null": ("w", arrow.array([1.0, None])),
    "weight above float32": ("w", arrow.array([1.0, 1e300])),
    "nan": ("d", arrow.array([float("nan"), None])),
    "infinite": ("d", arrow.array([1.0, float("-inf")], arrow.float32())),
    "no logarithm": ("d", arrow.array([0, -2], arrow.int64())),
    "above float32": ("e", arrow.array([1e300, 2.0])),
    "scaled beyond float32": ("e", arrow.array([3e38, 2.0])),
    "row 9": ("i", arrow.array([0, 9])),
    "row -1": ("i", arrow.array([0, -1], arrow.int8())),
    "row above int64": ("i", arrow.array([0, 2**64 - 1], arrow.uint64())),
    "row in a list behind the first": ("f", arrow.array([[0, 1, 9], []], arrow.list_(arrow.int64()))),
    "numbers for text": ("t", arrow.array([1, 2])),
    "text for numbers": ("n", arrow.array(["1", "2"])),
    "text for rows": ("i", arrow.array(["1", "2"])),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_values_are_told_as_for_whole_files(wrong: tuple[str, Any]) -> None:
    text = """
        label = "y"
        sample_weight = "w"
        dense = {d = {log1p = true}, e = {}}
        [sparse]
        i = {rows = 9}
        f = {rows = 9, first = 2}
        t = {encode = "dictionary"}
        n = {encode = "dictionary"}
    """
    schema = parse_schema(tomllib.loads(text))
    good = {
        "y": arrow.array([0, 1]),
        "w": arrow.array([1.0, 2.0]),
        "d": arrow.array([0, 1]),
        "e": arrow.array([1e-6, 2e-6]),
        "i": arrow.array([0, 8]),
        "f": arrow.array([[0], [1]]),
        "t": arrow.array(["1", "2"]),
        "n": arrow.array([1, 2]),
    }
    raw = raw_samples("clicks", [Piece(arrow.table(good), HERE)], schema)
    preprocessing = Preprocessing.fit(raw, torch.tensor([True, True]))
    batch = arrow.table(good | dict([wrong])).to_batches()[0]
    # Text that is to be a row is refused by `check_types`, so its error here is that of NumPy.
    with pytest.raises(ValueError) as whole:  # noqa: PT011
        preprocessing.apply(raw_samples(HERE.file_name, [Piece(batch, HERE)], schema)).samples()
    with pytest.raises(type(whole.value)) as piece:
        Encoder(schema, preprocessing).encode(batch, HERE)
    assert str(piece.value) == str(whole.value)


def test_nulls_of_a_file_without_types_are_those_of_the_stream() -> None:
    schema = parse_schema({"label": "y", "sparse": {"words": DICTIONARY}})
    lists = arrow.table({"y": [0, 1], "words": [["a"], None]})
    preprocessing = Preprocessing.fit(raw_samples("clicks", [Piece(lists, HERE)], schema), torch.tensor([True, True]))
    (nothing,) = arrow.table({"y": [0, 1], "words": arrow.nulls(2)}).to_batches()
    rows = torch.arange(2)
    alone = Encoder(schema, preprocessing).encode(nothing, HERE).batch(rows)
    typed = Encoder(schema, preprocessing, lists.schema).encode(nothing, HERE).batch(rows)
    assert (alone.lengths.tolist(), typed.lengths.tolist()) == ([[1, 1]], [[0, 0]])
