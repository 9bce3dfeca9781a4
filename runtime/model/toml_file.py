# SPDX-License-Identifier: Apache-2.0
"""TOML files of a run's settings: reading, and errors that name file, key, value and what is allowed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from sennit.known_names import hint
from sennit.transport.errors import ConfigError
from sennit.transport.sizes import parse_size

Check = Callable[[str, Any], Any]
"""(place, value of the file) -> what it means. Raises `ConfigError`."""


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file. Raises `ConfigError` if it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}; give a TOML file that can be read") from error


def section(place: str, value: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The checked values of a section, of which all keys must be known."""
    for key in entries(place, value):
        if key not in checks:
            raise ConfigError(f"{place}: unknown key {key!r}; allowed: {', '.join(checks)}{hint(key, checks)}")
    return {key: checks[key](f"{place}: {key}", inner) for key, inner in value.items()}


def entries(place: str, value: Any) -> dict[str, Any]:
    """`value`, a section whose keys are names."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {value!r}; allowed: a section")
    return value


def with_kind(place: str, value: Any) -> dict[str, Any]:
    """A section with `kind`, for which a name is short."""
    if not isinstance(value, str | dict):
        raise ConfigError(f"{place} is {value!r}; allowed: a name, or a section with kind and options")
    return {"kind": value} if isinstance(value, str) else value


def integer(low: int, high: int) -> Check:
    def check(place: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise refused(place, value, f"an integer from {low} to {high}")
        return value

    return check


def boolean(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(place, value, "true, false")
    return value


def number(allowed: str, is_allowed: Callable[[float], bool]) -> Check:
    """A finite number."""

    def check(place: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refused(place, value, allowed)
        if not math.isfinite(value) or not is_allowed(value):
            raise refused(place, value, allowed)
        return float(value)

    return check


def size(example: str) -> Check:
    """Bytes, as a text with a unit such as `example`."""

    def check(place: str, value: Any) -> int:
        try:
            found = parse_size(value) if isinstance(value, str) else 0
        except ValueError:
            found = 0
        if found < 1:
            raise refused(place, value, f"a size, such as {example}")
        return found

    return check


def choice(members: Mapping[str, Any]) -> Check:
    def check(place: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise refused(place, value, ", ".join(members) + hint(value, members))
        return members[value]

    return check


def names_of(kind: type[Enum], *left_out: Enum) -> dict[str, Enum]:
    """Members of an enumeration by their names in files, which are in lower case."""
    return {member.name.lower(): member for member in kind if member not in left_out}


def refused(place: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{place} {value!r}; allowed: {allowed}")
