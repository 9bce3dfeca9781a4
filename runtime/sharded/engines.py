# SPDX-License-Identifier: Apache-2.0
"""The engines of the tables that take their steps together, and what this rank holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.sharded.features import features_of
from sennit.runtime.sharded.initial import fill
from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Shard, Table, shard_name, shard_spec
from sennit.runtime.sharded.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all groups of tables of a module share."""

    tables: tuple[Table, ...]
    placement: Placement
    slices: Slices
    seed: int
    implementation_name: str
    threads: int
    wire: Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A shard that this rank holds: its engine's own memory."""

    name: str
    weight: Tensor
    """[rows, columns] in the table's precision."""

    states: dict[str, Tensor]
    """Of the optimizer, float32."""


class Engines:
    """The shards of some tables on this rank: one engine for those it owns, one for replicated ones."""

    def __init__(self, settings: Settings, numbers: Sequence[int]) -> None:
        """`numbers`: tables with one optimizer and one way to round."""
        self.settings = settings
        self.held: list[Held] = []
        replicated = settings.placement.replicated
        own = [shard for shard in settings.placement.shards_on(settings.slices.rank) if shard.table in numbers]
        self.sharded, self.number_of = self._made([shard for shard in own if shard.table not in replicated], numbers)
        self.replicated, self.replica_of = self._made([shard for shard in own if shard.table in replicated], numbers)
        features = list(enumerate(features_of(settings.tables)))
        self.features = [place for place, (_, table) in features if table in numbers and table not in replicated]
        """Numbers of the features whose tables are sharded."""
        self.replicated_features = [place for place, (_, table) in features if table in numbers and table in replicated]

    def _made(self, shards: Sequence[Shard], numbers: Sequence[int]) -> tuple[EmbeddingEngine, dict[Shard, int]]:
        settings = self.settings
        first = settings.tables[numbers[0]]
        engine = EmbeddingEngine(
            [shard_spec(settings.tables, shard) for shard in shards],
            first.optimizer,
            implementation_name=settings.implementation_name,
            rounding=first.rounding,
            seed=settings.seed,
            threads=settings.threads,
        )
        for shard in shards:
            name = shard_name(settings.tables, shard)
            fill(engine.weight(name), settings.tables, shard, seed=settings.seed)
            self.held.append(Held(name=name, weight=engine.weight(name), states=engine.states(name)))
        return engine, {shard: number for number, shard in enumerate(shards)}

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.sharded.step

    @step.setter
    def step(self, step: int) -> None:
        self.sharded.step = self.replicated.step = step


def groups_of(tables: Sequence[Table]) -> list[list[int]]:
    """Numbers of the tables that can take their steps together, in the order of the model."""
    groups: list[list[int]] = []
    for number, table in enumerate(tables):
        for numbers in groups:
            other = tables[numbers[0]]
            if (other.optimizer, other.rounding) == (table.optimizer, table.rounding):
                numbers.append(number)
                break
        else:
            groups.append([number])
    return groups
