# SPDX-License-Identifier: Apache-2.0
"""Moves shards between ranks: rows and optimizer states travel as they are, so no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.sharded.agreement import made_on_all
from sennit.runtime.sharded.engines import Engines, Settings, engines_of, with_files
from sennit.runtime.sharded.placement import EVERYWHERE, Placement
from sennit.runtime.sharded.shards import Held, expected, parts_of
from sennit.runtime.sharded.tables import Home, shard_spec, shards_of


def moved(
    before: Sequence[Engines], placement: Placement, group: dist.ProcessGroup | None
) -> tuple[list[Engines], int]:
    """What this rank holds with another placement, and the bytes that came to it. Collective.

    Shards that stay in memory keep it. Files are written anew, from copies of what was in them, beside the old ones: a
    move that fails has changed nothing. Every rank walks the same shards in the same order, so transfers match.

    Raises on all ranks what `make its table store` raises, and `ArgumentError` if batches from files are not done.
    """
    settings = before[0].settings
    tables, rank, world = settings.tables, settings.slices.rank, settings.slices.world_size
    later, held, here = made_on_all(lambda: _made_ready(before, placement), "get ready to move its shards", group)
    size_bytes = 0
    for shard in shards_of(tables):
        giver, owner = settings.placement.owner_of[shard], placement.owner_of[shard]
        takers = [] if giver == EVERYWHERE else [other for other in range(world) if owner in (other, EVERYWHERE)]
        for part in parts_of(shard_spec(tables, shard)):
            source = _tensors(held[part.name]) if rank == giver else []
            target = _tensors(here[part.name]) if rank in takers else []
            hand_over(source, target, giver, [other for other in takers if other != giver], rank, group)
            size_bytes += sum(one.nbytes for one in target if rank != giver)
    after: list[Engines] = []

    def make() -> None:
        after.extend(engines_of(later, here))

    try:
        made_on_all(make, "make its table store", group)
    except BaseException:
        for engines in after:
            engines.close()
        raise
    for old, new in zip(before, after, strict=True):
        new.step = old.step
        for one in new.in_memory():
            _copy(here[one.name], one)
        old.close()
    return after, size_bytes


def _made_ready(before: Sequence[Engines], placement: Placement) -> tuple[Settings, dict[str, Held], dict[str, Held]]:
    """The later settings; what this rank holds, copied where it is in files; and what it will hold.

    Of the latter, what it has already is the same, but not where it leaves a file for memory. What is to come has room.
    """
    settings = before[0].settings
    later = replace(settings, placement=placement)
    if settings.files is not None:
        later = with_files(later, settings.files.place)
    for engines in before:
        engines.check_idle()
    leaving = frozenset[str]().union(*(engines.in_files for engines in before))
    held = {one.name: one for engines in before for one in engines.held()}
    here: dict[str, Held] = {}
    for shard in placement.shards_on(settings.slices.rank):
        table = settings.tables[shard.table]
        is_replicated = placement.owner_of[shard] == EVERYWHERE
        is_in_file = settings.homes.of(table, is_replicated=is_replicated) is Home.FILE
        device = torch.device("cpu") if settings.homes.is_on_host(table) else settings.device
        for part in parts_of(shard_spec(settings.tables, shard)):
            is_in_file = is_in_file and part.row_count > 0
            if part.name in held and (is_in_file or part.name not in leaving):
                here[part.name] = held[part.name]
                continue
            tensors = {
                key.rpartition(".")[2]: later.files.copy(wanted)
                if is_in_file and later.files is not None
                else torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
                for key, wanted in expected(part, table.optimizer).items()
            }
            here[part.name] = Held(name=part.name, weight=tensors.pop("weight"), states=tensors)
            if part.name in held:
                _copy(held[part.name], here[part.name])
    return later, held, here


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
    """Where it is not the same memory."""
    for old, new in zip(_tensors(source), _tensors(target), strict=True):
        if old.data_ptr() != new.data_ptr():
            new.copy_(old)
