# SPDX-License-Identifier: Apache-2.0
"""Data-parallel tables: every rank has all rows. Gradients travel to all ranks, which then take the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.batch_parts import chosen_blocks, joined
from sennit.runtime.sharded.shards import Shards
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.wire import Wire
from sennit.transport.plans.tree import Span


class SparseAllReduce:
    """Gathers the gradients of all ranks for replicated tables, so that all ranks take the same step.

    Gradients travel in one of two forms, which have the same bits. Either ranks give the sums of their rows, and the
    canonical tree adds up the sums of all ranks. Or ranks give their lookups with the gradients of the results, and
    every rank makes all sums. The form with fewer bytes travels: sums where few rows are used often, lookups where bags
    are long. Tensor trains always take lookups.
    """

    def __init__(self, shards: Shards, slices: Slices, wire: Wire) -> None:
        """`shards`: this rank's replicas of the tables."""
        self._engine, self._slices, self._wire = shards.engine, slices, wire
        self._nodes = [slices.nodes_of(rank) for rank in range(slices.world_size)]
        self._dims = [spec.dim for spec in shards.specs]
        self._has_trains = any(isinstance(spec, TensorTrainSpec) for spec in shards.specs)

    def of_all(self, batch: Batch, gradient: Tensor, *, before: Pooling | None) -> tuple[Batch, Tensor]:
        """Gathers the lookups of all ranks with the gradients of their results, or the sums of their rows.

        `before`: the pooling of what this returned for earlier passes of the same step, which decides the form.

        Collective. All ranks get the same batch and gradient, to update their replicas with.
        """
        if self._slices.world_size > 1:
            counts = [0] * len(self._dims)
            for block in batch.blocks():
                counts[block.table] += block.lookup_count
            sizes = [len(batch.lengths), len(batch.values), len(gradient), self._sum_floats(counts)]
            own = torch.tensor([*sizes, len(batch.table_of_block)])
            everyone = self._wire.all_gather("counts", own, [len(own)] * self._slices.world_size).view(-1, len(own))
            bags, lookups, floats, floats_of_sums = everyone.sum(0).tolist()[:4]
            gives_sums = not self._has_trains and floats_of_sums < floats + bags + lookups
            if before is not None and batch.pooling is not Pooling.NONE:
                gives_sums = before is Pooling.NONE
            if gives_sums:
                batch, gradient = self._sums(batch, gradient)
            else:
                batch, gradient = self._everything(batch, gradient, everyone.tolist())
        return batch, gradient

    def _sum_floats(self, lookups: Sequence[int]) -> int:
        """The most floats that the sums of rows may have."""
        most = [min(count, spec.row_count) for count, spec in zip(lookups, self._engine.specs, strict=True)]
        return sum(count * (dim + 1) for count, dim in zip(most, self._dims, strict=True))

    def _everything(self, batch: Batch, gradient: Tensor, of_rank: Sequence[Sequence[int]]) -> tuple[Batch, Tensor]:
        """The lookups of all ranks, and the gradients of their results. `of_rank`: the sizes of what each gives."""
        blocks = torch.tensor([batch.table_of_block, batch.bags_of_block, batch.slice_of_block]).flatten()
        widths = [3 * sizes[4] for sizes in of_rank]
        everyone = [part.view(3, -1) for part in torch.split(self._wire.all_gather("counts", blocks, widths), widths)]
        table_of_block, bags_of_block, slice_of_block = torch.cat(everyone, 1).tolist()
        weights = None
        if batch.weights is not None:
            weights = self._wire.all_gather("weights", batch.weights, [size[1] for size in of_rank])
        whole = Batch(
            table_of_block=tuple(table_of_block),
            bags_of_block=tuple(bags_of_block),
            slice_of_block=tuple(slice_of_block),
            lengths=self._wire.all_gather("lengths", batch.lengths, [size[0] for size in of_rank]),
            values=self._wire.all_gather("ids", batch.values, [size[1] for size in of_rank]),
            weights=weights,
            pooling=batch.pooling,
        )
        return whole, self._wire.all_gather("gradients", gradient, [size[2] for size in of_rank])

    def _sums(self, batch: Batch, gradient: Tensor) -> tuple[Batch, Tensor]:
        """The sums of rows of all ranks, as lookups of sequences with their gradients."""
        tables = len(self._dims)
        own_nodes = self._nodes[self._slices.rank]
        counts = torch.zeros(len(own_nodes), tables, dtype=torch.int64)
        rows, sums = [], []
        for number, node in enumerate(own_nodes):
            for found in self._engine.sum_rows(*self._of_node(batch, gradient, node)):
                counts[number, found.table] = len(found.rows)
                rows.append(found.rows)
                sums.append(found.sums.reshape(-1))
        widths = [len(nodes) * tables for nodes in self._nodes]
        all_counts = self._wire.all_gather("counts", counts.flatten(), widths)
        of_rank = [part.view(-1, tables) for part in torch.split(all_counts, widths)]
        dims = torch.tensor(self._dims)
        own_rows = joined(rows, torch.int64, gradient.device).cpu()
        all_rows = self._wire.all_gather("ids", own_rows, [int(part.sum()) for part in of_rank])
        all_sums = self._wire.all_gather(
            "gradients", joined(sums, torch.float32, gradient.device), [int((part * dims).sum()) for part in of_rank]
        )
        nodes = [node for of_one in self._nodes for node in of_one]
        merged = Batch(
            table_of_block=tuple(range(tables)) * len(nodes),
            bags_of_block=tuple(all_counts.tolist()),
            slice_of_block=tuple(node.low for node in nodes for _ in range(tables)),
            lengths=torch.ones(len(all_rows), dtype=torch.int32),
            values=all_rows,
            pooling=Pooling.NONE,
        )
        return merged, all_sums

    def _of_node(self, batch: Batch, gradient: Tensor, node: Span) -> tuple[Batch, Tensor]:
        """The blocks of the node's slices."""
        assert batch.slice_of_block is not None
        if node == self._slices.own:
            return batch, gradient
        places = [place for place, number in enumerate(batch.slice_of_block) if node.low <= number < node.high]
        return chosen_blocks(batch, gradient, places, self._dims)
