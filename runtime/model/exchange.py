# SPDX-License-Identifier: Apache-2.0
"""The three AlltoAll exchanges of a step: ids to the tables' owners, pooled vectors back, gradients again.

Order is what makes them cheap. Tables are sent grouped by owner, so each owner's part is one range. The owner
looks bags up in the order in which they arrived (source rank, table, sample), which is the order of its reply. A rank
then receives [table, sample, dim] without rearranging. Only at the end are tables brought from the order of owners into
the global order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend import communicator
from sennit.runtime.data.combined import CombinedBatch
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.model.sharding import Placement
from sennit.runtime.sharded.phases import PhaseClock
from sennit.transport.codecs import EXCHANGE_CODECS, Codec, CodecKind


def row_codec(name: str, dim: int) -> Codec:
    """The codec of rows of `dim` columns, by its name in `EXCHANGE_CODECS`. With int8 a row is a block."""
    kind = EXCHANGE_CODECS[name]
    return Codec(kind=kind, block=min(dim, 4_096)) if kind is CodecKind.INT8 else Codec(kind=kind)


class Exchange:
    """The exchanges of one placement over one process group."""

    def __init__(
        self,
        placement: Placement,
        *,
        dim: int,
        clock: PhaseClock,
        group: dist.ProcessGroup | None = None,
        codec: Codec | None = None,
    ):
        """`codec`: of pooled vectors and of their gradients; those that stay on their rank are coded too. LOSSLESS
        codes ids and lengths as well, and copies what stays."""
        self.placement = placement
        self.rank = dist.get_rank(group)
        self.dim = dim
        self._group = group
        self._clock = clock
        self._codec = codec
        self._id_codec = codec if codec is not None and codec.kind is CodecKind.LOSSLESS else None
        self._table_counts = [len(tables) for tables in placement.tables_of]
        self._wire_place = torch.tensor(placement.wire_place)

    def send_ids(self, batch: CombinedBatch, sample_counts: Sequence[int]) -> Batch:
        """Sends every owner its part of this rank's batch. Collective.

        Returns a block of bags for each source rank and each table that this rank owns. `sample_counts`: samples of
        each rank's batch, known to all. Lengths go first, then the ids they count.
        """
        with self._clock.phase("input exchange"):
            mine = self._table_counts[self.rank]
            send_bags = [count * batch.sample_count for count in self._table_counts]
            receive_bags = [mine * count for count in sample_counts]
            lengths = batch.lengths.new_empty(sum(receive_bags))
            # Batches have the model's order of tables.
            order = self.placement.wire_order
            in_order = batch.lengths[list(order)]
            tables = torch.split(batch.values, batch.lengths.sum(1).tolist())
            given = in_order.flatten()
            even = self._is_even(sample_counts)
            self._move(lengths, given, receive_bags, send_bags, self._id_codec, even=even)
            send_ids = [int(part.sum()) for part in torch.split(in_order, self._table_counts)]
            receive_ids = [int(part.sum()) for part in torch.split(lengths, receive_bags)]
            values = batch.values.new_empty(sum(receive_ids))
            self._move(
                values, torch.cat([tables[table] for table in order]), receive_ids, send_ids, self._id_codec, even=False
            )
            return Batch(
                table_of_block=tuple(range(mine)) * len(sample_counts),
                bags_of_block=tuple(count for count in sample_counts for _ in range(mine)),
                lengths=lengths,
                values=values,
            )

    def return_pooled(self, pooled: Tensor, sample_counts: Sequence[int]) -> Tensor:
        """Turns [bags, dim] in the order of `send_ids` into this rank's samples, [T, B, dim], tables in global order.

        Collective, and so is its backward: the reverse AlltoAll, with the gradient divided by the world size, because
        every rank's loss is the mean over its own part of the global batch.
        """
        mine = sample_counts[self.rank]
        send = [self._table_counts[self.rank] * count for count in sample_counts]
        receive = [count * mine for count in self._table_counts]
        even = self._is_even(sample_counts)
        arrived: Tensor = _PooledAllToAll.apply(pooled, self, receive, send, even)  # type: ignore[no-untyped-call]
        return arrived.view(len(self._wire_place), mine, self.dim).index_select(0, self._wire_place)

    def _is_even(self, sample_counts: Sequence[int]) -> bool:
        """Whether all parts of all ranks have one size, as all ranks know. Then no rank names it, and the transport may
        choose an algorithm for equal parts (docs/reference/plans.md)."""
        return len(set(self._table_counts)) == len(set(sample_counts)) == 1

    def _move(
        self,
        output: Tensor,
        source: Tensor,
        receive: list[int],
        send: list[int],
        codec: Codec | None,
        *,
        even: bool,
    ) -> None:
        if codec is None:
            dist.all_to_all_single(output, source, None if even else receive, None if even else send, group=self._group)
            return
        rows = communicator(self._group).alltoall(
            source.detach().numpy(), send_counts=send, recv_counts=receive, codec=codec
        )
        output.copy_(torch.from_numpy(rows))


class _PooledAllToAll(torch.autograd.Function):
    """AlltoAll of rows. Its backward sends the gradient the opposite way."""

    @staticmethod
    def forward(
        context: Any, pooled: Tensor, exchange: Exchange, receive: list[int], send: list[int], even: bool
    ) -> Tensor:
        context.exchange, context.receive, context.send, context.even = exchange, receive, send, even
        output = pooled.new_empty(sum(receive), exchange.dim)
        with exchange._clock.phase("AlltoAll forward"):
            exchange._move(output, pooled.contiguous(), receive, send, exchange._codec, even=even)
        return output

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        exchange: Exchange = context.exchange
        (gradient,) = gradients
        output = gradient.new_empty(sum(context.send), exchange.dim)
        with exchange._clock.phase("AlltoAll backward"):
            source, codec = gradient.contiguous(), exchange._codec
            exchange._move(output, source, context.send, context.receive, codec, even=context.even)
        return output.div_(dist.get_world_size(exchange._group)), None, None, None, None
