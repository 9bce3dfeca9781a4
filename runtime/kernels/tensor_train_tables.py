# SPDX-License-Identifier: Apache-2.0
"""Tensor-train tables beside ordinary ones. The rows of a batch are computed once, and then looked up like any others.

In the update, the operator sums the gradients of equal rows. Products of these sums with the cores are the gradients of
the cores' slices, which the operator then updates like rows of sequences. docs/reference/embedding.md, *Tensor-train
tables*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block
from sennit.runtime.kernels.checks import IGNORED
from sennit.runtime.kernels.implementations import Implementation, Products
from sennit.runtime.kernels.layout import ShardMemory, allocate
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec, StepConstants
from sennit.runtime.kernels.reference_products import Runs
from sennit.runtime.kernels.spec import Pooling, Rounding, ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.transport.errors import ConfigError

CHUNK: Final = 32
"""Members of a slice whose products are summed one after another."""

BAND_BYTES: Final = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Parameters of slice gradients in memory at a time; more if one slice alone has more."""

ROWS_AT_ONCE: Final = 1 << 16

_PLAIN: Final = OptimizerSpec(kind=Optimizer.SGD)
# SGD with this rate turns a weight of zero into exactly its gradient: 0 - (-1 · g) = g.
_SUM: Final = _PLAIN.constants(step=1, rate=-1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The arguments of an optimizer step, as `Implementation.update` takes them."""

    kind: Optimizer
    constants: StepConstants
    rounding: Rounding
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRows:
    """Rows of a table, or slices of a core, that were skipped because their gradient was not finite."""

    name: str
    row_count: int
    first_row: int


class TensorTrainTables:
    """The tables of an engine, some of them tensor trains. `tables` is what its operator sees."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        optimizer: OptimizerSpec,
        device: torch.device,
        *,
        operator: Implementation,
        of_cores: Implementation,
        products: Products,
        memory: Sequence[ShardMemory | None] | None = None,
    ) -> None:
        """`of_cores` is a separate operator, because operators keep facts about their tables between calls.

        `memory` is existing memory of tables, of none of the tensor trains; None: it is allocated.
        """
        self._operator, self._of_cores, self._products, self._device = operator, of_cores, products, device
        self.trains = {n: spec for n, spec in enumerate(specs) if isinstance(spec, TensorTrainSpec)}
        given = [None] * len(specs) if memory is None else list(memory)
        for number, train in self.trains.items():
            if given[number] is not None:
                raise ConfigError(f"table {train.name}: a tensor train in memory of its user")
        self.tables = tuple(
            self._rows_of(spec, 0) if number in self.trains else own or allocate(spec, optimizer, device)
            for number, (spec, own) in enumerate(zip(specs, given, strict=True))
        )
        """The memory for each spec. For a tensor train, the rows of the present batch, in float32."""
        self.cores = tuple(allocate(core, optimizer, device) for train in self.trains.values() for core in train.cores)
        """The cores of all tensor trains."""
        self._first_core = {number: 3 * place for place, number in enumerate(self.trains)}

    @property
    def memories(self) -> Iterator[ShardMemory]:
        """The memory of everything that has weights and states: ordinary tables and cores."""
        for number, table in enumerate(self.tables):
            if number in self.trains:
                yield from self._cores_of(number)
            else:
                yield table

    def put(self, number: int, memory: ShardMemory) -> None:
        """Table `number`, no tensor train, is in `memory` from now on."""
        # A new tuple: operators keep facts about the tables of the old one.
        self.tables = tuple(memory if one == number else table for one, table in enumerate(self.tables))

    @contextmanager
    def placed(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the tables use other tensors: weight and states of each of `memories`, in that order."""
        tables, cores, rest = list(self.tables), list(self.cores), list(tensors)

        def moved(table: ShardMemory) -> ShardMemory:
            weight, *states = (rest.pop(0) for _ in range(1 + len(table.states)))
            return dataclasses.replace(table, weight=weight, states=dict(zip(table.states, states, strict=True)))

        for number, table in enumerate(self.tables):
            if number in self.trains:
                first = self._first_core[number]
                cores[first : first + 3] = map(moved, cores[first : first + 3])
            else:
                tables[number] = moved(table)
        own_tables, own_cores = self.tables, self.cores
        self.tables, self.cores = tuple(tables), tuple(cores)
        try:
            yield
        finally:
            self.tables, self.cores = own_tables, own_cores

    def prepare(self, batch: Batch) -> Batch:
        """Computes the rows of a checked batch.

        In the result, ids of tensor trains are replaced by places in `tables`.
        """
        if not self.trains:
            return batch
        batch, rows = self._places(batch)
        for number, own in rows.items():
            self._make(number, own, self.tables[number].weight)
        return batch

    def materialise(self, number: int, first: int, count: int) -> Tensor:
        """Float32 [count, dim]: the rows of table `number` from `first` on."""
        if number not in self.trains:
            return self.tables[number].weight[first : first + count].to(torch.float32, copy=True)
        result = torch.empty(count, self.trains[number].dim, device=self._device)
        for start in range(0, count, ROWS_AT_ONCE):
            part = result[start : start + ROWS_AT_ONCE]
            rows = torch.arange(first + start, first + start + len(part), device=self._device)
            self._make(number, rows, part)
        return result

    def update(self, batch: Batch, gradient: Tensor, update: Update) -> list[BadRows]:
        """Takes one step on a checked batch. All tables are read before they change."""
        blocks = list(batch.blocks()) if self.trains else []
        of_trains = [block for block in blocks if block.table in self.trains and block.lookup_count]
        bad = []
        if len(of_trains) < len(blocks) or not self.trains:
            found = self._operator.update(
                self.tables,
                _without(batch, of_trains),
                gradient,
                kind=update.kind,
                constants=update.constants,
                rounding=update.rounding,
                seed=update.seed,
            )
            for part in found:
                table = self.tables[part.table]
                bad.append(_named(table, part.row_count, table.id_of(part.first_row)))
        if not of_trains:
            return bad
        batch, rows = self._places(_without(batch, [block for block in blocks if block.table not in self.trains]))
        for number, own in rows.items():
            # No sum is -0, so a row that is still -0 afterwards was skipped. And -0 + g is g.
            self.tables[number].weight[: len(own)].fill_(-0.0)
        skipped = self._operator.update(
            self.tables, batch, gradient, kind=_PLAIN.kind, constants=_SUM, rounding=Rounding.NEAREST, seed=0
        )
        for part in skipped:
            own = rows[part.table]
            bad.append(_named(self.tables[part.table], part.row_count, int(own[part.first_row])))
        incomplete = {part.table for part in skipped}
        for number, own in rows.items():
            sums = self.tables[number].weight[: len(own)]
            places = torch.arange(len(own), device=self._device)
            if number in incomplete:
                head = sums[:, 0]
                places = ((head != 0) | ~head.signbit()).nonzero().squeeze(1)
            bad += self._update_cores(number, own[places], sums, places, update)
        return bad

    def _places(self, batch: Batch) -> tuple[Batch, dict[int, Tensor]]:
        """The batch with places instead of ids of tensor trains, and the distinct rows of each, int64, in the order of
        places.
        """
        values = batch.values.to(torch.int64, copy=True)
        of_table: dict[int, list[Block]] = {}
        for block in batch.blocks():
            if block.table in self.trains and block.lookup_count:
                of_table.setdefault(block.table, []).append(block)
        rows = {}
        tables = list(self.tables)
        for number, blocks in of_table.items():
            parts = [values[block.lookups] for block in blocks]
            runs = self._products.runs_of(
                parts[0] if len(parts) == 1 else torch.cat(parts), self.trains[number].row_count
            )
            rows[number] = runs.keys
            places = torch.split(runs.places, [block.lookup_count for block in blocks])
            for block, part in zip(blocks, places, strict=True):
                values[block.lookups] = part
            if len(runs.keys) > tables[number].spec.row_count:
                tables[number] = self._rows_of(self.trains[number], len(runs.keys))
        if any(new is not old for new, old in zip(tables, self.tables, strict=True)):
            self.tables = tuple(tables)
        return dataclasses.replace(batch, values=values), rows

    def _rows_of(self, spec: ShardSpec, least: int) -> ShardMemory:
        """Memory for `least` rows of a tensor train and half as many more, but at most for all rows."""
        row_count = min(spec.row_count, least + least // 2)
        return allocate(ShardSpec(name=spec.name, row_count=row_count, dim=spec.dim), _PLAIN, self._device)

    def _cores_of(self, number: int) -> tuple[ShardMemory, ShardMemory, ShardMemory]:
        first = self._first_core[number]
        return self.cores[first], self.cores[first + 1], self.cores[first + 2]

    def _matrices(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The cores in float32 as [n1, d1, r1], [n2, r1, d2·r2] and [n3, r2, d3]; their own memory if they are fp32."""
        spec = self.trains[number]
        (d1, d2, d3), (r1, r2) = spec.column_factors, spec.ranks
        one, two, three = (core.weight.to(torch.float32) for core in self._cores_of(number))
        return one.view(-1, d1, r1), two.view(-1, r1, d2 * r2), three.view(-1, r2, d3)

    def _make(self, number: int, rows: Tensor, to: Tensor) -> None:
        """Computes rows of a tensor train, int64 rising, and writes them to the first rows of `to`."""
        spec = self.trains[number]
        _, n2, n3 = spec.row_factors
        one, two, three = self._matrices(number)
        fold = self._products.fold_products
        pairs = self._products.runs_of(rows // n3, -(-spec.row_count // n3))
        heads = fold(one, pairs.keys // n2, two, pairs.keys % n2, None)
        heads = heads.view(-1, spec.column_factors[0] * spec.column_factors[1], spec.ranks[1])
        fold(heads, pairs.places, three, rows % n3, None, into=to[: len(rows)])

    def _update_cores(self, number: int, rows: Tensor, sums: Tensor, places: Tensor, update: Update) -> list[BadRows]:
        """Updates the cores for `rows`, int64 rising, whose gradients are `sums[places]`."""
        spec = self.trains[number]
        d1, d2, d3 = spec.column_factors
        r2 = spec.ranks[1]
        n1, n2, n3 = spec.row_factors
        one, two, three = self._matrices(number)
        fold, runs_of = self._products.fold_products, self._products.runs_of
        pairs = runs_of(rows // n3, -(-spec.row_count // n3))
        digit1, digit2, digit3 = pairs.keys // n2, pairs.keys % n2, rows % n3
        gradient = sums.view(-1, d1 * d2, d3)
        heads = fold(one, digit1, two, digit2, None).view(-1, d1 * d2, r2)
        of_heads = fold(gradient, places, three.transpose(1, 2).contiguous(), digit3, pairs.starts).view(
            -1, d1, d2 * r2
        )
        # From here on cores change. The third is not read again, the second is copied, the first changes last. (At rank
        # 1 `contiguous` would not copy.)
        two = two.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        by3, by2, by1 = runs_of(digit3, n3), runs_of(digit2, n2), runs_of(digit1, n1)
        first = self._first_core[number]
        bad = self._update_core(
            first + 2, by3, heads.transpose(1, 2), pairs.places[by3.order], gradient, places[by3.order], update
        )
        bad += self._update_core(first + 1, by2, one.transpose(1, 2), digit1[by2.order], of_heads, by2.order, update)
        bad += self._update_core(first, by1, of_heads, by1.order, two, digit2[by1.order], update)
        return bad

    def _update_core(
        self,
        core: int,
        runs: Runs,
        left: Tensor,
        left_rows: Tensor,
        right: Tensor,
        right_rows: Tensor,
        update: Update,
    ) -> list[BadRows]:
        """Updates one core.

        A slice's gradient is the sum of its members' products. The sum of each chunk becomes the gradient of one lookup
        in a batch without pooling.
        """
        numbers = self.cores[core].spec.dim
        counts = runs.starts.diff()
        chunks = (counts + (CHUNK - 1)) // CHUNK
        until = torch.cumsum(chunks, 0)
        bad: list[BadRows] = []
        for first, last in bands(until, max(1, BAND_BYTES[self._device.type] // (4 * numbers))):
            keys = torch.repeat_interleave(runs.keys[first:last], chunks[first:last])
            # Chunks of a slice begin at every CHUNK-th member.
            number = torch.arange(len(keys), device=self._device)
            before = torch.repeat_interleave(until[first:last] - chunks[first:last], chunks[first:last])
            number = number + (until[first] - chunks[first] - before)
            begins = torch.repeat_interleave(runs.starts[first:last], chunks[first:last]) + number * CHUNK
            starts = torch.cat((begins, runs.starts[last : last + 1]))
            sums = self._products.fold_products(left, left_rows, right, right_rows, starts)
            sequence = Batch(
                table_of_block=(core,),
                bags_of_block=(len(keys),),
                lengths=torch.ones_like(keys),
                values=keys,
                pooling=Pooling.NONE,
            )
            found = self._of_cores.update(
                self.cores,
                sequence,
                sums.view(-1),
                kind=update.kind,
                constants=update.constants,
                rounding=update.rounding,
                seed=update.seed,
            )
            bad += [_named(self.cores[core], part.row_count, part.first_row) for part in found]
        return bad


def bands(until: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Splits slices into ranges of up to `most` chunks, but at least one slice.

    `until`: the end of each slice in chunks.
    """
    if not len(until):
        return
    if int(until[-1]) <= most:
        yield 0, len(until)
        return
    ends, first, before = until.tolist(), 0, 0
    for slice_number, end in enumerate(ends):
        if end - before > most and slice_number > first:
            yield first, slice_number
            first, before = slice_number, ends[slice_number - 1]
    yield first, len(ends)


def _without(batch: Batch, blocks: Sequence[Block]) -> Batch:
    """The batch with the ids of some blocks ignored, so the layout of the gradient does not change."""
    if not blocks:
        return batch
    values = batch.values.clone()
    for block in blocks:
        values[block.lookups] = IGNORED
    return dataclasses.replace(batch, values=values)


def _named(table: ShardMemory, row_count: int, first_row: int) -> BadRows:
    return BadRows(name=table.spec.name, row_count=row_count, first_row=first_row)
