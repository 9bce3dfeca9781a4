# SPDX-License-Identifier: Apache-2.0
"""Shards of dynamic tables in the memory of a device, which has only what is asked for. It grows by doubling.

A line of that memory has a row from when it is made on. More lines come behind the others, so a line never moves, and
batches that were looked up before keep theirs. Directories stay in host memory, where ids arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.layout import ShardMemory, allocate, zeros
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import ShardSpec
from sennit.runtime.sharded.shards import Announced, Held, Shards, tensors_of
from sennit.transport.errors import ConfigError

FEWEST: Final = 256
"""Lines that come at once, at least."""

ROWS_AT_ONCE: Final = 65_536
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Run:
    """Lines one after another, with rows one after another."""

    row: int
    line: int
    count: int


class Lines:
    """Which line has which row of a shard. Rows come as a range from 0 on, those of ids, and one from `others` on."""

    def __init__(self, others: int, end: int) -> None:
        """Rows are 0 to `end` - 1. The last one has line 0: nobody has it for longer than a step."""
        self.others, self.end = others, end
        self.runs = [Run(end - 1, 0, 1)]
        self.count = 1
        self._until = {0: 0, others: others}
        """For each range, by its first row: the first row that has no line yet."""

    def missing(self, rows: Tensor) -> list[tuple[int, int]]:
        """The rows that have to get lines for `rows`, int64 [n], as ranges: where each begins and ends."""
        if not len(rows):
            return []
        tops = {0: top} if (top := int(rows.max())) < self.others else {self.others: top}
        if top >= self.others and len(of_ids := rows[rows < self.others]):
            tops[0] = int(of_ids.max())
        # The last row has a line.
        ends = {first: min(top + 1, self.end - 1) for first, top in tops.items()}
        return [(self._until[first], end) for first, end in ends.items() if end > self._until[first]]

    def doubled(self, begin: int, end: int) -> int:
        """Where a range of rows that needs lines from `begin` to `end` should end, so that it seldom grows again."""
        first, most = (self.others, self.end - 1) if begin >= self.others else (0, self.others)
        return min(most, max(end, begin + FEWEST, 2 * begin - first))

    def add(self, begin: int, end: int) -> None:
        """Rows `begin` to `end`, which are the next ones of their range, get lines behind all others."""
        last, count = self.runs[-1], end - begin
        if last.row + last.count == begin:
            self.runs[-1] = replace(last, count=last.count + count)
        else:
            self.runs.append(Run(begin, self.count, count))
        self._until[self.others if begin >= self.others else 0] = end
        self.count += count

    def of(self, rows: Tensor) -> Tensor:
        """Int64 [n]: the lines of `rows`, int64 [n], which have some."""
        by_row = sorted(self.runs, key=lambda run: run.row)
        return _mapped(rows, [run.row for run in by_row], [run.line for run in by_row])

    def rows(self, lines: Tensor) -> Tensor:
        """Int64 [n]: the row of each of `lines`, int64 [n]."""
        return _mapped(lines, [run.line for run in self.runs], [run.row for run in self.runs])

    def has(self, rows: Tensor) -> Tensor:
        """Bool [n]: whether each of `rows` has a line."""
        of_ids = rows < self.others
        return (rows < self._until[0]) & of_ids | (rows < self._until[self.others]) & ~of_ids

    def pieces(self, row_count: int) -> Iterator[tuple[slice, slice]]:
        """Rows below `row_count` that have lines, and these lines."""
        for run in self.runs:
            if (count := min(run.count, row_count - run.row)) > 0:
                yield slice(run.row, run.row + count), slice(run.line, run.line + count)


def _mapped(numbers: Tensor, begins: Sequence[int], to: Sequence[int]) -> Tensor:
    """`numbers`, int64 [n], with what `begins` rises to, and what follows each of them, at `to`."""
    places = np.searchsorted(begins, numbers.numpy(), side="right") - 1
    return torch.from_numpy(numbers.numpy() + np.subtract(to, begins)[places])


class GrowingShards(Shards):
    """Shards of one engine, all of dynamic tables, whose memory has lines for the rows that have come so far."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        optimizer: OptimizerSpec,
        device: torch.device,
        make: Callable[[Sequence[ShardSpec], Sequence[ShardMemory | None]], EmbeddingEngine],
        tables: Sequence[int],
        spares: Sequence[int],
        row_counts: Sequence[int],
    ) -> None:
        """`make` makes the engine. `spares`: of `Shards`. `row_counts`: how many rows of each shard are for ids."""
        self._lines = [
            Lines(count, spec.row_count + spare) for spec, spare, count in zip(specs, spares, row_counts, strict=True)
        ]
        memory = [
            replace(
                allocate(replace(spec, row_count=lines.count), optimizer, device),
                row_numbers=torch.tensor([spec.first_row + lines.end - 1]).to(device),
            )
            for spec, lines in zip(specs, self._lines, strict=True)
        ]
        super().__init__(make([one.spec for one in memory], memory), tables)
        self.specs = tuple(replace(spec, directories=()) for spec in specs)
        # The tensors are longer than the spec of the engine says, if others could not grow.
        self._memory = memory

    def announce(self, batch: Batch, begins: Mapping[int, Tensor] | None = None) -> Announced:
        """As in `Shards`. Rows that have no line get one. Raises `ConfigError` if the device has no memory for them."""
        values = batch.values.to(torch.int64, copy=True)
        for number, blocks in itertools.groupby(batch.blocks(), key=lambda block: block.table):
            first, *others = blocks
            part = values[first.lookups.start : (others or [first])[-1].lookups.stop]
            self._grow(number, self._lines[number].missing(part))
            part.copy_(self._lines[number].of(part))
        return super().announce(replace(batch, values=values))

    def _grow(self, number: int, missing: Sequence[tuple[int, int]]) -> None:
        """Rows of a shard, ranges of them, get lines. What is there is copied on the device."""
        if not missing:
            return
        lines, spec = self._lines[number], self.specs[number]
        doubled = [(begin, lines.doubled(begin, end)) for begin, end in missing]
        for ranges in (doubled, missing):
            try:
                self._lengthen(number, lines.count + sum(end - begin for begin, end in ranges))
                break
            except torch.OutOfMemoryError:
                continue
        else:
            raise self._no_memory(number, missing)
        for begin, end in ranges:
            lines.add(begin, end)
        memory = self._memory[number]
        assert memory.row_numbers is not None
        made = torch.cat([torch.arange(begin, end) for begin, end in ranges]) + spec.first_row
        numbers = torch.cat([memory.row_numbers, made.to(self.engine.device)])
        self._memory[number] = replace(memory, row_numbers=numbers)
        self._put(number)

    def _lengthen(self, number: int, count: int) -> None:
        """Gives the tensors of a shard room for `count` lines, one after the other: the old one goes before the next
        one grows. If one cannot, others stay longer than they need to be.
        """
        for name in ("weight", *self._memory[number].states):
            self._replace(number, name, count)

    def _replace(self, number: int, name: str, count: int) -> None:
        memory = self._memory[number]
        old = memory.weight if name == "weight" else memory.states[name]
        if len(old) >= count:
            return
        new = torch.zeros((count, *old.shape[1:]), dtype=old.dtype, device=old.device)
        new[: len(old)] = old
        if name == "weight":
            self._memory[number] = replace(memory, weight=new)
        else:
            self._memory[number] = replace(memory, states=memory.states | {name: new})
        self._put(number)

    def _put(self, number: int) -> None:
        """Tells the engine where the lines of a shard are."""
        memory, count = self._memory[number], self._lines[number].count
        states = {name: state[:count] for name, state in memory.states.items()}
        spec = replace(memory.spec, row_count=count)
        self.engine.put(number, replace(memory, spec=spec, weight=memory.weight[:count], states=states))

    def _no_memory(self, number: int, missing: Sequence[tuple[int, int]]) -> ConfigError:
        memory, lines = self._memory[number], self._lines[number]
        row_bytes = sum(one[:1].nbytes for one in (memory.weight, *memory.states.values()))
        more = sum(end - begin for begin, end in missing)
        return ConfigError(
            f"shard {self.specs[number].name} has {lines.count} rows on {self.engine.device}, and no memory there for "
            f"{more} more, of {row_bytes} bytes each (while it grows, the old rows are there, too); allowed: fewer "
            "rows, more ranks, home dram"
        )

    def ids(self, batch: Batch, block: Block) -> Tensor:
        return self._lines[block.table].rows(super().ids(batch, block))

    def spare_line(self, number: int) -> int:
        return 0

    def _lines_of(self, announced: Announced, number: int, rows: Tensor) -> Tensor:
        return self._lines[number].of(rows)

    def weights(self, number: int, rows: Tensor) -> Tensor:
        return self._rows_of(number, self._memory[number].weight, rows)

    def _rows_of(self, number: int, tensor: Tensor, rows: Tensor) -> Tensor:
        """A copy in host memory of `rows`, int64 [n], of a weight or a state. A row that has never come is zeros."""
        there = self._lines[number].has(rows)
        found = torch.zeros((len(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        lines = self._lines[number].of(rows[there])
        found[there] = tensor.index_select(0, lines.to(tensor.device)).cpu()
        return found

    def held(self) -> Iterator[Held]:
        """Copies in host memory of the shards, with all rows that they may have."""
        for number, spec in enumerate(self.specs):
            memory = self._memory[number]

            def whole(tensor: Tensor, number: int = number, count: int = spec.row_count) -> Tensor:
                # Memory that is never written is never there.
                found = zeros((count, *tensor.shape[1:]), tensor.dtype, CPU)
                for rows, lines in self._lines[number].pieces(count):
                    found[rows] = tensor[lines].cpu()
                return found

            states = {name: whole(state) for name, state in memory.states.items()}
            yield Held(name=spec.name, weight=whole(memory.weight), states=states)

    def in_memory(self) -> Iterator[Held]:
        return iter(())

    def changes(self, changed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for number, spec in enumerate(self.specs):
            memory = self._memory[number]
            for key, tensor in tensors_of(Held(name=spec.name, weight=memory.weight, states=memory.states)).items():
                yield key, self._rows_of(number, tensor, changed[spec.name])

    def load_memory(self, state: Mapping[str, Tensor]) -> None:
        for number, spec in enumerate(self.specs):
            memory, lines = self._memory[number], self._lines[number]
            if lines.others < spec.row_count:
                self._grow(number, lines.missing(torch.tensor([spec.row_count - 1])))
            given = {
                key.removeprefix(f"{spec.name}."): state[key]
                for key in tensors_of(Held(name=spec.name, weight=memory.weight, states=memory.states))
            }
            end = max(_end_of_rows(tensor[: lines.others]) for tensor in given.values())
            self._grow(number, lines.missing(torch.arange(end)[-1:]))
            memory = self._memory[number]
            for name, tensor in given.items():
                own = memory.weight if name == "weight" else memory.states[name]
                for rows, places in lines.pieces(spec.row_count):
                    own[places].copy_(tensor[rows])


def _end_of_rows(tensor: Tensor) -> int:
    """The number of rows of `tensor`, [rows, ...], without those at the end all of whose bytes are 0."""
    end = len(tensor)
    while end:
        begin = (end - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE
        part = tensor[begin:end].detach().contiguous().cpu().view(torch.uint8).view(end - begin, -1)
        used = part.any(1).nonzero()
        if len(used):
            return begin + int(used[-1]) + 1
        end = begin
    return 0
