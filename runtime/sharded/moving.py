# SPDX-License-Identifier: Apache-2.0
"""Moves shards between ranks: rows and optimizer states travel as they are, so no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from sennit.runtime.sharded.engines import Engines, engines_of
from sennit.runtime.sharded.placement import EVERYWHERE, Placement
from sennit.runtime.sharded.shards import Held, parts_of
from sennit.runtime.sharded.tables import shard_spec, shards_of


def moved(
    before: Sequence[Engines], placement: Placement, group: dist.ProcessGroup | None
) -> tuple[list[Engines], int]:
    """What this rank holds with another placement, and the bytes that came to it. Collective. For shards in memory.

    Shards that stay keep their memory. Every rank walks the same shards in the same order, so transfers match.
    """
    settings = before[0].settings
    tables, rank, world = settings.tables, settings.slices.rank, settings.slices.world_size
    held = {one.name: one for engines in before for one in engines.held()}
    later = replace(settings, placement=placement)
    after = engines_of(later, held)
    for old, new in zip(before, after, strict=True):
        new.step = old.step
    here = {one.name: one for engines in after for one in engines.held()}
    size_bytes = 0
    for shard in shards_of(tables):
        giver, owner = settings.placement.owner_of[shard], placement.owner_of[shard]
        takers = [] if giver == EVERYWHERE else [other for other in range(world) if owner in (other, EVERYWHERE)]
        for part in parts_of(shard_spec(tables, shard)):
            if part.name in held and part.name in here:
                _copy(held[part.name], here[part.name])
            source = _tensors(held[part.name]) if rank == giver else []
            target = _tensors(here[part.name]) if rank in takers else []
            hand_over(source, target, giver, [other for other in takers if other != giver], rank, group)
            size_bytes += sum(one.nbytes for one in target if rank != giver)
    return after, size_bytes


def hand_over(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    giver: int,
    takers: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Copies tensors of rank `giver` to those of the `takers`, others than it. All ranks of the group may call it."""
    if rank == giver:
        for tensor in source:
            for taker in takers:
                dist.send(tensor, group=group, group_dst=taker)
    elif rank in takers:
        for tensor in target:
            dist.recv(tensor, group=group, group_src=giver)


def _tensors(held: Held) -> list[Tensor]:
    """In one order on all ranks."""
    return [held.weight, *(held.states[name] for name in sorted(held.states))]


def _copy(source: Held, target: Held) -> None:
    """For what has got new memory."""
    for old, new in zip(_tensors(source), _tensors(target), strict=True):
        if old.data_ptr() != new.data_ptr():
            new.copy_(old)
