# SPDX-License-Identifier: Apache-2.0
"""The settings of each table of a run, from a TOML file (docs/reference/models.md).

[defaults]
dim = 32
row_shards = 8
[tables.user]
precision = "fp16"
optimizer = { kind = "adam", beta2 = 0.99 }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

from torch import Generator, Tensor

from sennit.known_names import few, hint
from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.kernels.optimizers import NAMED, Decay
from sennit.runtime.kernels.spec import MAX_DIM, Bounds, Pooling, Precision, Rounding
from sennit.runtime.model.toml_file import (
    Check,
    boolean,
    choice,
    entries,
    integer,
    names_of,
    number,
    read_toml,
    refused,
    section,
    with_kind,
)
from sennit.runtime.sharded.tables import MAX_SHARDS, DynamicIds, Eviction, Home, Initial, Table
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform in [-bound, bound)."""

    bound: float

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with mean 0."""

    deviation: float

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.normal_(0, self.deviation, generator=generator)


@dataclass(frozen=True, slots=True)
class Zeros:
    """All zero."""

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.zero_()


def _limit(place: str, value: Any) -> float | None:
    return None if value == float("inf") else number("above 0; inf: no limit", lambda most: most > 0)(place, value)


_ABOVE_0: Final = number("above 0", lambda value: value > 0)
_FROM_0: Final = number("0 or more", lambda value: value >= 0)
_BELOW_1: Final = number("0 to below 1", lambda value: 0 <= value < 1)
_OPTIMIZER: Final[dict[str, Check]] = {
    "kind": choice({name: name for name in NAMED}),
    "epsilon": _FROM_0,
    "beta1": _BELOW_1,
    "beta2": _BELOW_1,
    "momentum": _BELOW_1,
    "nesterov": boolean,
    "beta": _ABOVE_0,
    "l1": _FROM_0,
    "l2": _FROM_0,
    "weight_decay": _FROM_0,
    "decay": choice(names_of(Decay)),
    "max_gradient": _limit,
    "max_gradient_norm": _limit,
}
_INITIAL: Final = {"uniform": Uniform, "normal": Normal, "zeros": Zeros}


def _optimizer(place: str, value: Any) -> dict[str, Any]:
    """Some arguments of `OptimizerSpec`. Other sections may have the others."""
    found = section(place, with_kind(place, value), _OPTIMIZER)
    return {**NAMED[found.pop("kind")], **found} if "kind" in found else found


def _initial(place: str, value: Any) -> Initial | None:
    content = with_kind(place, value)
    make: type[Uniform | Normal | Zeros] = choice(_INITIAL)(f"{place}: kind", content.get("kind"))
    found = section(place, content, {"kind": lambda _, kind: kind} | {one.name: _ABOVE_0 for one in fields(make)})
    del found["kind"]
    if make is Uniform and not found:
        return None  # The default of `Table` is uniform within 1 / sqrt(rows).
    if make is Normal and not found:
        raise ConfigError(f"{place}: normal without deviation; allowed: a deviation above 0")
    return make(**found)


def _ids(place: str, value: Any) -> DynamicIds:
    """`"dynamic"`, or its rules."""
    if value == "dynamic":
        return DynamicIds()
    if not isinstance(value, dict):
        raise refused(place, value, '"dynamic", or a section with its rules')
    found = section(place, value, _DYNAMIC)
    try:
        return DynamicIds(**found)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


_DYNAMIC: Final[dict[str, Check]] = {
    "admit_after": integer(1, (1 << 32) - 1),
    "admit_count": choice({name: name for name in ("exact", "sketch")}),
    "eviction": choice(names_of(Eviction)),
    "evicted_share": _ABOVE_0,
    "expire_after": integer(1, (1 << 32) - 1),
    "unadmitted": choice({name: name for name in ("own", "shared")}),
}
_TABLE: Final[dict[str, Check]] = {
    "dim": integer(1, MAX_DIM * MAX_SHARDS),
    "precision": choice(names_of(Precision)),
    "pooling": choice(names_of(Pooling, Pooling.NONE)),
    "optimizer": _optimizer,
    "rounding": choice(names_of(Rounding)),
    "bounds": choice(names_of(Bounds)),
    "row_shards": integer(1, MAX_SHARDS),
    "column_shards": integer(1, MAX_SHARDS),
    "train_rank": lambda place, value: integer(0, MAX_DIM)(place, value) or None,
    "initial": _initial,
    "home": choice(names_of(Home)),
    "ids": _ids,
    "rows": integer(1, (1 << 40) - 1),
}
# Settings that fit a tensor train: it is one shard, and has its own initial values.
_TRAIN: Final = {"row_shards": 1, "column_shards": 1, "initial": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsFile:
    """A checked file. The data name the tables, so only `tables_of` can check their names."""

    source: str
    """The file's name, for errors."""

    defaults: Mapping[str, Any]
    """Arguments of `Table`, those of the optimizer as a dictionary."""

    tables: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ConfigError` that names file, table, key, value and what is allowed."""

        def sections(place: str, value: Any) -> dict[str, Any]:
            return {name: section(f"{path}: table {name}", one, _TABLE) for name, one in entries(place, value).items()}

        checks = {"defaults": lambda place, value: section(place, value, _TABLE), "tables": sections}
        found = {"defaults": {}, "tables": {}} | section(str(path), read_toml(path), checks)
        return cls(source=str(path), **found)

    def option(self, table: str, name: str) -> Any:
        """What the table's section says of an option of `Table`, or else `[defaults]`. None: nothing does."""
        return {**self.defaults, **self.tables.get(table, {})}.get(name)


def tables_of(facts: Sequence[TableFacts], settings: SettingsFile | None, template: Table) -> tuple[Table, ...]:
    """A table for each column of ids, in the data's order.

    What a table's own section does not say is as in `[defaults]`, and then as in `template`, which has what options of
    `sennit train` ask for. So is each option of the optimizer. Raises `ConfigError` for tables that the data has not,
    and for settings that do not go together.
    """
    if settings is None:
        settings = SettingsFile(source="", defaults={}, tables={})
    known = [table.name for table in facts]
    for name in settings.tables:
        if name not in known:
            raise ConfigError(
                f"{settings.source}: table {name}, which the data has not; allowed: {few(known)}{hint(name, known)}"
            )
    return tuple(_table(table, settings, template) for table in facts)


def _table(table: TableFacts, settings: SettingsFile, template: Table) -> Table:
    options: dict[str, Any] = {"ids": DynamicIds()} if table.is_dynamic else {}
    own = settings.tables.get(table.name, {})
    for layer in (settings.defaults, own):
        options |= layer
    if options.get("train_rank") is not None:
        # Unless the table's own section says otherwise, which is then an error.
        options |= _TRAIN | {key: own[key] for key in _TRAIN if key in own}
        if options.get("home") is Home.FILE:
            options["home"] = own.get("home")
    if options.get("ids") is None and "rows" in options:
        raise ConfigError(
            f'{settings.source}: table {table.name}: rows {options["rows"]}; allowed with ids = "dynamic" alone: '
            "else the data have as many as they need"
        )
    try:
        optimizer = template.optimizer
        for layer in (settings.defaults, own):
            try:
                optimizer = optimizer.changed(**layer.get("optimizer", {}))
            except ConfigError as error:
                raise ConfigError(f"table {table.name}: optimizer: {error}") from None
        options = {"rows": table.rows} | options | {"name": table.name, "features": (), "optimizer": optimizer}
        return replace(template, **options)
    except ConfigError as error:
        raise ConfigError(f"{settings.source}: {error}" if settings.source else str(error)) from None


def as_json(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """All settings of tables but their homes, which a resumed run may change: for the manifest of a checkpoint."""
    return [_described(table) for table in tables]


def _described(table: Table) -> dict[str, Any]:
    left_out = ("home", "lr", "ids")
    found = {one.name: _plain(getattr(table, one.name)) for one in fields(table) if one.name not in left_out}
    if table.ids is not None:
        found["ids"] = described_ids(table.ids)
    if table.train_rank is None:
        initial = Uniform(table.rows**-0.5) if table.initial is None else table.initial
        if not isinstance(initial, Uniform | Normal | Zeros):
            raise refused(f"table {table.name}: initial", initial, "Uniform, Normal, Zeros")
        found["initial"] = {"kind": type(initial).__name__.lower()} | asdict(initial)
    found["optimizer"] = {one.name: _plain(getattr(table.optimizer, one.name)) for one in fields(table.optimizer)}
    return found


def described_ids(rules: DynamicIds) -> dict[str, Any]:
    """The rules of dynamic ids, for the manifest of a checkpoint."""
    found = {one.name: _plain(getattr(rules, one.name)) for one in fields(rules)}
    if rules.admit_count == "exact":
        del found["admit_count"]  # Checkpoints were written before there was a choice.
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name.lower()
    return list(value) if isinstance(value, tuple) else value
