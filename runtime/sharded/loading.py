# SPDX-License-Identifier: Apache-2.0
"""Takes over the shards of a rank from a state of the whole model, or of a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sennit.runtime.sharded.engines import Engines, groups_of
from sennit.runtime.sharded.shards import expected
from sennit.runtime.sharded.tables import Table, shard_spec, shards_of


def load(
    all_engines: Sequence[Engines],
    tables: Sequence[Table],
    state: Mapping[str, Any],
    prefix: str,
    *,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """What `torch.nn.Module._load_from_state_dict` does, with its lists of keys. A state may have other ranks' shards.

    Tables that take their steps together are taken over together, or left alone if anything of them is missing.
    """
    for engines in all_engines:
        found = {}
        for key, wanted in engines.expected().items():
            given = state.get(prefix + key)
            if given is None:
                missing.append(prefix + key)
            elif (given.shape, given.dtype) != wanted:
                errors.append(
                    f"{prefix}{key} is {given.dtype} of {tuple(given.shape)}; the model has {wanted.dtype} of "
                    f"{wanted.shape}: were its tables cut into other shards?"
                )
            else:
                found[key] = given
        if len(found) == len(engines.expected()):
            engines.load(found)
    known = {
        prefix + key
        for shard in shards_of(tables)
        for key in expected(shard_spec(tables, shard), tables[shard.table].optimizer)
    }
    unexpected += [key for key in state if key.startswith(prefix) and key not in known and key != f"{prefix}steps"]
    steps = state.get(f"{prefix}steps")
    if steps is None or len(steps) != len(groups_of(tables)):
        missing.append(f"{prefix}steps")
        return
    for engines in all_engines:
        engines.step = int(steps[engines.group])
