# SPDX-License-Identifier: Apache-2.0
"""Rows of one table by id, read and written where they are: each rank asks for rows of its own, or for none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.agreement import exchange_headers, rows_on_all
from sennit.runtime.sharded.batch_parts import joined
from sennit.runtime.sharded.dealing import dealt_order
from sennit.runtime.sharded.shards import Announced, Shards
from sennit.runtime.sharded.table_steps import TableSteps, Told
from sennit.runtime.sharded.tables import Shard

_Block = tuple[Shard, int]
"""A shard, and how many of its rows."""


class RowAccess:
    """One call that reads or writes rows of a table. Collective.

    Ids, and then rows, travel in one order: the rank that has the rows, its shards of the table.
    """

    def __init__(
        self, steps: TableSteps, number: int, told: Told, ids: Tensor, error: Exception | None, *, writes: bool
    ) -> None:
        """Tells the owners which rows: int64 `ids` [n] in host memory. Waits until all ranks have theirs in memory.

        `number`: of the table. `told`: what this rank tells all others. `error`: what is wrong with its arguments.
        Raises it here, and `PeerInputError` on the other ranks.
        """
        table, slices, wire = steps.tables[number], steps.slices, steps.wire
        self._table, self._wire, self._steps = table, wire, steps
        placement = steps.engines[0].settings.placement
        order, own_counts = dealt_order(table, ids)
        self._places = torch.split(order, own_counts)
        call = {"call": f"{'set_rows' if writes else 'get_rows'} of table {table.name}"}
        alike = steps.alike(told) | call
        counts = exchange_headers(error, None, [own_counts] * slices.world_size, wire.group, alike=alike)
        # A rank reads its own replica of a table, and writes those of all ranks.
        reads_own = number in placement.replicated and not writes

        def blocks(asker: int, owner: int) -> list[_Block]:
            if reads_own and asker != owner:
                return []
            count = own_counts if asker == slices.rank else counts[asker]
            return [(shard, count[shard.row]) for shard in placement.shards_on(owner) if shard.table == number]

        self._asked = [blocks(slices.rank, owner) for owner in range(slices.world_size)]
        self._taken = [blocks(asker, slices.rank) for asker in range(slices.world_size)]
        sent = [ids[self._places[one.row]] - table.id_of_first_row(one.row) for part in self._asked for one, _ in part]
        arrived = wire.all_to_all("ids", joined(sent, torch.int64), _rows(self._taken), _rows(self._asked))
        self._shards, self._number_of = _holding(steps, number)
        self._announced = self._announce(arrived)
        if writes:
            self._announced.trained, self._announced.admits = frozenset({number}), True
        if steps.has_files or table.ids is not None:
            try:
                rows_on_all(lambda: self._shards.fetch(self._announced), wire.group)
            except Exception:
                self._shards.release(self._announced, is_dirty=False)
                raise
            self._shards.settle(self._announced)
            # Rows for ids without a row may be those of an earlier lookup.
            steps.refills += table.ids is not None

    def _announce(self, ids: Tensor) -> Announced:
        """`ids`: for each block that is taken, counted from the first row of its shard."""
        blocks = [block for part in self._taken for block in part]
        return self._shards.announce(
            Batch(
                table_of_block=tuple(self._number_of[shard] for shard, _ in blocks),
                bags_of_block=tuple(count for _, count in blocks),
                lengths=torch.ones(len(ids), dtype=torch.int32),
                values=ids,
                pooling=Pooling.NONE,
            )
        )

    def read(self) -> Tensor:
        """Float32 [n, dim] in host memory."""
        found = self._shards.lookup(self._announced).cpu()
        self._shards.release(self._announced, is_dirty=False)
        answers = self._wire.all_to_all("rows", found, self._floats(self._asked), self._floats(self._taken))
        rows = torch.empty(sum(map(len, self._places)), self._table.dim)
        blocks = [block for part in self._asked for block in part]
        for (shard, count), part in zip(blocks, torch.split(answers, [self._size(one) for one in blocks]), strict=True):
            columns = self._table.column_range(shard.column)
            rows[self._places[shard.row], columns.low : columns.high] = part.view(count, columns.size)
        return rows

    def write(self, values: Tensor) -> None:
        """Overwrites weights, and no optimizer states. `values`: float32 [n, dim] in host memory."""
        parts = []
        for shard, _ in (block for part in self._asked for block in part):
            columns = self._table.column_range(shard.column)
            parts.append(values[self._places[shard.row], columns.low : columns.high])
        arrived = self._wire.all_to_all(
            "rows", joined(parts, torch.float32), self._floats(self._taken), self._floats(self._asked)
        )
        self._steps.writes += 1
        engine, batch = self._shards.engine, self._announced.batch
        if engine.on_update is not None:
            engine.on_update(batch)
        sizes = [self._size(block) for part in self._taken for block in part]
        # One rank after the other, so that the last one holds.
        for block, part in zip(batch.blocks(), torch.split(arrived, sizes), strict=True):
            weight = engine.weight(engine.specs[block.table].name)
            lines = batch.values[block.lookups].to(weight.device, torch.int64)
            weight.index_copy_(0, lines, part.view(len(lines), weight.shape[1]).to(weight.device, weight.dtype))
        self._shards.release(self._announced, is_dirty=True)

    def _size(self, block: _Block) -> int:
        shard, count = block
        return count * self._table.column_range(shard.column).size

    def _floats(self, parts: Sequence[Sequence[_Block]]) -> list[int]:
        """The floats of each rank."""
        return [sum(map(self._size, part)) for part in parts]


def _rows(parts: Sequence[Sequence[_Block]]) -> list[int]:
    """The rows of each rank."""
    return [sum(count for _, count in part) for part in parts]


def _holding(steps: TableSteps, number: int) -> tuple[Shards, dict[Shard, int]]:
    """The shards of this rank that have the table, with their numbers there. If it has none of it, any."""
    for engines in steps.engines:
        for shards, number_of in ((engines.sharded, engines.number_of), (engines.replicated, engines.replica_of)):
            if any(shard.table == number for shard in number_of):
                return shards, number_of
    return steps.engines[0].sharded, {}
