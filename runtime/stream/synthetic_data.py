# SPDX-License-Identifier: Apache-2.0
"""Streams that are made when they are read, as the data of a run: `--data 'synthetic-stream?days=30&dense=8'`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from sennit.known_names import hint
from sennit.runtime.data.arrow_columns import check_types
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import Schema, parse_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream import yambda
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.index import StreamIndex, index_of
from sennit.runtime.stream.synthetic import days_of
from sennit.runtime.stream.synthetic_settings import SyntheticStream, counts
from sennit.runtime.stream.writing import schema_text
from sennit.runtime.stream.yambda_planted import SyntheticYambda


class _Made(NamedTuple):
    """How a stream is made."""

    settings: Any
    """A dataclass, whose fields are what may be said behind the name."""

    example: str
    files: Callable[[Any], tuple[StreamFile, ...]]
    schema: Callable[[Any], Schema]


_MADE: Final = {
    "synthetic-stream": _Made(
        SyntheticStream, "days=30&dense=8", days_of, lambda made: parse_schema(tomllib.loads(schema_text(made)))
    ),
    "synthetic-yambda": _Made(
        SyntheticYambda, "rows=1000000&users=1000", lambda made: (yambda.YambdaFile(made),), yambda.schema_of
    ),
}
NAMES: Final = tuple(_MADE)


def _name(source: Source) -> str:
    return source.data.partition("?")[0]


def is_synthetic(source: Source) -> bool:
    return _name(source) in _MADE


def settings_of(source: Source) -> Any:
    """What the name of the data set says: a `SyntheticStream`, in the words of `sennit make-stream`, or a
    `SyntheticYambda`.

    Raises DataError and ConfigError for what it does not have.
    """
    name, made = _name(source), _MADE[_name(source)]
    for option, given in (("--schema", source.schema), ("--eval-data", source.evaluation), ("--data", source.further)):
        if given:
            raise DataError(f"{option} with --data {name}, which says itself what it has; allowed: with files")
    defaults = {field.name: field.default for field in fields(made.settings)}
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(source.data.partition("?")[2], keep_blank_values=True, strict_parsing="?" in source.data)
    except ValueError as error:
        raise DataError(f"--data {source.data!r}: {error}; allowed: {name}?{made.example}") from None
    for key, text in pairs:
        option = key.replace("-", "_")
        if option not in defaults:
            names = [one.replace("_", "-") for one in defaults]
            raise DataError(f"--data {name}: {key!r}; allowed: {', '.join(names)}{hint(key, names)}")
        if option in found:
            raise DataError(f"--data {name}: {key} twice; allowed: once")
        default: Any = defaults[option]
        try:
            found[option] = counts(text) if isinstance(default, tuple) else type(default)(text)
        except DataError:
            raise
        except ValueError:
            raise DataError(f"--data {name}: {key} {text!r}; allowed: a number") from None
    return made.settings(**found)


def index_of_synthetic(
    source: Source, adapted: Callable[[Schema], Schema] = lambda schema: schema, *, histories: bool = False
) -> tuple[StreamIndex, Schema]:
    """The stream, whose rows are made when they are read, and what its columns mean. Raises errors of `settings_of`.

    `adapted`: changes what the columns mean. `histories`: with those of the stream, if it has any.
    """
    made, settings = _MADE[_name(source)], settings_of(source)
    schema = made.schema(settings)
    schema = adapted(schema if histories else schema.without_history())
    assert schema.time is not None
    files = made.files(settings)
    for file in files[:1]:
        check_types(_name(source), schema, file.schema)
    columns = tuple(dict.fromkeys((*schema.read_columns, schema.time.column)))
    return index_of(files, columns, time_column=schema.time.column, beside=schema.beside), schema
