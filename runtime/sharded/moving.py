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
    """Moves shards to their ranks in `placement`. Returns this rank's engines and the bytes that came here. Collective.

    Shards that stay in memory keep their memory. Files are written anew, from copies of their rows, beside the old
    files: a move that fails has changed nothing. Every rank visits the same shards in the same order, so transfers
    match.

    Raises on all ranks if files cannot be made on one of them, or if batches from files are not done on one.
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
    """Returns the later settings, the shards that this rank holds, and the shards that it will hold.

    Rows in files are copied first. A shard that stays is in both with the same memory, unless it leaves a file for
    memory. Shards that will come have memory, or files, to be filled.
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
        # What dynamic tables have on a device travels through host memory (`GrowingShards`).
        is_on_host = settings.homes.is_on_host(table) or table.ids is not None
        device = torch.device("cpu") if is_on_host else settings.device
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
    """Copies the `source` of rank `giver` to the `target` of each of the `takers`. On other ranks it does nothing."""
    if rank == giver:
        for tensor in source:
            for taker in takers:
                dist.send(tensor, group=group, group_dst=taker)
    elif rank in takers:
        for tensor in target:
            dist.recv(tensor, group=group, group_src=giver)


def _tensors(held: Held) -> list[Tensor]:
    """The tensors of a shard, in the same order on all ranks."""
    return [held.weight, *(held.states[name] for name in sorted(held.states))]


def _copy(source: Held, target: Held) -> None:
    """Copies a shard, where source and target are not the same memory."""
    for old, new in zip(_tensors(source), _tensors(target), strict=True):
        if old.data_ptr() != new.data_ptr():
            new.copy_(old)
