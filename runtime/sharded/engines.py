# SPDX-License-Identifier: Apache-2.0
"""The engines of tables that take their steps together, with the shards that this rank holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.spec import ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.dynamic import DynamicShards
from sennit.runtime.sharded.features import features_of
from sennit.runtime.sharded.files import TableFiles, TableStore, layouts_of
from sennit.runtime.sharded.growing import GrowingShards
from sennit.runtime.sharded.initial import fill, fill_train
from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.row_numbers import rows_for_ids, spare_rows
from sennit.runtime.sharded.shards import Expected, Held, Shards, expected, parts_of, tensors_of
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.stored import StoredShards
from sennit.runtime.sharded.tables import Home, Homes, Shard, Table, shard_spec
from sennit.runtime.sharded.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings that all groups of a module's tables share."""

    tables: tuple[Table, ...]
    placement: Placement
    slices: Slices
    seed: int
    implementation_name: str
    """The implementation for tables on the device."""

    device: torch.device
    """Where results and gradients are, and all tables that are not in host memory."""

    homes: Homes
    threads: int
    wire: Wire
    files: TableFiles | None = None
    """The files of the shards that only this rank has, if tables are in files."""


class Engines:
    """The shards of some tables on this rank: one engine for those it owns, one for replicated ones."""

    def __init__(
        self, settings: Settings, group: int, numbers: Sequence[int], kept: Mapping[str, Held] | None = None
    ) -> None:
        """`numbers`: tables of one group (`groups_of`). All of them are in host memory beside a device, or none.

        `kept`: the shards of this rank by name, if it has them already. They keep their memory, except tensor trains,
        whose cores the caller copies. Rows of tables in files are copied to new files.
        """
        self.settings, self.group = settings, group
        self._first = numbers[0]
        self.here = settings
        """The settings, with the device of these tables. Their results and gradients are there, too."""
        if settings.homes.is_on_host(settings.tables[numbers[0]]):
            self.here = replace(settings, device=torch.device("cpu"), implementation_name="native")
        replicated = settings.placement.replicated
        own = [shard for shard in settings.placement.shards_on(settings.slices.rank) if shard.table in numbers]
        sharded = [shard for shard in own if shard.table not in replicated]
        self.sharded, self.number_of = self._made(sharded, numbers, settings.files, kept)
        self.replicated, self.replica_of = self._made(
            [shard for shard in own if shard.table in replicated], numbers, None, kept
        )
        features = list(enumerate(features_of(settings.tables)))
        self.features = [place for place, (_, table) in features if table in numbers and table not in replicated]
        """Numbers of the features whose tables are sharded."""
        self.replicated_features = [place for place, (_, table) in features if table in numbers and table in replicated]

    def _made(
        self,
        shards: Sequence[Shard],
        numbers: Sequence[int],
        files: TableFiles | None,
        kept: Mapping[str, Held] | None,
    ) -> tuple[Shards, dict[Shard, int]]:
        settings = self.here
        tables, first = settings.tables, settings.tables[numbers[0]]
        specs = [shard_spec(tables, shard) for shard in shards]

        def made(specs: Sequence[ShardSpec], memory: Sequence[ShardMemory | None] | None = None) -> EmbeddingEngine:
            if kept is not None:
                found = memory or [None] * len(specs)
                memory = [one or _memory(spec, kept) for one, spec in zip(found, specs, strict=True)]
            engine = EmbeddingEngine(
                specs,
                first.optimizer,
                implementation_name=settings.implementation_name,
                device=settings.device,
                rounding=first.rounding,
                seed=settings.seed,
                threads=settings.threads,
                memory=memory,
            )
            for number, spec in enumerate(specs if kept is None else ()):
                if isinstance(spec, TensorTrainSpec):
                    cores = [engine.weight(core.name) for core in spec.cores]
                    fill_train(spec, cores, tables[shards[number].table], seed=settings.seed)
                elif not spec.directories and (memory is None or memory[number] is None):
                    fill(engine.weight(spec.name), tables, shards[number], seed=settings.seed)
            return engine

        def filled(weight: Tensor, number: int, first_row: int) -> None:
            if not specs[number].directories:
                fill(weight, tables, shards[number], seed=settings.seed, first=first_row)

        def waiting() -> AbstractContextManager[None]:
            return settings.wire.phase("wait for rows")

        number_of, of_shard = {shard: number for number, shard in enumerate(shards)}, [shard.table for shard in shards]
        state = None
        if kept is not None:
            state = {key: tensor for held in kept.values() for key, tensor in tensors_of(held).items()}
        spares = [spare_rows(spec) for spec in specs]
        layouts = {} if files is None else layouts_of(tables, shards, settings.homes)
        found: Shards
        if any(spares) and settings.device.type != "cpu" and not layouts:
            counts = [rows_for_ids(tables[shard.table], spec) for shard, spec in zip(shards, specs, strict=True)]
            found = GrowingShards(specs, first.optimizer, settings.device, made, of_shard, spares, counts)
        elif files is None or not layouts:
            with_spares = [replace(spec, row_count=spec.row_count + n) for spec, n in zip(specs, spares, strict=True)]
            found = Shards(made(with_spares), of_shard, spares)
        else:
            found = StoredShards(specs, layouts, first.optimizer, files, filled, made, waiting, state, of_shard, spares)
        if any(spares):
            phase = settings.wire.phase
            found = DynamicShards(found, tables, shards, specs, seed=settings.seed, state=state, phase=phase)
        return found, number_of

    @property
    def _all(self) -> tuple[Shards, Shards]:
        return self.sharded, self.replicated

    def from_tables(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies results of these tables, by feature, to the module's device."""
        return {feature: one.to(self.settings.device) for feature, one in values.items()}

    def to_tables(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies the values of these tables' features from the module's device to the device of the tables."""
        own = (*self.features, *self.replicated_features)
        return {feature: values[feature].to(self.here.device) for feature in own}

    def held(self) -> Iterator[Held]:
        """The shards of this rank."""
        for shards in self._all:
            yield from shards.held()

    def in_memory(self) -> Iterator[Held]:
        """`Shards.in_memory` of the shards of this rank."""
        for shards in self._all:
            yield from shards.in_memory()

    @property
    def in_files(self) -> frozenset[str]:
        """The names of the shards that are in files."""
        return self.sharded.in_files

    def check_idle(self) -> None:
        """`Shards.check_idle`."""
        self.sharded.check_idle()

    def changes(self, changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """`Shards.changes` of the shards of this rank."""
        for shards in self._all:
            yield from shards.changes(changed)

    def expected(self) -> dict[str, Expected]:
        """The tensors of this rank's shards in a checkpoint, by name."""
        optimizer = self.settings.tables[self._first].optimizer
        specs = [spec for shards in self._all for spec in shards.specs]
        return {key: wanted for spec in specs for key, wanted in expected(spec, optimizer).items()}

    def lacking(self, given: Collection[str]) -> tuple[set[str], set[str]]:
        """What a load of tensors of these names leaves as it is, and what it lets begin anew, with 0. By name.

        A shard whose rows are not all given stays, and so does one of a dynamic table if anything is not given: its ids
        have a clock. If a state of the optimizer is not given, those of the shard begin anew.
        """
        optimizer = self.settings.tables[self._first].optimizer
        stay, begin = set[str](), set[str]()
        for spec in (spec for shards in self._all for spec in shards.specs):
            keys = expected(spec, optimizer).keys()
            states = {f"{part.name}.{name}" for part in parts_of(spec) for name in optimizer.states}
            missing = {key for key in keys if key not in given}
            if missing and (spec.directories or missing - states):
                stay |= keys
            elif missing:
                begin |= states
        return stay, begin

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the tensors of `expected`, and what `lacking` says where there are not all."""
        stay, begin = self.lacking(state)
        own = {key: tensor for held in self.held() for key, tensor in tensors_of(held).items()} if stay else {}
        begun = {key: torch.zeros(wanted.shape) for key, wanted in self.expected().items() if key in begin}
        whole = {**state, **{key: own[key] for key in stay}, **begun}
        for shards in self._all:
            shards.load(whole)

    def counters(self) -> dict[str, int]:
        """Counters of the caches before files, by name."""
        return self.sharded.counters()

    def close(self) -> None:
        """Removes files."""
        self.sharded.close()

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.sharded.step

    @step.setter
    def step(self, step: int) -> None:
        self.sharded.step = self.replicated.step = step


def _memory(spec: ShardSpec, kept: Mapping[str, Held]) -> ShardMemory | None:
    """The memory that a shard has; None if it is new here, or a tensor train, or has spare rows."""
    held = kept.get(spec.name)
    if held is None or spec.directories or isinstance(spec, TensorTrainSpec):
        return None
    return ShardMemory(spec=spec, weight=held.weight, states=held.states)


def engines_of(settings: Settings, kept: Mapping[str, Held] | None = None) -> list[Engines]:
    """The engines of all groups, in order.

    A group's tables on the device come before its tables in host memory, and dynamic tables have engines of their own,
    others for those in files.
    """
    found = []
    for group, whole in enumerate(groups_of(settings.tables)):
        kinds: dict[tuple[bool, bool, bool], list[int]] = {}
        for number in whole:
            table = settings.tables[number]
            is_dynamic = table.ids is not None
            is_in_file = is_dynamic and settings.homes.of(table) is Home.FILE
            kinds.setdefault((settings.homes.is_on_host(table), is_dynamic, is_in_file), []).append(number)
        found += [Engines(settings, group, kinds[kind], kept) for kind in sorted(kinds)]
    return found


def with_files(settings: Settings, store: TableStore) -> Settings:
    """The settings with the files of a rank. Raises `ConfigError` if its memory is too small for their caches."""
    tables, placement = settings.tables, settings.placement
    rank = settings.slices.rank
    own = [shard for shard in placement.shards_on(rank) if shard.table not in placement.replicated]
    layouts = [
        layout
        for numbers in groups_of(tables)
        for layout in layouts_of(tables, [shard for shard in own if shard.table in numbers], settings.homes)
    ]
    return replace(settings, files=TableFiles(store, rank, layouts, settings.device))


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
