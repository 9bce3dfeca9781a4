# SPDX-License-Identifier: Apache-2.0
"""One hash of all shards of a model, whoever holds what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from sennit.runtime.sharded.shards import Held
from sennit.transport.errors import SennitError


def digest_of(held: Iterable[Held], group: dist.ProcessGroup | None) -> str:
    """SHA-256 of the shards that all ranks hold; `held`: those of this one. Collective.

    Raises `SennitError` if replicas of a shard differ.
    """
    own = {shard.name: _hash(shard) for shard in held}
    everyone: list[Any] = [own]
    if (world_size := dist.get_world_size(group)) > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, own, group=group)
    of_shard: dict[str, str] = {}
    for one in everyone:
        for name, value in one.items():
            if of_shard.setdefault(name, value) != value:
                raise SennitError(f"replicas of shard {name} differ")
    text = "\n".join(f"{name} {of_shard[name]}" for name in sorted(of_shard))
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(held: Held) -> str:
    found = hashlib.sha256()
    for tensor in (held.weight, *held.states.values()):
        found.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()
