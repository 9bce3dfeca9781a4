# SPDX-License-Identifier: Apache-2.0
"""Placement files: written by `sennit shard`, read by `sennit train --sharding FILE` (docs/reference/models.md).

[plan]                        # what the plan is for; may be left out
ranks = 4
local_ranks = 2               # on each host
step_ms = 12.3                # as predicted
[plan.tables]                 # rows, columns and shards of each
user = "1000000 x 64, 8 x 1 shards, fp32"
[shards]                      # the rank of each shard; -1: every rank
"user/0.0" = 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sennit.command_line import write_whole
from sennit.runtime.model.sharding_settings import Sharding, described, sharding_of
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError


def write(path: Path, tables: Sequence[Table], cluster: Cluster, shards: Mapping[str, int], step_s: float) -> None:
    """Writes a file whole or not at all. Raises `SennitError`."""
    lines = ["[plan]", f"ranks = {cluster.ranks}", f"local_ranks = {cluster.local_ranks}"]
    lines += [f"step_ms = {step_s * 1e3:.3f}", "", "[plan.tables]"]
    lines += [f"{_quoted(table.name)} = {_quoted(described(table))}" for table in tables]
    lines += ["", "[shards]", *(f"{_quoted(name)} = {rank}" for name, rank in shards.items())]
    write_whole(path, "\n".join(lines) + "\n")


def read(path: Path) -> Sharding:
    """A file with a plan. Raises `ConfigError`, also for one that names shardings instead of shards."""
    found = sharding_of(str(path))
    if found.shards is None:
        raise ConfigError(f"{path} has no section shards; allowed: a file that sennit shard wrote")
    return found


def differences(first: Sharding, second: Sharding) -> list[str]:
    """What differs between two plans: a line for each shard, and for each of the tables that they are for."""
    lines = []
    for what, ours, theirs in (
        ("ranks", {"": first.ranks}, {"": second.ranks}),
        ("ranks of a host", {"": first.local_ranks}, {"": second.local_ranks}),
        ("table", dict(first.plan_tables), dict(second.plan_tables)),
        ("shard", dict(first.shards or {}), dict(second.shards or {})),
    ):
        for name in dict.fromkeys([*ours, *theirs]):
            before, after = ours.get(name), theirs.get(name)
            if before != after:
                lines.append(f"{what}{' ' if name else ''}{name}: {_said(what, before)} -> {_said(what, after)}")
    return lines


def _said(what: str, value: object) -> str:
    if value is None:
        return "not there"
    if what != "shard":
        return str(value)
    return "every rank" if value == -1 else f"rank {value}"


def _quoted(text: str) -> str:
    escaped = "".join(
        f"\\u{ord(sign):04x}" if ord(sign) < 32 or ord(sign) == 127 else f"\\{sign}" if sign in '"\\' else sign
        for sign in text
    )
    return f'"{escaped}"'
