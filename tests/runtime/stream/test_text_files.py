# SPDX-License-Identifier: Apache-2.0
"""Text files as blocks of rows: they read as pyarrow reads them, and what is wrong is named by line and column."""

from __future__ import annotations

import csv as python_csv
import gzip
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import CODECS, DataFile
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.data.text_format import CRITEO_COLUMNS, TextFormat
from sennit.runtime.stream import text_file
from sennit.runtime.stream.index import StreamIndex, open_index
from tests.extent import examples

arrow = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
fsspec = pytest.importorskip("fsspec")

COLUMNS = ("clicked", "price", "city")
TYPES = {"clicked": arrow.int64(), "price": arrow.float64(), "city": arrow.string()}
FORM = TextFormat(types=TYPES)
ROWS = 500


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "BLOCK_BYTES", 1024)


def line(row: int) -> str:
    return f"{row % 2},{'' if row % 7 == 0 else row / 4},{'NA' if row % 5 == 0 else f'city {row}'}"


LINES = [line(row) for row in range(ROWS)]


def write(path: Path, lines: list[str], end: str = "\n", header: str | None = "clicked,price,city") -> str:
    text = "".join(f"{one}{end}" for one in [*([] if header is None else [header]), *lines]).encode()
    path.write_bytes(packed(text, path.name))
    return str(path)


def packed(text: bytes, name: str) -> bytes:
    codec = CODECS.get(Path(name).suffix.lower())
    if codec is None:
        return text
    with arrow.BufferOutputStream() as found:
        with arrow.CompressedOutputStream(found, codec) as stream:
            stream.write(text)
        content: bytes = found.getvalue().to_pybytes()
    return content


def read(index: StreamIndex, begin: int = 0, end: int | None = None, columns: tuple[str, ...] = COLUMNS) -> Any:
    end = index.sample_count if end is None else end
    batches = [batch for _, batch in index.read(begin, end, columns)]
    return [row for batch in batches for row in batch.to_pylist()]


def peer(text: str, types: dict[str, Any] | None = None, **parse: Any) -> Any:
    """The rows as pyarrow reads them. Empty is null, and "NA" is a city."""
    convert = csv.ConvertOptions(column_types=types or TYPES, null_values=[""], strings_can_be_null=True)
    return csv.read_csv(arrow.BufferReader(text.encode()), None, csv.ParseOptions(**parse), convert)


@pytest.fixture(
    scope="module", params=["part.csv", "part.csv.gz", "part.csv.zst", "part.csv.bz2", "memory://text/part.csv.gz"]
)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamIndex]:
    path = tmp_path_factory.mktemp("text") / request.param.rpartition("/")[2]
    url = write(path, LINES)
    if "memory" in request.param:
        url = request.param
        with fsspec.open(url, "wb") as stream:
            stream.write(path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK_BYTES", 1024)
        yield open_index([url], COLUMNS, text=FORM)
    if "memory" in request.param:
        fsspec.filesystem("memory").rm("/text", recursive=True)


@examples(20)
@given(st.integers(0, ROWS), st.integers(0, ROWS), st.permutations(COLUMNS), st.integers(1, 3))
def test_any_rows_are_those_of_the_text(
    index: StreamIndex, one: int, other: int, columns: tuple[str, ...], count: int
) -> None:
    begin, end = sorted((one, other))
    columns = tuple(columns[:count])
    whole = peer("\n".join(["clicked,price,city", *LINES])).select(columns).slice(begin, end - begin).to_pylist()
    assert read(index, begin, end, columns) == whole
    assert read(pickle.loads(pickle.dumps(index)), begin, end, columns) == whole


def test_a_block_is_some_whole_lines(index: StreamIndex) -> None:
    assert index.block_count > 5
    assert index.sample_count == ROWS
    for row in (0, 1, 77, ROWS - 1):
        assert str(index.place(row)).endswith(f"line {row + 2}")
    assert index.place(77).of("city").endswith(": column city, line 79")


@given(st.integers(40, 300), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(0, 3))
@examples(20)
def test_blocks_of_any_size_have_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, size: int, end: str, is_ended: bool, empty: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "part.csv"
    text = end.join(["clicked,price,city", *LINES[:20]]) + (end * (1 + empty) if is_ended else "")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK_BYTES", size)
        found = open_index([str(path)], COLUMNS, text=FORM)
        assert read(found) == peer(text).to_pylist()
        assert all(rows > 0 for rows in found.files[0].block_rows)
        assert str(found.place(19)).endswith("line 21")


CELLS = st.text(st.sampled_from("ab ,;\"'\té"), max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=12), st.sampled_from(",;\t"), st.integers(16, 200))
@examples(50)
def test_text_reads_as_the_csv_module_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, ...]], delimiter: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "part.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        python_csv.writer(stream, delimiter=delimiter).writerows([COLUMNS, *cells])
    form = TextFormat(delimiter=delimiter, types=dict.fromkeys(COLUMNS, "string"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK_BYTES", size)
        found = read(open_index([str(path)], COLUMNS, text=form))
    assert [tuple(row.values()) for row in found] == [tuple(cell or None for cell in row) for row in cells]


@given(st.lists(st.text(st.sampled_from('a",\r'), max_size=8), max_size=12), st.integers(1, 40), st.integers(0, 12))
@examples(50)
def test_any_text_is_read_line_by_line_or_named(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, skip: int
) -> None:
    """Each line is a row by itself, or a broken one. Whatever comes before and after it changes nothing."""
    folder = tmp_path_factory.mktemp("text")
    form = TextFormat(names=("a", "b"), types={"a": "string", "b": "string"}, skip_broken=skip)

    def rows_of(content: list[str]) -> Any:
        (folder / "part.csv").write_text("\n".join(content), newline="")
        try:
            return read(open_index([str(folder)], ("a", "b"), text=form), columns=("a", "b"))
        except DataError:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "BLOCK_BYTES", size)
        found = rows_of(lines)
        while lines and not lines[-1].strip("\r"):
            lines.pop()
        alone = [rows_of([line]) if line.strip("\r") else None for line in lines]
        if found is not None:
            assert found == [row for rows in alone if rows for row in rows]
            assert len(found) >= len(lines) - skip
        else:
            assert None in alone or not lines


def test_the_digest_is_of_the_rows(tmp_path: Path) -> None:
    first = open_index([write(tmp_path / "a.csv", LINES)], COLUMNS, text=FORM)
    packed = open_index([write(tmp_path / "b.csv.gz", LINES)], COLUMNS, text=FORM)
    other = open_index([write(tmp_path / "c.csv", [*LINES[:-1], line(ROWS)])], COLUMNS, text=FORM)
    assert packed.fingerprint == first.fingerprint != other.fingerprint
    assert packed.is_sequential
    assert not first.is_sequential


CRITEO_SCHEMA = {
    "label": "label",
    "dense": ["I1", "I13"],
    "sparse": {"C1": {"encode": "dictionary"}, "C26": {"encode": "hash", "rows": 100}},
    "text": "criteo",
}


def test_criteo(tmp_path: Path) -> None:
    """The file's name does not say its format. Categories that are digits alone are text."""
    rows = [
        [str(row % 2), *["" if row % 3 == 0 else str(row - 5)] * 13, *(f"{row + 2**31 + n:08x}" for n in range(26))]
        for row in range(9)
    ]
    rows[4][14] = ""
    rows[5][14] = '"'
    path = write(tmp_path / "day_0.gz", ["\t".join(row) for row in rows], header=None)
    schema = parse_schema(CRITEO_SCHEMA)
    index = open_index([path], schema.columns, text=schema.text_format)
    assert str(index.schema.field("C26").type) == "string"
    text = "\n".join("\t".join(row) for row in [list(CRITEO_COLUMNS), *rows])
    types = {"I1": arrow.float64(), "C1": arrow.string(), "C26": arrow.string()}
    whole = peer(text, types, delimiter="\t", quote_char=False).select(schema.columns)
    assert read(index, columns=tuple(schema.columns)) == whole.to_pylist()


def test_a_schema_says_what_text_is_like() -> None:
    form = parse_schema({**CRITEO_SCHEMA, "text": {"format": "criteo", "skip_broken": 3}}).text_format
    assert (form.skip_broken, form.names, form.delimiter) == (3, CRITEO_COLUMNS, "\t")
    known = {"label": "float64", "I1": "float64", "I13": "float64", "C1": "string"}
    assert {name: form.types[name] for name in [*known, "C26"]} == {**known, "C26": "string"}
    given = {"delimiter": ";", "quote": "", "names": ["label", "I1", "I13", "C1", "C26"], "nulls": ["NULL", ""]}
    form = parse_schema({**CRITEO_SCHEMA, "text": given}).text_format
    assert (form.delimiter, form.quote, form.nulls, form.types) == (";", None, ("NULL", ""), known)
    form = parse_schema({**CRITEO_SCHEMA, "text": {"types": {"C1": "int64", "at": "timestamp[s]"}}}).text_format
    assert form.types == {**known, "C1": "int64", "at": "timestamp[s]"}
    assert hash(parse_schema(CRITEO_SCHEMA)) == hash(parse_schema(CRITEO_SCHEMA))


def test_what_stands_for_null(tmp_path: Path) -> None:
    path = write(tmp_path / "part.txt", ["1;NULL;NULL", "0;;'a;b'", "1;2;"], header=None)
    form = TextFormat(delimiter=";", names=COLUMNS, quote="'", nulls=("NULL", ""), types=TYPES)
    assert read(open_index([path], COLUMNS, text=form)) == [
        {"clicked": 1, "price": None, "city": None},
        {"clicked": 0, "price": None, "city": "a;b"},
        {"clicked": 1, "price": 2.0, "city": None},
    ]


def test_types_are_inferred_from_the_first_block_of_the_first_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tsv", ["1\t2.5\tx", "0\t1\t"], header="n\tr\tt")
    second = write(tmp_path / "b.tsv", ["1\t7\t8"], header="n\tr\tt")
    index = open_index([first, second], ("n", "r", "t"))
    assert [str(part.type) for part in index.schema] == ["int64", "double", "string"]
    assert read(index, columns=("t", "r")) == [{"t": "x", "r": 2.5}, {"t": None, "r": 1.0}, {"t": "8", "r": 7.0}]
    third = write(tmp_path / "c.tsv", ["1.5\t7\t8"], header="n\tr\tt")
    with pytest.raises(DataError, match=r"c\.tsv: column n, line 2: value '1\.5'; allowed: int64"):
        open_index([first, third], ("n", "r", "t"))


def test_ids_that_need_64_bits_are_integers(tmp_path: Path) -> None:
    """To pyarrow they are floating-point numbers, which would lose their last digits."""
    big = [str(2**63 + number) for number in (0, 1, 2**63 - 1)]
    path = write(tmp_path / "a.csv", [f"{value},1.5,{-1 - number}" for number, value in enumerate(big)], header="u,r,n")
    index = open_index([path], ("u", "r", "n"))
    assert [str(part.type) for part in index.schema] == ["uint64", "double", "int64"]
    assert [str(row["u"]) for row in read(index, columns=("u",))] == big
    too_large = write(tmp_path / "b.csv", [str(2**63), str(2**64)], header="u")
    assert str(open_index([too_large], ("u",)).schema.field("u").type) == "double"


BROKEN = {
    "too few": ("1,2", r"line 302: 2 columns; allowed: 3"),
    "too many": ("1,2,x,y", r"line 302: 4 columns; allowed: 3"),
    "empty": ("", r"line 302: empty; allowed: empty lines at the end of a file"),
    "no number": ("1,free,x", r"column price, line 302: value 'free'; allowed: double"),
    "null of another tool": (
        r"1,\N,x",
        r"column price.*'\\\\N'; allowed: double; if .*: nulls = \['', '\\N'\] und",
    ),
    "boolean": (
        "True,2,x",
        r'column clicked, line 302: value .True.; allowed: int64; .*: types = { "clicked" = "bool" } un',
    ),
    "no sign": (
        "9223372036854775808,2,x",
        r'column clicked, line 302: value .9223372036854775808.; allowed: int64; .*: types = { "clicked" = "uint64" }',
    ),
    "float": ("1.0,2,x", r"column clicked, line 302: value '1.0'; allowed: int64; .*: astype\(\"Int64\"\) keeps"),
    "text": (
        "guest,2,x",
        r'column clicked, line 302: value .guest.; allowed: int64; .*: types = { "clicked" = "string" }',
    ),
    "too large": ("99999999999999999999,1,x", r"column clicked, line 302: value '9+'; allowed: int64"),
    "too long": ("9" * 5_000 + ",1,x", r"column clicked, line 302: value '9+.*allowed: int64"),
    "open quote": ('1,2,"x', r"column city, line 302: quoted value 'x.*' goes over the end of the line"),
    "open quote before": ('1,"2,x', r"line 302: "),
    "no UTF-8": ("1,2,\udcff", r"column city, line 302: value '\\\\xff'; allowed: string"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("name", ["part.csv", "part.csv.gz"])
def test_a_broken_line_is_named_or_left_out(name: str, broken: str, message: str, tmp_path: Path) -> None:
    lines = [*LINES[:300], broken, *LINES[300:]]
    text = "".join(f"{one}\n" for one in ["clicked,price,city", *lines]).encode(errors="surrogateescape")
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    index = open_index([str(tmp_path / name)], COLUMNS, text=FORM)
    assert index.sample_count == ROWS + 1
    assert len(read(index, 0, 250)) == 250
    with pytest.raises(DataError, match=rf"{name}: {message}"):
        read(index)
    found = open_index([str(tmp_path / name)], COLUMNS, text=TextFormat(types=TYPES, skip_broken=1))
    assert (found.sample_count, found.skipped_rows) == (ROWS, 1)
    assert read(found) == peer("\n".join(["clicked,price,city", *LINES])).to_pylist()
    assert [str(found.place(row)).rpartition(" ")[2] for row in (299, 300)] == ["301", "303"]


def test_two_open_quotes_do_not_swallow_the_rows_between(tmp_path: Path) -> None:
    """pyarrow reads these four lines as two rows, without an error."""
    lines = [line(1), '1,2,"x', line(2), '0,1,y"', line(3)]
    index = open_index([write(tmp_path / "part.csv", lines)], COLUMNS, text=FORM)
    with pytest.raises(DataError, match=r"column city, line 3: quoted value .* goes over the end of the line"):
        read(index)
    form = TextFormat(types=TYPES, skip_broken=1)
    assert [row["city"] for row in read(open_index([write(tmp_path / "part.csv", lines)], COLUMNS, text=form))] == [
        "city 1", "city 2", 'y"', "city 3"
    ]  # fmt: skip


def test_more_broken_lines_than_allowed(tmp_path: Path) -> None:
    one = write(tmp_path / "a.csv", [line(1), "x,1,1", line(2), "1", line(3)])
    form = TextFormat(types=TYPES, skip_broken=1)
    with pytest.raises(
        DataError, match=r"a\.csv: line 5: 1 columns; allowed: 3 \(broken lines .*: 1; this is one more"
    ):
        open_index([one], COLUMNS, text=form)
    form = TextFormat(types=TYPES, skip_broken=3)
    assert open_index([one], COLUMNS, text=form).skipped_rows == 2
    two = shutil.copyfile(one, tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"a\.csv and other files: 4 broken rows; allowed: 3 \(skip_broken\)"):
        open_index([one, str(two)], COLUMNS, text=form)
    # A column that is not read may hold anything.
    assert open_index([one], ("price",), text=form).skipped_rows == 1


def test_headers(tmp_path: Path) -> None:
    path = tmp_path / "part.csv"
    with pytest.raises(DataError, match=r"part\.csv: no column price; there are: 1, 2, x"):
        open_index([write(path, ["1,2,x", *LINES], header=None)], ("price",))
    named = TextFormat(types=TYPES, names=COLUMNS)
    write(path, LINES)
    with pytest.raises(DataError, match=r"line 1: the names of the columns; allowed: a row, where names are given"):
        open_index([str(path)], COLUMNS, text=named)
    write(path, LINES, header="c,p,t")
    with pytest.raises(DataError, match=r"part\.csv: column clicked, line 1: value 'c'; allowed: int64"):
        open_index([str(path)], COLUMNS, text=named)
    write(path, LINES, header="clicked,price,price")
    with pytest.raises(DataError, match=r"part\.csv: 2 columns price; allowed: one"):
        open_index([str(path)], ("price",))
    path.write_text("")
    with pytest.raises(DataError, match=r"part\.csv: line 1: empty; allowed: the names of the columns"):
        open_index([str(path)], COLUMNS)
    write(path, [])
    with pytest.raises(DataError, match=r"part\.csv: no rows"):
        open_index([str(path)], COLUMNS)
    write(path, ["1,2,x\r0,1,y"])
    with pytest.raises(DataError, match=r"line 2: a carriage return within the line"):
        open_index([str(path)], COLUMNS)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("name", ["part.csv", "PART.CSV.GZ", *(f"part.csv{suffix}" for suffix in CODECS)])
def test_a_file_that_is_cut_or_replaced_is_named(name: str, is_cut: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    index = open_index([write(path, LINES)], COLUMNS, text=FORM)
    if is_cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        write(path, [one.replace("city 498", "city 499") for one in LINES])
    message = "Truncated compressed stream" if is_cut and name != "part.csv" else "changed since the run began"
    with pytest.raises(DataError, match=rf"{name}: {message}"):
        read(index)
    if message.startswith("Trunc"):
        with pytest.raises(DataError, match=rf"{name}: {message}"):
            open_index([str(path)], COLUMNS, text=FORM)


def test_a_compressed_file_is_decompressed_once_by_a_reader_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index([write(tmp_path / "part.csv.gz", LINES)], COLUMNS, text=FORM)
    opened = []
    native = DataFile.open_native

    def counted(file: DataFile) -> Any:
        opened.append(file)
        return native(file)

    monkeypatch.setattr(DataFile, "open_native", counted)
    begins = [0, *map(int, index.ends)]
    for blocks in (range(index.block_count), range(1, index.block_count, 3)):
        rows = [row for block in blocks for row in read(index, begins[block], begins[block + 1])]
        assert [row["price"] for row in rows] == [
            None if row % 7 == 0 else row / 4 for block in blocks for row in range(begins[block], begins[block + 1])
        ]
    assert len(opened) == 2
