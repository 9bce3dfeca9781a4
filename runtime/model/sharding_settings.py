# SPDX-License-Identifier: Apache-2.0
"""Where the shards of tables lie, by the name of a sharding or from a TOML file (docs/reference/models.md).

default = "table_wise"            # or a plan: [shards]
[tables]                          #            "user/0.0" = 1
user = "row_wise"                 #            [plan], what it is for (`sennit shard`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sennit.known_names import hint
from sennit.runtime.model.toml_file import Check, choice, entries, integer, number, read_toml, refused, section
from sennit.runtime.sharded.placement import EVERYWHERE, SHARDINGS, Placement, place, placed, sharding_names
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError

AUTO: Final = "auto"
MAX_RANK: Final = 4095
_NAME: Final = choice({name: name for name in SHARDINGS})
_PLAN: Final[dict[str, Check]] = {
    "ranks": integer(1, MAX_RANK + 1),
    "local_ranks": integer(1, MAX_RANK + 1),
    "step_ms": number("0 or more", lambda value: value >= 0),
    "tables": lambda place, value: {
        name: _text(f"{place}: {name}", one) for name, one in entries(place, value).items()
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Which rank has which shard, said in a way that fits any number of ranks. Or a plan, for one number."""

    default: str = "table_wise"
    """The sharding of tables that are not in `tables`. It spreads those that have shards to spread."""

    tables: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, int] | None = None
    """A plan: the rank of each shard by its name; -1 is every rank."""

    ranks: int | None = None
    """The ranks that the plan is for; None: any that it fits."""

    local_ranks: int | None = None
    """The ranks of a host that the plan is for; None: any."""

    plan_tables: Mapping[str, str] = field(default_factory=dict)
    """The tables that the plan is for (`described`), by name; empty: any with these shards."""

    is_planned: bool = False
    """`auto`: the run plans itself (`sennit.runtime.planner`)."""

    source: str = "--sharding"
    """Where it comes from, for errors."""

    def placement(self, tables: Sequence[Table], world_size: int, **options: Any) -> Placement:
        """The owner of each shard. `options`: those of `sharded.place`.

        Raises `ConfigError` if it is of another model, and for what `sharded.place` refuses.
        """
        try:
            if self.shards is not None:
                self._check_plan(tables, world_size, options.get("local_ranks"))
                return placed(tables, world_size, self.shards)
            names = sharding_names(
                tables, self.tables, world_size, others=self.default, local_ranks=options.get("local_ranks")
            )
        except ConfigError as error:
            raise ConfigError(f"{self.source}: {error}") from None
        return place(tables, world_size, names, **options)

    def _check_plan(self, tables: Sequence[Table], world_size: int, local_ranks: int | None) -> None:
        """Raises `ConfigError` if the plan says that it is for other tables or ranks."""
        here = {table.name: described(table) for table in tables}
        for name in dict.fromkeys([*self.plan_tables, *(here if self.plan_tables else ())]):
            planned, own = self.plan_tables.get(name, "not there"), here.get(name, "not there")
            if planned != own:
                raise ConfigError(f"the placement is of another model: its table {name} is {planned}; here it is {own}")
        if self.ranks is not None and self.ranks != world_size:
            raise ConfigError(f"the placement is for {self.ranks} ranks, but there are {world_size}")
        if None not in (self.local_ranks, local_ranks) and self.local_ranks != local_ranks:
            raise ConfigError(
                f"the placement is for {self.local_ranks} ranks on each host, but there are {local_ranks}; allowed: "
                "the same, or a file without local_ranks"
            )


def sharding_of(text: str) -> Sharding:
    """The sharding of this name, or of this file. Raises `ConfigError`."""
    if text in SHARDINGS:
        return Sharding(default=text)
    if text == AUTO:
        return Sharding(is_planned=True)
    if not text.endswith(".toml"):
        allowed = f"{', '.join((*SHARDINGS, AUTO))}, or a file whose name ends in .toml"
        raise ConfigError(f"--sharding {text!r}; allowed: {allowed}{hint(text, (*SHARDINGS, AUTO))}")

    checks = {
        "default": _NAME,
        "tables": _all(_NAME),
        "shards": _all(integer(EVERYWHERE, MAX_RANK)),
        "plan": lambda place, value: section(place, value, _PLAN),
    }
    found = section(text, read_toml(Path(text)), checks)
    plan = found.pop("plan", None)
    if "shards" in found and len(found) > 1:
        raise ConfigError(f"{text}: shards with default or tables; allowed: one of them (a plan has all shards)")
    if plan is not None and "shards" not in found:
        raise ConfigError(f"{text}: plan without shards; allowed: both, or shards alone")
    told = dict(plan or {})
    return Sharding(
        source=text,
        ranks=told.get("ranks"),
        local_ranks=told.get("local_ranks"),
        plan_tables=told.get("tables", {}),
        **found,
    )


def described(table: Table) -> str:
    """What a plan says of a table: all that decides what a rank does for it."""
    shards = (
        f"{table.row_shards} x {table.column_shards} shards"
        if table.train_rank is None
        else (f"a tensor train of rank {table.train_rank}")
    )
    return f"{table.rows} x {table.dim}, {shards}, {table.precision.name.lower()}"


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(place, value, "a text")
    return value


def _all(check: Check) -> Check:
    """Checks each value of a section whose keys are names."""
    return lambda place, value: {name: check(f"{place}: {name}", one) for name, one in entries(place, value).items()}
