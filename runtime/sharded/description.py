# SPDX-License-Identifier: Apache-2.0
"""What describes a model of sharded tables, as text: ranks whose texts differ would train different models."""

from __future__ import annotations

from collections.abc import Sequence

from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.tables import Table, shard_name, shards_of


def described(
    tables: Sequence[Table], placement: Placement, *, slices: int, gradients: str, seed: int
) -> dict[str, str]:
    """All that every rank must have alike, by what it is."""
    found = {"slices": str(slices), "gradients": gradients, "seed": str(seed)}
    found["tables"] = ", ".join(table.name for table in tables)
    for table in tables:
        for field in table.__dataclass_fields__:
            if field != "initial":
                found[f"table {table.name}: {field}"] = str(getattr(table, field))
    return found | owners(tables, placement)


def owners(tables: Sequence[Table], placement: Placement) -> dict[str, str]:
    """The rank of each shard."""
    return {f"owner of {shard_name(tables, shard)}": str(placement.owner_of[shard]) for shard in shards_of(tables)}
