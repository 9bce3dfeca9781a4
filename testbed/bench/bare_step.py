# SPDX-License-Identifier: Apache-2.0
"""What a training step moves, without what it computes: a batch is taken, and exchanged as sharded tables exchange it.

Four exchanges, with the calls of torch.distributed that any backend has: ids to the owners of the tables, a vector of
each table and sample back, its gradient to the owner, and the sum of the dense gradients. No lookup, no model. The
numbers exchanged are of no meaning, their sizes are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sennit.runtime.data.batch_source import BatchSource


class BareStep:
    """The steps of one rank, on the batches from number 0. Table t is on rank t mod ranks, and all ranks have equally
    many samples.
    """

    def __init__(self, source: BatchSource, *, dim: int, dense_numbers: int) -> None:
        """`dense_numbers`: of the model, whose gradients are summed."""
        self._source = source
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        tables = range(len(source.tables))
        self._of_rank = [[table for table in tables if table % self._world == rank] for rank in range(self._world)]
        self._dim = dim
        self._dense = torch.zeros(dense_numbers)
        self._next = 0

    def step(self) -> int:
        """Returns the samples of all ranks."""
        world, number = self._world, self._next
        self._next += 1
        batch = self._source.take(number)
        per_table = torch.split(batch.values, batch.lengths.sum(1).tolist())
        given = [[per_table[table] for table in mine] for mine in self._of_rank]
        counts = torch.tensor([sum(len(part) for part in parts) for parts in given])
        values = torch.cat([part for parts in given for part in parts])
        lengths = torch.cat([batch.lengths[mine].flatten() for mine in self._of_rank])
        samples, own = batch.sample_count, len(self._of_rank[self._rank])
        self._source.release(number)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        ids = torch.empty(int(coming.sum()), dtype=values.dtype)
        dist.all_to_all_single(ids, values, coming.tolist(), counts.tolist())
        bags = [len(mine) * samples for mine in self._of_rank]
        theirs = torch.empty(world * own * samples, dtype=lengths.dtype)
        dist.all_to_all_single(theirs, lengths, [own * samples] * world, bags)
        pooled = torch.empty(world * samples, own * self._dim)
        vectors = torch.empty(sum(bags) * self._dim)
        rows, elements = [samples * own * self._dim] * world, [count * self._dim for count in bags]
        dist.all_to_all_single(vectors, pooled.view(-1), elements, rows)
        dist.all_to_all_single(pooled.view(-1), vectors, rows, elements)
        dist.all_reduce(self._dense)
        return self._source.order.size(number)
