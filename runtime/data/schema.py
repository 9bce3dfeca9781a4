# SPDX-License-Identifier: Apache-2.0
"""The schema file of a Parquet data set: which column is what. TOML or JSON with the same keys.

    label = "clicked"
    dense = ["price", "age"]
    [sparse.user]
    rows = 100_000
    [sparse.city]
    encode = "dictionary"

`encode = "id"` (the default): the column holds integers in [0, rows), one or a list of them. `"dictionary"`: each
distinct value, text or number, gets a row; `rows` is then not given.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sennit.runtime.data.errors import DataError

ENCODINGS = ("id", "dictionary")


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseField:
    """One id column."""

    name: str
    encode: str
    rows: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """What the columns of a file mean; columns not named are ignored."""

    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseField, ...]

    @property
    def columns(self) -> list[str]:
        return [self.label, *self.dense, *(part.name for part in self.sparse)]


def read_schema(path: Path) -> Schema:
    """Parses and checks a schema file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"schema {path}: {error}") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"schema {path}: {error}") from error
    try:
        return parse_schema(content)
    except DataError as error:
        raise DataError(f"schema {path}: {error}") from None


def parse_schema(content: Any) -> Schema:
    """Checks the content of a schema file."""
    if not isinstance(content, dict):
        raise DataError(f"is a {type(content).__name__}; allowed: a table with the keys label, dense, sparse")
    unknown = sorted(set(content) - {"label", "dense", "sparse"})
    if unknown:
        raise DataError(f"unknown key {unknown[0]!r}; allowed: label, dense, sparse")
    label, dense, sparse = content.get("label"), content.get("dense", []), content.get("sparse")
    if not isinstance(label, str) or not label:
        raise DataError(f"label is {label!r}; allowed: the name of a column")
    if not isinstance(dense, list) or not all(isinstance(name, str) for name in dense):
        raise DataError(f"dense is {dense!r}; allowed: a list of column names")
    if not isinstance(sparse, dict) or not sparse:
        raise DataError(f"sparse is {sparse!r}; allowed: a table with one entry a column, at least one")
    fields = tuple(_sparse_field(name, entry) for name, entry in sparse.items())
    schema = Schema(label=label, dense=tuple(dense), sparse=fields)
    for name in schema.columns:
        if schema.columns.count(name) > 1:
            raise DataError(f"column {name!r} is named twice")
    return schema


def _sparse_field(name: str, entry: Any) -> SparseField:
    if not isinstance(entry, dict):
        raise DataError(f"sparse.{name} is {entry!r}; allowed: a table with encode and rows")
    unknown = sorted(set(entry) - {"encode", "rows"})
    if unknown:
        raise DataError(f"sparse.{name} has the unknown key {unknown[0]!r}; allowed: encode, rows")
    encode, rows = entry.get("encode", "id"), entry.get("rows")
    if encode not in ENCODINGS:
        raise DataError(f"sparse.{name}.encode is {encode!r}; allowed: {', '.join(ENCODINGS)}")
    if encode == "dictionary" and rows is not None:
        raise DataError(f"sparse.{name}.rows is given, but a dictionary counts its rows itself")
    if encode == "id" and (not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows < 2**40):
        raise DataError(f"sparse.{name}.rows is {rows!r}; allowed: an integer from 1 to {2**40 - 1}")
    return SparseField(name=name, encode=encode, rows=rows)
