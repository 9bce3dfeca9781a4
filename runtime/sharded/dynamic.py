# SPDX-License-Identifier: Apache-2.0
"""Shards of tables whose ids nobody lists: their owner gives rows to ids as they come, and takes them away again.

Which ids have rows is a function of the batches that were trained on, and so is which row each has. Ids that come in
one batch get rows in the order of the ids. So it depends neither on ranks nor on the order in which they send.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.id_directory import IdDirectory, counted, initial_rows
from sennit.runtime.kernels.spec import Pooling, ShardSpec
from sennit.runtime.sharded.shards import Announced, Held, Shards
from sennit.runtime.sharded.tables import Shard, Table
from sennit.transport.errors import ArgumentError, ConfigError

SPARE_ROWS_MIN: Final = 1 << 16


def spare_rows(spec: ShardSpec) -> int:
    """How many rows an engine has behind those of a dynamic shard, for ids of a step that have no row. Memory that is
    never used is never there, so many cost nothing.
    """
    return max(spec.row_count, SPARE_ROWS_MIN) if spec.directories else 0


def with_spare_rows(spec: ShardSpec) -> ShardSpec:
    """The shard as an engine has it."""
    return dataclasses.replace(spec, row_count=spec.row_count + spare_rows(spec))


class _Numbers:
    """The rows and ids of one shard."""

    def __init__(self, table: Table, shard: Shard, spec: ShardSpec, engine: EmbeddingEngine, seed: int) -> None:
        """`spec`: without the spare rows that the engine has."""
        assert table.ids is not None
        self.table, self.rules, self.spec, self.seed = table, table.ids, spec, seed
        self._columns = table.column_range(shard.column)
        self._stream = dataclasses.replace(spec, stream_name=table.name).stream
        self._engine = engine
        self.entries = {name: torch.zeros(spec.row_count, 2, dtype=torch.int64) for name in spec.directories}
        self.counters = dict.fromkeys(("admitted", "evicted", "without_row"), 0)
        self.is_counted = shard.column == 0
        self._step = self._next_spare = 0
        self.open()

    def open(self) -> None:
        """Reads the directories anew, after their entries have changed."""
        self.directory = IdDirectory(self.entries["ids"])
        self.candidates = IdDirectory(self.entries["candidates"]) if "candidates" in self.entries else None

    def copied(self) -> dict[str, Tensor]:
        """Copies of the entries of each directory."""
        return {name: one.clone() for name, one in self.entries.items()}

    def rows_of(self, ids: Tensor, step: int, *, trains: bool, once: bool) -> tuple[Tensor, Tensor]:
        """Int64 [n]: the row of each of `ids`; and the rows that others gave up for them, int64.

        `trains`: a batch of step `step`, which counts, and gives rows to new ids. An id without a row has a spare one
        for this batch. `once`: an id counts once in a step. Raises `ConfigError` if there are not enough rows.
        """
        if trains and step != self._step:
            self._step, self._next_spare = step, 0
        rows, missing = self.directory.find(ids, step if trains else 0, once=once)
        freed = torch.empty(0, dtype=torch.int64)
        if not missing:
            return rows, freed
        without = rows < 0
        new, counts = counted(ids[without])
        found = torch.full_like(new, -1)
        if once:
            counts.fill_(1)
        if trains:
            is_due, totals = self._due(new, counts, step)
            if count := int(is_due.sum()):
                freed = self._make_room(count, step)
                found[is_due] = self._filled(self.directory.admit(new[is_due], totals[is_due], step), new[is_due])
                self.counters["admitted"] += count
        rest = found < 0
        if count := int(rest.sum()):
            found[rest] = self._filled(self._spares(count, trains=trains), new[rest])
            self.counters["without_row"] += count
        rows[without] = found[torch.searchsorted(new, ids[without])]
        return rows, freed

    def _due(self, new: Tensor, counts: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Which of the ids without rows get one now, and how often each has come. `counts`: in this batch."""
        known = self.candidates
        if known is None:
            return torch.ones(len(new), dtype=torch.bool), counts
        places, missing = known.find(new)
        if missing > known.free:
            known.evict(known.victims(max(missing - known.free, self._share), self.rules.eviction, step))
            places, missing = known.find(new)
        totals = counts.to(torch.int64)
        is_known = places >= 0
        totals[is_known] += known.count(places[is_known], counts[is_known], step)
        is_due = totals >= self.rules.admit_after
        known.evict(places[is_known & is_due])
        # Of a batch with more new ids than candidates have room, the others are forgotten.
        begun = (~is_known & ~is_due).nonzero().flatten()[: known.free]
        known.admit(new[begun], counts[begun], step)
        return is_due, totals

    def _make_room(self, count: int, step: int) -> Tensor:
        """Frees rows for `count` ids, if there are not enough. Returns those that it freed."""
        lack = count - self.directory.free
        if lack <= 0:
            return torch.empty(0, dtype=torch.int64)
        freed = self.directory.victims(max(lack, self._share), self.rules.eviction, step)
        if len(freed) < lack:
            raise ConfigError(
                f"table {self.table.name}: {count} new ids in a batch, but shard {self.spec.name} has "
                f"{self.directory.free + len(freed)} of its {self.spec.row_count} rows for them; allowed: more rows, "
                "or a smaller batch"
            )
        self.directory.evict(freed)
        self.counters["evicted"] += len(freed)
        return freed

    @property
    def _share(self) -> int:
        return int(self.spec.row_count * self.rules.evicted_share)

    def _spares(self, count: int, *, trains: bool) -> Tensor:
        """Rows for ids of this batch that have none. Those of training are used until the next step."""
        first = self._next_spare
        if first + count > (allowed := spare_rows(self.spec)):
            raise ConfigError(
                f"table {self.table.name}: {first + count} ids without rows in shard {self.spec.name} in a step; "
                f"allowed: {allowed}, or more rows"
            )
        if trains:
            self._next_spare += count
        return torch.arange(first, first + count) + self.spec.row_count

    def _filled(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Gives rows their first values. Returns them."""
        weight = self._engine.weight(self.spec.name)
        weight.index_copy_(0, rows, self._initial(ids).to(weight.dtype))
        for state in self._engine.states(self.spec.name).values():
            state.index_fill_(0, rows, 0)
        return rows

    def _initial(self, ids: Tensor) -> Tensor:
        """Float32 [ids, columns of the shard]: a function of the seed, the table and the id alone."""
        low, columns = self._columns.low, self._columns.size
        if self.table.initial is None:
            return initial_rows(
                ids,
                first_column=low,
                columns=columns,
                seed=self.seed,
                stream=self._stream,
                bound=self.table.rows**-0.5,
            )
        rows = torch.empty(len(ids), self.table.dim)
        for place, one in enumerate(ids.tolist()):
            self.table.initial(rows[place : place + 1], torch_stream(self.seed, "table", self.table.name, one))
        return rows[:, low : low + columns]


class DynamicShards(Shards):
    """Shards of one engine in memory. Some are of dynamic tables."""

    def __init__(
        self,
        engine: EmbeddingEngine,
        model: Sequence[Table],
        shards: Sequence[Shard],
        specs: Sequence[ShardSpec],
        *,
        seed: int,
        state: Mapping[str, Tensor] | None,
    ) -> None:
        """`engine` has the rows of `with_spare_rows`. `specs`: without them. `state`: of these shards, if they have
        been somewhere else before.
        """
        super().__init__(engine, [shard.table for shard in shards])
        self.specs = tuple(specs)
        self._numbers = {
            number: _Numbers(model[shard.table], shard, spec, engine, seed)
            for number, (shard, spec) in enumerate(zip(shards, specs, strict=True))
            if spec.directories
        }
        # Copies of the entries, for `changed_entries`.
        self._before: dict[int, dict[str, Tensor]] = {}
        # Batches that are looked up and have not been updated or released.
        self._in_use: weakref.WeakSet[Announced] = weakref.WeakSet()
        if state is not None:
            self.load(state)

    def fetch(self, announced: Announced) -> None:
        # Rows are given here, and not when a batch is announced: the steps before it are done now.
        blocks_of: dict[int, list[Block]] = {}
        for block in announced.batch.blocks():
            if block.table in self._numbers:
                blocks_of.setdefault(block.table, []).append(block)
        values = announced.batch.values.to(torch.int64, copy=True)
        # Of a sequence, each rank asks for each row once. So how often depends on the ranks.
        once = announced.batch.pooling is Pooling.NONE
        freed = {}
        for number, blocks in sorted(blocks_of.items()):
            ids = torch.cat([values[block.lookups] for block in blocks])
            trains = self.tables[number] in announced.trained
            rows, freed[number] = self._numbers[number].rows_of(ids, self.step + 1, trains=trains, once=once)
            for block, part in zip(blocks, torch.split(rows, [block.lookup_count for block in blocks]), strict=True):
                values[block.lookups] = part
        if freed := {number: rows for number, rows in freed.items() if len(rows)}:
            self._give_up(freed)
        announced.batch = dataclasses.replace(announced.batch, values=values)
        self._in_use.add(announced)

    def _give_up(self, freed: Mapping[int, Tensor]) -> None:
        """Rows by table that now belong to other ids: what an earlier batch has of them is lost, and they change."""
        for one in self._in_use:
            one.batch = self._without(one.batch, freed)
            one.given_up.append(freed)

    def current(self, announced: Announced, batch: Batch) -> Batch:
        for freed in announced.given_up:
            batch = self._without(batch, freed)
        return batch

    def _without(self, batch: Batch, freed: Mapping[int, Tensor]) -> Batch:
        """The batch, with the last spare row, which no id has for longer than a batch, in place of freed rows."""
        values = batch.values.clone()
        for block in batch.blocks():
            if block.table in freed:
                part = values[block.lookups]
                part[torch.isin(part, freed[block.table])] = self.engine.specs[block.table].row_count - 1
        return dataclasses.replace(batch, values=values)

    def follow_directories(self) -> None:
        self._before = {number: own.copied() for number, own in self._numbers.items()}

    def changed_entries(self, *, clear: bool) -> dict[int, Tensor]:
        found = {}
        for number, own in self._numbers.items():
            # Entries of candidates have numbers of their own, which are rows of the state as those of ids are.
            differs = [(own.entries[name] != old).any(1) for name, old in self._before[number].items()]
            found[number] = torch.stack(differs).any(0).nonzero().flatten()
            if clear:
                self._before[number] = own.copied()
        return found

    def ids(self, batch: Batch, block: Block) -> Tensor:
        rows = super().ids(batch, block)
        return rows[rows < self.specs[block.table].row_count] if block.table in self._numbers else rows

    def release(self, announced: Announced, *, is_dirty: bool) -> None:
        self._in_use.discard(announced)

    def held(self) -> Iterator[Held]:
        numbers = {spec.name: number for number, spec in enumerate(self.specs)}
        for held in super().held():
            own = self._numbers.get(numbers.get(held.name, -1))
            if own is None:
                yield held
                continue
            count = own.spec.row_count
            states = {name: state[:count] for name, state in held.states.items()} | own.entries
            yield Held(name=held.name, weight=held.weight[:count], states=states)

    def load(self, state: Mapping[str, Tensor]) -> None:
        for own in self._numbers.values():
            for name in own.entries:
                try:
                    IdDirectory(state[f"{own.spec.name}.{name}"].contiguous().clone())
                except ArgumentError as error:
                    raise ArgumentError(f"{own.spec.name}.{name}: {error}") from None
        super().load(state)
        for own in self._numbers.values():
            own.open()

    def id_counters(self) -> dict[int, Counter[str]]:
        found: dict[int, Counter[str]] = {}
        for number, own in self._numbers.items():
            # Column shards of one row shard have the same ids.
            if own.is_counted:
                of_table = found.setdefault(self.tables[number], Counter())
                of_table.update(own.counters | {"rows": own.spec.row_count, "used": own.directory.used})
        return found
