# SPDX-License-Identifier: Apache-2.0
"""Shards of tables whose ids nobody lists: their owner numbers the ids of a batch when it is looked up.

A batch that one rank refuses changes nothing on any: its rows are given for good when all ranks have them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.id_directory import IdDirectory
from sennit.runtime.kernels.spec import Pooling, ShardSpec
from sennit.runtime.sharded.row_numbers import Phase, RowNumbers
from sennit.runtime.sharded.shards import Announced, Evicted, Held, Shards
from sennit.runtime.sharded.tables import Shard, Table
from sennit.transport.errors import ArgumentError


class NumberedBatch(Announced):
    """A batch of ids, which are numbered when it is fetched."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.rows: Announced | None = None
        """The batch of their rows, once it is announced."""


class DynamicShards(Shards):
    """Shards of one engine. Some are of dynamic tables."""

    def __init__(
        self,
        rows: Shards,
        model: Sequence[Table],
        shards: Sequence[Shard],
        specs: Sequence[ShardSpec],
        *,
        seed: int,
        state: Mapping[str, Tensor] | None,
        phase: Phase,
    ) -> None:
        """`rows`: the same shards by numbers of rows, in memory or in files, with the rows of `spare_rows`. `specs`:
        with directories. `state`: of these shards, if they have been somewhere else before. Files have it already.
        `phase`: measures the time of a phase.
        """
        super().__init__(rows.engine, rows.tables)
        self._rows, self.specs = rows, tuple(specs)
        self._numbers = {
            number: RowNumbers(model[shard.table], shard, spec, number, rows, seed, phase)
            for number, (shard, spec) in enumerate(zip(shards, specs, strict=True))
            if spec.directories
        }
        # Copies of the entries, for `changed_entries`.
        self._before: dict[int, dict[str, Tensor]] = {}
        # Batches that are looked up and have not been updated or released.
        self._in_use: weakref.WeakSet[NumberedBatch] = weakref.WeakSet()
        self._open: NumberedBatch | None = None
        """The batch that was fetched, and neither settled nor released."""

        self._phase = phase
        self._gone: list[Evicted] = []
        self._told: Callable[[Evicted], object] | None = None
        self._failed: Exception | None = None
        """What a user's function raised. All ranks hear of it with the next batch."""

        if state is not None:
            self._check_directories(state)
            self._rows.load_memory(state)
            self._load_directories(state)
        else:
            for own in self._numbers.values():
                own.begin_shared()

    def announce(self, batch: Batch, begins: Mapping[int, Tensor] | None = None) -> NumberedBatch:
        return NumberedBatch(batch)

    def fetch(self, announced: Announced) -> None:
        assert isinstance(announced, NumberedBatch)
        if (error := self.take_failure()) is not None:
            raise error
        # Rows are given here, and not when a batch is announced: the steps before it are done now.
        self._open = announced
        with self._phase("number ids"):
            batch = self._numbered(announced)
            self._gone = [] if self._told is None else [one for own in self._numbers.values() for one in own.gone()]
        begins = {number: own.begun for number, own in self._numbers.items()} if self.in_files else None
        announced.rows = self._rows.announce(batch, begins)
        self._rows.fetch(announced.rows)
        announced.batch = announced.rows.batch

    def _numbered(self, announced: Announced) -> Batch:
        """The batch with rows in place of ids."""
        for own in self._numbers.values():
            own.begin()
        blocks_of: dict[int, list[Block]] = {}
        for block in announced.batch.blocks():
            if block.table in self._numbers:
                blocks_of.setdefault(block.table, []).append(block)
        values = announced.batch.values.to(torch.int64, copy=True)
        # Of a sequence, each rank asks for each row once. So how often depends on the ranks.
        once = announced.batch.pooling is Pooling.NONE
        for number, blocks in sorted(blocks_of.items()):
            ids = torch.cat([values[block.lookups] for block in blocks])
            trains = self.tables[number] in announced.trained
            rows = self._numbers[number].rows_of(ids, self.step + 1, trains=trains, once=once, admits=announced.admits)
            for block, part in zip(blocks, torch.split(rows, [block.lookup_count for block in blocks]), strict=True):
                values[block.lookups] = part
        return dataclasses.replace(announced.batch, values=values)

    def settle(self, announced: Announced) -> None:
        assert isinstance(announced, NumberedBatch)
        assert announced.rows is not None
        self._open = None
        if freed := {number: rows for number, own in self._numbers.items() if len(rows := own.freed)}:
            self._give_up(freed)
        self._in_use.add(announced)
        for own in self._numbers.values():
            own.settle(announced.rows)
        gone, self._gone = self._gone, []
        if (told := self._told) is None:
            return
        for one in gone:
            try:
                told(one)
            except Exception as error:  # Any type, because the other ranks would wait for this one.
                self._failed = self._failed or error

    def take_failure(self) -> Exception | None:
        error, self._failed = self._failed, None
        return error

    def on_evicted(self, told: Callable[[Evicted], object] | None) -> None:
        self._told = told

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
        """The batch, with a spare row, which no id has for longer than a batch, in place of freed rows."""
        values = batch.values.clone()
        for block in batch.blocks():
            if block.table in freed:
                is_freed = torch.isin(self._rows.ids(batch, block), freed[block.table])
                values[block.lookups][is_freed] = self._rows.spare_line(block.table)
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
        rows = self._rows.ids(batch, block)
        return rows[rows < self.specs[block.table].row_count] if block.table in self._numbers else rows

    def release(self, announced: Announced, *, is_dirty: bool) -> None:
        assert isinstance(announced, NumberedBatch)
        if announced is self._open:
            self._open, self._gone = None, []
            for own in self._numbers.values():
                own.undo()
        self._in_use.discard(announced)
        if announced.rows is not None:
            self._rows.release(announced.rows, is_dirty=is_dirty)

    def held(self) -> Iterator[Held]:
        return map(self._with_directories, self._rows.held())

    def in_memory(self) -> Iterator[Held]:
        return map(self._with_directories, self._rows.in_memory())

    def _with_directories(self, held: Held) -> Held:
        own = next((own for own in self._numbers.values() if own.spec.name == held.name), None)
        if own is None:
            return held
        # What has rows of a file is a copy.
        entries = own.copied() if held.name in self.in_files else own.entries
        return Held(name=held.name, weight=held.weight, states=held.states | entries)

    def changes(self, changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from self._rows.changes(changed)
        for own in self._numbers.values():
            for name, entries in own.entries.items():
                yield f"{own.spec.name}.{name}", entries[changed[own.spec.name]]

    def check_idle(self) -> None:
        self._rows.check_idle()

    @property
    def in_files(self) -> frozenset[str]:
        return self._rows.in_files

    def wait(self) -> None:
        self._rows.wait()

    def counters(self) -> dict[str, int]:
        return self._rows.counters()

    def close(self) -> None:
        self._rows.close()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._check_directories(state)
        self._rows.load(state)
        self._load_directories(state)

    def _check_directories(self, state: Mapping[str, Tensor]) -> None:
        """Raises `ArgumentError` for entries that are no directory."""
        for own in self._numbers.values():
            for name in own.entries:
                entries = state[f"{own.spec.name}.{name}"].contiguous().clone()
                try:
                    if name == "ids":
                        own.directory_of({name: entries})
                    elif name == "candidates":
                        IdDirectory(entries)
                except ArgumentError as error:
                    raise ArgumentError(f"{own.spec.name}.{name}: {error}") from None

    def _load_directories(self, state: Mapping[str, Tensor]) -> None:
        for own in self._numbers.values():
            for name, entries in own.entries.items():
                entries.copy_(state[f"{own.spec.name}.{name}"])
        # Batches that were looked up before have rows of other ids.
        self._give_up({number: torch.arange(own.spec.row_count) for number, own in self._numbers.items()})
        for own in self._numbers.values():
            own.open()

    def id_counters(self) -> dict[int, Counter[str]]:
        found: dict[int, Counter[str]] = {}
        for number, own in self._numbers.items():
            # Column shards of one row shard have the same ids.
            if own.is_counted:
                of_table = found.setdefault(self.tables[number], Counter())
                of_table.update({"rows": own.spec.row_count, "used": own.directory.used, **own.counters})
        return found
