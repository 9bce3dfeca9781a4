# SPDX-License-Identifier: Apache-2.0
"""Moves a run's state from the trainers of one group to those of the next, which place tables differently.

Nobody dies when a group takes newcomers in, so no state is lost. Each table moves from the rank that holds it to its
new owner. The dense part, which every member holds, is sent by the lowest of them to all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from sennit.runtime.model.tensor_train import parts
from sennit.runtime.training.trainer import Trainer

# The parts of `Trainer.state` that belong to a table. All other parts are equal on all ranks.
TABLE_PARTS: Final = ("table", "row_state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The state that a member keeps of its trainer while the group changes: tensors only, no group."""

    step: int
    tables: tuple[str, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer) -> Holding:
        return cls(step=trainer.step, tables=trainer.own_tables, state=trainer.state())


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a rank tells the others about its holding."""

    step: int
    tables: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The ranks of the present group that together have a whole state."""

    step: int
    holder_of: dict[str, int]
    """Which rank holds each table."""

    dense_holder: int


def find_source(claims: Sequence[Claim | None], tables: Collection[str]) -> Source | None:
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
            for table in claim.tables:
                holder_of.setdefault(table, rank)
        if set(tables) <= holder_of.keys():
            return Source(step=step, holder_of=holder_of, dense_holder=holders[0])
    return None


def take_over(trainer: Trainer, source: Source, holding: Holding | None) -> None:
    """Fills a new trainer from `source`. Collective. `holding` is this rank's; None for a newcomer."""
    state = trainer.state()
    held: dict[str, Any] = {} if holding is None or holding.step != source.step else holding.state
    # Every rank walks the same list in the same order, so sends and receives match.
    for table, owner in zip(trainer.tables, trainer.placement.owner_of, strict=True):
        holder = source.holder_of[table.name]
        names = [spec.name for spec in parts(trainer.spec_of(table))]
        for key in (f"{part}.{name}" for name in names for part in TABLE_PARTS):
            if trainer.rank == holder == owner:
                state[key].copy_(held[key])
            elif trainer.rank == holder:
                dist.send(held[key], owner)
            elif trainer.rank == owner:
                dist.recv(state[key], holder)
    gives = trainer.rank == source.dense_holder
    plain: list[Any] = [{name: value for name, value in held.items() if not isinstance(value, Tensor)}]
    dist.broadcast_object_list(plain, src=source.dense_holder)
    for name in sorted(name for name, value in state.items() if _is_dense(name, value)):
        if gives:
            state[name].copy_(held[name])
        dist.broadcast(state[name], src=source.dense_holder)
    state.update(plain[0])
    trainer.restore(state)


def _is_dense(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name.partition(".")[0] not in TABLE_PARTS
