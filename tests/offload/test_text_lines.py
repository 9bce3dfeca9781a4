# SPDX-License-Identifier: Apache-2.0
"""Plain lines are parsed to what pyarrow makes of them, bit by bit, and all others are left to pyarrow."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.text_lines import line_parser
from tests.extent import examples

arrow = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")

TYPES = {
    **{f"int{bits}": arrow.type_for_alias(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": arrow.type_for_alias(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"timestamp[{unit}]": arrow.timestamp(unit) for unit in ("s", "ms", "us")},
    "date32[day]": arrow.date32(),
    "double": arrow.float64(),
    "string": arrow.string(),
}


def parsed(text: str, kinds: list[str], *, nulls: tuple[str, ...] = ("",), delimiter: str = ",") -> Any:
    names = tuple(f"column{place}" for place in range(len(kinds)))
    parser = line_parser(delimiter, nulls, names, tuple(zip(names, kinds, strict=True)))
    assert parser is not None
    found = parser.parse(text.encode(), text.count("\n") + (not text.endswith("\n")))
    return None if found is None else arrow.record_batch(found)


def by_pyarrow(text: str, kinds: list[str], *, nulls: tuple[str, ...] = ("",), delimiter: str = ",") -> Any:
    """Its rows, or None if it has another number of them, or none at all."""
    names = [f"column{place}" for place in range(len(kinds))]
    types = {name: TYPES[kind] for name, kind in zip(names, kinds, strict=True)}
    try:
        table = csv.read_csv(
            arrow.BufferReader(text.encode()),
            csv.ReadOptions(column_names=names, use_threads=False),
            csv.ParseOptions(delimiter=delimiter, quote_char=False),
            csv.ConvertOptions(column_types=types, null_values=list(nulls), strings_can_be_null=True),
        )
    except arrow.ArrowInvalid:
        return None
    lines = text.count("\n") + (not text.endswith("\n"))
    return table.combine_chunks().to_batches()[0] if len(table) == lines else None


def same(one: Any, other: Any) -> bool:
    """Whether all bits are the same; -0.0 is not 0.0."""
    one.validate(full=True)
    ends = [arrow.BufferOutputStream() for _ in range(2)]
    for end, batch in zip(ends, (one, other), strict=True):
        # A slice of all rows is written as its own rows alone, without spare bits.
        with arrow.ipc.new_stream(end, batch.schema) as out:
            out.write_batch(batch.take(arrow.array(range(len(batch)))))
    return bool(one.schema == other.schema and ends[0].getvalue().equals(ends[1].getvalue()))


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-300, 300).map(str),
    st.floats().map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.text("0123456789", min_size=1, max_size=20),
    st.text("0123456789.-+eEx ", max_size=9),
)
TIMES = st.one_of(
    st.datetimes(datetime(1, 1, 1)).map(lambda at: str(at.replace(microsecond=0))),
    st.datetimes().map(lambda at: at.isoformat()),
    st.dates(date(1, 1, 1)).map(str),
    st.from_regex(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d:\d\d)?Z?", fullmatch=True).filter(str.isascii),
)
CELLS = st.one_of(NUMBERS, TIMES, st.text("ab é\r", max_size=20), st.sampled_from(["", "NULL", "-1"]))


@examples(80)
@given(st.data(), st.sampled_from(sorted(TYPES)), st.sampled_from([("",), ("", "NULL"), ("-1",), ()]))
def test_a_column_is_what_pyarrow_makes_of_it_or_is_left_to_it(
    data: st.DataObject, kind: str, nulls: tuple[str, ...]
) -> None:
    written = CELLS if kind == "string" else TIMES if kind.startswith(("time", "date")) else NUMBERS
    cells = data.draw(st.lists(written, max_size=6))
    text = "".join(f"x{place},{cell},{place}\n" for place, cell in enumerate(cells, 1))
    kinds = ["string", kind, "int8"]
    found = parsed(text, kinds, nulls=nulls) if text else None
    if found is not None:
        assert same(found, by_pyarrow(text, kinds, nulls=nulls))


@examples(60)
@given(
    st.lists(st.lists(st.text("ab1\r", max_size=70), min_size=1, max_size=3), max_size=6),
    st.integers(1, 3),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_any_text_is_read_line_by_line_or_left(lines: list[list[str]], width: int, end: str, is_ended: bool) -> None:
    text = end.join(",".join(cells) for cells in lines) + end * is_ended
    if not text:
        return
    found = parsed(text, ["string"] * width)
    expected = by_pyarrow(text, ["string"] * width)
    # A carriage return alone ends a line for pyarrow, and is left to it.
    is_plain = "\r" not in text.replace("\r\n", "")
    assert (found is None) == (expected is None or not is_plain)
    if found is not None:
        assert same(found, expected)


@pytest.mark.parametrize(("kind", "cells"), [
    ("int8", ["0", "-127", "127", "007"]),
    ("int64", ["1", "12345678", "123456789", "-9223372036854775807", "9223372036854775807", "-0"]),
    ("uint64", ["0", "9999999999999999999", "0000000000000000001"]),
    ("double", ["0", "-0", "1.5", "-0.001", "12345678", "0.1", "1e300", "1.7976931348623157e308", "5e-324",
        "123456789012345.6", "9007199254740993", "2.2250738585072014e-308"]),
    ("string", ["x", "", "0a1b2c3d", "x" * 200, "é" * 9]),
    ("timestamp[s]", ["2026-11-28 06:30:00", "2026-11-28T06:30:00", "1969-12-31", "2024-02-29", ""]),
    ("timestamp[us]", ["2026-11-28 06:30:00", "0001-01-01 00:00:00", "9999-12-31T23:59:59"]),
    ("date32[day]", ["2026-11-28", "0001-01-01"]),
])  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_programs_write_is_plain(kind: str, cells: list[str], end: str) -> None:
    """300 lines: more than are cut at once, and texts of more bytes than there is room for at first."""
    for before in ("a,", "b" * 61 + ","):
        text = "".join(f"{before}{cells[row % len(cells)]}{end}" for row in range(300))
        for whole in (text, text.removesuffix(end)):
            found = parsed(whole, ["string", kind])
            assert found is not None
            assert same(found, by_pyarrow(whole, ["string", kind]))


@pytest.mark.parametrize(("kind", "cell"), [
    ("int8", "128"), ("int8", "+1"), ("int64", "9223372036854775808"), ("uint8", "-1"), ("int64", "-"), ("int64", " 1"),
    ("int64", "0x1"), ("double", "inf"), ("double", "1e400"), ("double", "-"), ("double", "1_0"), ("double", "1.2.3"),
    ("date32[day]", "2026-02-29"), ("timestamp[s]", "2026-11-28 24:00:00"), ("timestamp[s]", "2026-11-28 06:30"),
])  # fmt: skip
def test_what_is_not_plain_is_left(kind: str, cell: str) -> None:
    assert parsed(f"a,{cell}\n", ["string", kind]) is None


def test_lines_that_are_no_rows_are_left() -> None:
    assert parsed("a,b\n", ["string", "string"]) is not None
    for text in ("a\n", "a,b,c\n", "a,b\n\n", "\na,b\n", "a,b\nc\nd,e,f\n", "a,b\rc,d\n", "a,b\r"):
        assert parsed(text, ["string", "string"]) is None, text
    parser = line_parser(",", ("",), ("a", "b"), (("b", "string"),))
    assert parser is not None
    for count in (0, 1, 3):
        assert parser.parse(b"1,2\n3,4\n", count) is None
    assert parser.parse(b"", 0) is None
    assert arrow.record_batch(parser.parse(b"1,2\n3,4", 2)).to_pydict() == {"b": ["2", "4"]}


def test_columns_in_any_order_and_memory_that_outlives_its_parser() -> None:
    parser = line_parser("\t", ("",), ("a", "b", "c"), (("c", "int64"), ("a", "string")))
    assert parser is not None
    columns = [arrow.record_batch(parser.parse(b"x\t-\t1\n\t-\t\n", 2)).column(place) for place in (1, 0)]
    del parser
    for _ in range(3):  # would take the memory that somebody else has
        line_parser.cache_clear()
        parsed("y,2\n" * 2, ["string", "int64"])
    assert [column.to_pylist() for column in columns] == [["x", None], [1, None]]


def test_types_and_delimiters_that_it_lacks() -> None:
    assert line_parser(",", ("",), ("a",), (("a", "bool"),)) is None
    assert line_parser("é", ("",), ("a",), (("a", "string"),)) is None
