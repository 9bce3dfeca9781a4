# SPDX-License-Identifier: Apache-2.0
"""`synthetic-stream` as the data of a run, without files: `--data 'synthetic-stream?days=30&rows-per-day=1000000'`."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import Any, Final
from urllib.parse import parse_qsl

from sennit.known_names import hint
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import Schema, parse_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream.index import StreamIndex, index_of
from sennit.runtime.stream.synthetic import days_of
from sennit.runtime.stream.synthetic_settings import SyntheticStream, counts
from sennit.runtime.stream.writing import schema_text

NAME: Final = "synthetic-stream"


def is_synthetic(source: Source) -> bool:
    return source.data.partition("?")[0] == NAME


def settings_of(source: Source) -> SyntheticStream:
    """What the name of the data set says, in the words of `sennit make-stream`; defaults are the same.

    Raises DataError and ConfigError for what it does not have.
    """
    for option, given in (("--schema", source.schema), ("--eval-data", source.evaluation), ("--data", source.further)):
        if given:
            raise DataError(f"{option} with --data {NAME}, which says itself what it has; allowed: with files")
    kinds = {field.name: field.type for field in fields(SyntheticStream)}
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(source.data.partition("?")[2], keep_blank_values=True, strict_parsing="?" in source.data)
    except ValueError as error:
        raise DataError(f"--data {source.data!r}: {error}; allowed: {NAME}?days=30&dense=8") from None
    for key, text in pairs:
        name = key.replace("-", "_")
        if name not in kinds:
            names = [one.replace("_", "-") for one in kinds]
            raise DataError(f"--data {NAME}: {key!r}; allowed: {', '.join(names)}{hint(key, names)}")
        if name in found:
            raise DataError(f"--data {NAME}: {key} twice; allowed: once")
        default: Any = SyntheticStream.__dataclass_fields__[name].default
        try:
            found[name] = counts(text) if isinstance(default, tuple) else type(default)(text)
        except DataError:
            raise
        except ValueError:
            raise DataError(f"--data {NAME}: {key} {text!r}; allowed: a number") from None
    return SyntheticStream(**found)


def index_of_synthetic(source: Source) -> tuple[StreamIndex, Schema]:
    """The stream, whose rows are made when they are read, and what its columns mean. Raises errors of `settings_of`."""
    made = settings_of(source)
    schema = parse_schema(tomllib.loads(schema_text(made)))
    assert schema.time is not None
    columns = tuple(dict.fromkeys((*schema.columns, schema.time.column)))
    return index_of(days_of(made), columns, time_column=schema.time.column), schema
