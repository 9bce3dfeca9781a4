# SPDX-License-Identifier: Apache-2.0
"""What describes a model of sharded tables, as text: ranks whose texts differ would train different models."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.tables import Table, shard_name, shards_of


def described(
    tables: Sequence[Table], placement: Placement, *, slices: int, gradients: str, seed: int
) -> dict[str, str]:
    """All that decides bits or owners, by what it is."""
    found = {"slices": str(slices), "gradients": gradients, "seed": str(seed)}
    found["tables"] = ", ".join(table.name for table in tables)
    for table in tables:
        for field in table.__dataclass_fields__:
            if field not in ("initial", "home"):
                found[f"table {table.name}: {field}"] = str(getattr(table, field))
    return found | owners(tables, placement)


def homes(tables: Sequence[Table]) -> dict[str, str]:
    """Where each table is said to be. It decides no bit, but what ranks exchange."""
    return {f"table {table.name}: home": "none" if table.home is None else table.home.value for table in tables}


def owners(tables: Sequence[Table], placement: Placement) -> dict[str, str]:
    """The rank of each shard."""
    return {f"owner of {shard_name(tables, shard)}": str(placement.owner_of[shard]) for shard in shards_of(tables)}
