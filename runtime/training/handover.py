# SPDX-License-Identifier: Apache-2.0
"""Moves a run's state from the trainers of one group to those of the next, which place shards differently.

Nobody dies when a group takes newcomers in, so no state is lost. Each shard moves from a rank that holds it to its new
owners. The dense part, which every member holds, is sent by the lowest of them to all. Error feedback belongs to
a rank's place in the old group: it is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sennit.runtime.sharded.moving import hand_over
from sennit.runtime.sharded.placement import EVERYWHERE
from sennit.runtime.sharded.tables import shard_name, shards_of
from sennit.runtime.training.trainer import LOST, TABLES, Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The state that a member keeps of its trainer while the group changes: tensors only, no group."""

    step: int
    shards: tuple[str, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer) -> Holding:
        return cls(step=trainer.step, shards=trainer.own_shards, state=trainer.state())


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a rank tells the others about the state that it holds."""

    step: int
    shards: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The ranks of the present group that together have a whole state."""

    step: int
    holder_of: dict[str, int]
    """Which rank holds each shard."""

    dense_holder: int


def find_source(claims: Sequence[Claim | None], shards: Collection[str]) -> Source | None:
    """The newest state that the ranks hold completely; None if every state misses a part. Claims are in rank order.

    Parts of different steps are never mixed. Claims may differ in step: a rank drops its holding when it has finished a
    handover, in which another rank may fail.
    """
    for step in sorted({claim.step for claim in claims if claim is not None}, reverse=True):
        holders = [rank for rank, claim in enumerate(claims) if claim is not None and claim.step == step]
        holder_of: dict[str, int] = {}
        for rank in holders:
            claim = claims[rank]
            assert claim is not None
            for shard in claim.shards:
                holder_of.setdefault(shard, rank)
        if set(shards) <= holder_of.keys():
            return Source(step=step, holder_of=holder_of, dense_holder=holders[0])
    return None


def take_over(trainer: Trainer, source: Source, holding: Holding | None) -> None:
    """Fills a new trainer from `source`. Collective. `holding` is this rank's; None for a newcomer."""
    state = {name: value for name, value in trainer.state().items() if not name.startswith(LOST)}
    held: dict[str, Any] = {} if holding is None or holding.step != source.step else holding.state
    tables, owner_of = trainer.tables.tables, trainer.tables.placement.owner_of
    # Every rank walks the same list in the same order, so sends and receives match.
    for shard in shards_of(tables):
        name, owner = shard_name(tables, shard), owner_of[shard]
        holder = source.holder_of[name]
        owners = range(trainer.world_size) if owner == EVERYWHERE else (owner,)
        given = held if trainer.rank == holder else {}
        keys = _keys_of(name, given or state)
        if trainer.rank == holder and holder in owners:
            for key in keys:
                state[key].copy_(held[key])
        hand_over(
            [given[key] for key in keys if given],
            [state[key] for key in keys if key in state],
            holder,
            [other for other in owners if other != holder],
            trainer.rank,
        )
    gives = trainer.rank == source.dense_holder
    plain: list[Any] = [{name: value for name, value in held.items() if not isinstance(value, Tensor)}]
    dist.broadcast_object_list(plain, src=source.dense_holder)
    common = {f"{TABLES}steps"}
    for name in sorted(name for name, value in state.items() if isinstance(value, Tensor)):
        if name.startswith(TABLES) and name not in common:
            continue
        if gives:
            state[name].copy_(held[name])
        dist.broadcast(state[name], src=source.dense_holder)
    state.update(plain[0])
    trainer.restore(state)


def _keys_of(shard: str, names: Iterable[str]) -> list[str]:
    """The tensors of a shard, in the same order on all ranks."""
    return sorted(name for name in names if name.startswith(f"{TABLES}{shard}."))
