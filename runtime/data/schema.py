# SPDX-License-Identifier: Apache-2.0
"""The schema file of a Parquet data set: the meaning of each column, and its preprocessing. TOML or JSON, same keys.

    label = "clicked"
    sample_weight = "worth"
    time = "clicked_at"
    [dense.price]
    clamp = [0, 1000]
    log1p = true
    running = 1_000_000
    [sparse.user]
    rows = 100_000
    [sparse.city]
    encode = "dictionary"
    min_frequency = 5
    [sparse.seen]
    encode = "hash"
    rows = 1_000_000
    salt = 7
    first = 20
    [text]
    delimiter = ";"
    [history]
    of = "user"
    last = 200
    columns = ["city"]

`dense = ["price", "age"]` is short for columns without operators. docs/reference/data-sets.md explains the keys.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sennit.offload.columns import INT64_MAX, INT64_MIN
from sennit.offload.operators import COLUMN_MAX_LENGTH
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.text_format import CRITEO, PLAIN, TYPES, TextFormat

ENCODINGS: Final = ("id", "dictionary", "hash", "dynamic", "value")
TIME_UNITS: Final = ("s", "ms", "us", "ns")
_KEYS: Final = ("label", "dense", "sparse", "sample_weight", "time", "text", "skip_broken", "history")
_TEXT_KEYS: Final = ("delimiter", "names", "quote", "nulls", "types", "skip_broken")
ROWS_MAX: Final = 2**40 - 1
RUNNING_MAX: Final = 2**40
HISTORY_MAX: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseField:
    """One column of numbers. The clamp is applied before the logarithm."""

    name: str
    clamp: tuple[float, float] | None = None
    log1p: bool = False
    running: int | None = None
    """Mean and deviation follow the stream: what came before counts as so many numbers. None: they are fitted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseField:
    """One column of ids."""

    name: str
    encode: str
    rows: int | None
    """Rows of its table; with `dynamic` the most that it may have. None with `dictionary`, which counts them, and with
    `value`: integers that a model reads as they are, without a table.
    """

    salt: int = 0
    """For `hash`: columns with equal ids and different salts get different rows."""

    first: int | None = None
    """Only this many ids of a list are used."""

    min_frequency: int | None = None
    """For `dictionary`: values that training rows have less often share row 0. None: as the run says."""

    def dynamic(self, rows: int | None) -> SparseField:
        """The column for a table whose ids nobody lists. Raises DataError if nobody says how many rows it may have."""
        rows = self.rows if rows is None else rows
        if rows is None:
            raise DataError(f"table {self.name}: dynamic ids without rows; allowed: the most rows that it may have")
        return SparseField(name=self.name, encode="dynamic", rows=rows, first=self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeField:
    """The column of time."""

    column: str
    unit: str = "s"
    """Of numbers, which count from 1970-01-01 UTC: s, ms, us or ns. Arrow's times have their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Columns that become sequences: what earlier rows of the stream have that are of the same user, the oldest first.

    docs/decisions/0079-a-history-is-a-list-column.md says how.
    """

    of: str
    """The column whose equal values have a history together. It need not be a feature."""

    last: int
    """Events of a history, at most: the latest ones."""

    columns: tuple[str, ...]
    """Columns of ids. A row has those of its history, and behind them its own."""

    past: tuple[str, ...] = ()
    """Those of its history alone: what a row has itself is not known when it is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """What the columns of a file mean; columns not named are ignored."""

    labels: tuple[str, ...]
    dense: tuple[DenseField, ...]
    sparse: tuple[SparseField, ...]
    sample_weight: str | None = None
    """The column by which a sample's loss is multiplied."""

    time: TimeField | None = None
    """The column that a stream is in order of. It is no feature, unless it is named as one, too."""

    text: TextFormat = PLAIN
    """How text files are read. Its types are those that the schema file says, and its `skip_broken` is for files of
    every format."""

    has_operated: bool = False
    """Whether the columns have what the operators of `dense` have made. Samples in memory do."""

    history: History | None = None
    """Columns of ids of which a row has those of earlier rows, too."""

    group: str | None = None
    """The column whose equal values have an AUC of their own when predictions are judged. It need not be a feature."""

    def without_history(self) -> Schema:
        """The schema of rows alone. What is known only behind a row is no feature of it."""
        if self.history is None:
            return self
        kept = tuple(part for part in self.sparse if part.name not in self.history.past and part.encode != "value")
        return replace(self, sparse=kept, history=None)

    @property
    def running(self) -> tuple[DenseField, ...]:
        """The columns of numbers whose mean and deviation follow the stream."""
        return tuple(part for part in self.dense if part.running is not None)

    @property
    def columns(self) -> list[str]:
        weights = [] if self.sample_weight is None else [self.sample_weight]
        return [*self.labels, *weights, *(part.name for part in self.dense), *(part.name for part in self.sparse)]

    @property
    def read_columns(self) -> list[str]:
        """`columns`, and those of which histories and groups are."""
        further = [None if self.history is None else self.history.of, self.group]
        return list(dict.fromkeys([*self.columns, *(name for name in further if name is not None)]))

    @property
    def encodings(self) -> dict[str, str]:
        """How the integers and texts of a column are encoded, by its name. Those that tell users and groups apart are
        hashed. Columns of numbers are not among these.
        """
        owners = [None if self.history is None else self.history.of, self.group]
        named = {name: "hash" for name in owners if name is not None}
        return named | {part.name: part.encode for part in self.sparse}

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that are read, and from which nothing is learnt. They tell no stream from another."""
        learnt = [*replace(self, group=None).read_columns, *([] if self.time is None else [self.time.column])]
        return () if self.group is None or self.group in learnt else (self.group,)

    def with_dynamic(self, rows: Mapping[str, int | None]) -> Schema:
        """The schema with `encode = "dynamic"` for these columns, whatever it says now.

        `rows`: the most rows of each table. None: as many as the schema says.
        """
        return replace(
            self, sparse=tuple(part.dynamic(rows[part.name]) if part.name in rows else part for part in self.sparse)
        )

    @property
    def text_format(self) -> TextFormat:
        """How text files are read, with the types that columns have by their meaning.

        Numbers are float64, row ids and values int64, and what a dictionary has is text. What is hashed or dynamic may
        be text or integers, and the column of time may have several types: pyarrow infers these, unless the schema says
        them.
        """
        weights = () if self.sample_weight is None else (self.sample_weight,)
        types = dict.fromkeys((*self.labels, *weights, *(part.name for part in self.dense)), "float64")
        for part in self.sparse:
            if part.encode in ("id", "dictionary", "value"):
                types[part.name] = "string" if part.encode == "dictionary" else "int64"
        return replace(self.text, types=types | dict(self.text.types))


def read_schema(path: Path) -> Schema:
    """Parses and checks a schema file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"schema {path}: {error}; give a text file that can be read") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(
            f"schema {path}: {error}; write it as TOML (docs/reference/data-sets.md), or as .json"
        ) from error
    try:
        return parse_schema(content)
    except DataError as error:
        raise DataError(f"schema {path}: {error}") from None


def parse_schema(content: Any) -> Schema:
    """Checks the content of a schema file."""
    if not isinstance(content, dict):
        raise DataError(f"is a {type(content).__name__}; allowed: a table with the keys {', '.join(_KEYS)}")
    _check_keys("", content, _KEYS)
    label, dense, sparse = content.get("label"), content.get("dense", []), content.get("sparse")
    labels: list[Any] = label if isinstance(label, list) else [label]
    if not labels or not all(isinstance(name, str) and name for name in labels):
        raise DataError(f"label is {label!r}; allowed: the name of a column, or a list of names")
    sample_weight = content.get("sample_weight")
    if sample_weight is not None and not (isinstance(sample_weight, str) and sample_weight):
        raise DataError(f"sample_weight is {sample_weight!r}; allowed: the name of a column")
    if isinstance(dense, list) and all(isinstance(name, str) for name in dense):
        numbers = tuple(DenseField(name=name) for name in dense)
    elif isinstance(dense, dict):
        numbers = tuple(_dense_field(name, entry) for name, entry in dense.items())
    else:
        raise DataError(f"dense is {dense!r}; allowed: a list of column names, or a table with one entry a column")
    if not isinstance(sparse, dict) or not sparse:
        raise DataError(f"sparse is {sparse!r}; allowed: a table with one entry a column, at least one")
    fields = tuple(_sparse_field(name, entry) for name, entry in sparse.items())
    time = _time_field(content.get("time"))
    text = _text_format(content.get("text", {}))
    if "skip_broken" in content:
        _check_integer("skip_broken", content["skip_broken"], 0, INT64_MAX)
        if text.skip_broken not in (0, content["skip_broken"]):
            raise DataError(
                f"skip_broken is {content['skip_broken']}, and text.skip_broken is {text.skip_broken}; allowed: one"
            )
        text = replace(text, skip_broken=content["skip_broken"])
    schema = Schema(
        labels=tuple(labels),
        dense=numbers,
        sparse=fields,
        sample_weight=sample_weight,
        time=time,
        text=text,
        history=_history(content.get("history"), fields),
    )
    for name in schema.columns:
        if schema.columns.count(name) > 1:
            raise DataError(f"column {name!r} is named twice")
    return schema


def _time_field(entry: Any) -> TimeField | None:
    if entry is None:
        return None
    if isinstance(entry, str) and entry:
        return TimeField(column=entry)
    if not isinstance(entry, dict):
        raise DataError(f"time is {entry!r}; allowed: the name of a column, or a table with the keys column, unit")
    _check_keys("time", entry, ("column", "unit"))
    column, unit = entry.get("column"), entry.get("unit", "s")
    if not (isinstance(column, str) and column):
        raise DataError(f"time.column is {column!r}; allowed: the name of a column")
    if unit not in TIME_UNITS:
        raise DataError(f"time.unit is {unit!r}; allowed: {', '.join(TIME_UNITS)}")
    return TimeField(column=column, unit=unit)


def _history(entry: Any, fields: tuple[SparseField, ...]) -> History | None:
    if entry is None:
        return None
    _check_keys("history", _table("history", entry), ("of", "last", "columns", "past"))
    of, last = entry.get("of"), entry.get("last")
    if not (isinstance(of, str) and of):
        raise DataError(f"history.of is {of!r}; allowed: the name of a column")
    _check_integer("history.last", last, 1, HISTORY_MAX)
    lists: dict[str, tuple[str, ...]] = {}
    for key, allowed in (("columns", "a list of columns of ids, at least one"), ("past", "a list of columns of ids")):
        names = entry.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"history.{key} is {names!r}; allowed: {allowed}")
        lists[key] = tuple(names)
    if not lists["columns"]:
        raise DataError("history.columns has no column; allowed: one or more, whose ids become sequences")
    known = {part.name: part for part in fields}
    named = [*lists["columns"], *lists["past"]]
    for name in named:
        if name not in known:
            raise DataError(f"history has column {name!r}; allowed: columns of sparse: {', '.join(known)}")
        if named.count(name) > 1:
            raise DataError(f"history has column {name!r} twice; allowed: once, in columns or in past")
        if (first := known[name].first) is not None:
            raise DataError(f"history has column {name!r}, which has first = {first}; allowed: columns of one id a row")
    return History(of=of, last=last, **lists)


def _text_format(entry: Any) -> TextFormat:
    if entry == "criteo":
        return CRITEO
    if not isinstance(entry, dict):
        raise DataError(f"text is {entry!r}; allowed: 'criteo', or a table with the keys {', '.join(_TEXT_KEYS)}")
    _check_keys("text", entry, ("format", *_TEXT_KEYS))
    form = entry.get("format")
    if form not in (None, "criteo"):
        raise DataError(f"text.format is {form!r}; allowed: 'criteo'")
    found: dict[str, Any] = {}
    for name in ("delimiter", "quote"):
        if name in entry:
            if not isinstance(entry[name], str):
                raise DataError(f"text.{name} is {entry[name]!r}; allowed: one character")
            found[name] = entry[name] or None
    for name in ("names", "nulls"):
        if name in entry:
            if not isinstance(entry[name], list) or not all(isinstance(one, str) for one in entry[name]):
                raise DataError(f"text.{name} is {entry[name]!r}; allowed: a list of texts")
            found[name] = tuple(entry[name])
    types = entry.get("types", {})
    if not isinstance(types, dict):
        raise DataError(f"text.types is {types!r}; allowed: a table with columns and their types")
    for name, kind in types.items():
        if kind not in TYPES:
            raise DataError(f"text.types.{name} is {kind!r}; allowed: {', '.join(TYPES)}")
    if "skip_broken" in entry:
        _check_integer("text.skip_broken", entry["skip_broken"], 0, INT64_MAX)
        found["skip_broken"] = entry["skip_broken"]
    try:
        whole = replace(CRITEO if form else PLAIN, **found)
    except DataError as error:
        raise DataError(f"text.{error}") from None
    return replace(whole, types={**whole.types, **types})


def _dense_field(name: str, entry: Any) -> DenseField:
    place = f"dense.{name}"
    _check_keys(place, _table(place, entry), ("clamp", "log1p", "running"))
    clamp, log1p, running = entry.get("clamp"), entry.get("log1p", False), entry.get("running")
    if not isinstance(log1p, bool):
        raise DataError(f"{place}.log1p is {log1p!r}; allowed: true, false")
    if running is not None:
        _check_integer(f"{place}.running", running, 1, RUNNING_MAX)
    if clamp is None:
        return DenseField(name=name, log1p=log1p, running=running)
    if not (isinstance(clamp, list) and len(clamp) == 2 and all(_is_number(bound) for bound in clamp)):
        raise DataError(f"{place}.clamp is {clamp!r}; allowed: [low, high], two numbers")
    low, high = (float(bound) for bound in clamp)
    if low > high:
        raise DataError(f"{place}.clamp is {clamp!r}; allowed: low at most high")
    return DenseField(name=name, clamp=(low, high), log1p=log1p, running=running)


def _sparse_field(name: str, entry: Any) -> SparseField:
    place = f"sparse.{name}"
    _check_keys(place, _table(place, entry), ("encode", "rows", "salt", "first", "min_frequency"))
    encode, rows, first = entry.get("encode", "id"), entry.get("rows"), entry.get("first")
    min_frequency = entry.get("min_frequency")
    if encode not in ENCODINGS:
        raise DataError(f"{place}.encode is {encode!r}; allowed: {', '.join(ENCODINGS)}")
    if encode == "dictionary" and rows is not None:
        raise DataError(f"{place}.rows is given, but a dictionary counts its rows itself")
    if encode == "value" and rows is not None:
        raise DataError(f"{place}.rows is given, but values have no table")
    if encode != "hash" and "salt" in entry:
        raise DataError(f"{place}.salt is given, but belongs to encode = 'hash'")
    if encode != "dictionary":
        if encode != "value":
            _check_integer(f"{place}.rows", rows, 1, ROWS_MAX)
        if min_frequency is not None:
            raise DataError(f"{place}.min_frequency is given, but belongs to encode = 'dictionary'")
    elif min_frequency is not None:
        _check_integer(f"{place}.min_frequency", min_frequency, 1, INT64_MAX)
    salt = entry.get("salt", 0)
    _check_integer(f"{place}.salt", salt, INT64_MIN, INT64_MAX)
    if first is not None:
        _check_integer(f"{place}.first", first, 1, COLUMN_MAX_LENGTH)
    return SparseField(name=name, encode=encode, rows=rows, salt=salt, first=first, min_frequency=min_frequency)


def _table(place: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{place} is {entry!r}; allowed: a table")
    return entry


def _check_keys(place: str, entry: dict[str, Any], allowed: Iterable[str]) -> None:
    unknown = sorted(set(entry) - set(allowed))
    if unknown:
        what = f"{place} has the unknown key" if place else "unknown key"
        raise DataError(f"{what} {unknown[0]!r}; allowed: {', '.join(allowed)}")


def _check_integer(place: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{place} is {value!r}; allowed: an integer from {low} to {high}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
