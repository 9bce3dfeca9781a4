# SPDX-License-Identifier: Apache-2.0
"""Several backward passes for one optimizer step of the rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import MAX_SLICES, Batch
from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.shards import Announced, Rates, Shards
from sennit.transport.errors import ArgumentError


class Steps:
    """The optimizer steps of an engine's shards. A step may take several backward passes: all but the last are kept.

    Pass p of a step has the slices from p · V on. So M passes are summed as one batch of M · V slices, and the V slices
    of one pass are a node of the tree.
    """

    def __init__(self, shards: Shards, slices: int) -> None:
        self._shards, self._slices = shards, slices
        self._kept: list[tuple[Batch, Tensor]] = []
        self._announced: list[Announced] = []

    @property
    def is_begun(self) -> bool:
        """Whether passes are kept for a step that is still to be taken."""
        return bool(self._kept)

    @property
    def pooling(self) -> Pooling | None:
        """How the kept passes are pooled; None if there are none. The passes of a step have to be alike."""
        return self._kept[0][0].pooling if self._kept else None

    def add(self, announced: Announced, batch: Batch, gradient: Tensor, *, rate: Rates | None) -> GradientError | None:
        """Updates rows from this pass and all that are kept, at the rates of their tables; with None, keeps this pass.

        `announced`: the batch that this pass looked up. `batch`, with its flat `gradient`: the blocks to update from.

        Returns the error if rows had gradients that are not finite. Such rows are left as they were.
        """
        first = len(self._kept) * self._slices
        if first + self._slices > MAX_SLICES:
            raise ArgumentError(
                f"more than {len(self._kept)} backward passes of {self._slices} slices in a step; allowed: "
                f"{MAX_SLICES:,} slices in all"
            )
        if first:
            assert batch.slice_of_block is not None
            batch = dataclasses.replace(batch, slice_of_block=tuple(first + number for number in batch.slice_of_block))
        self._kept.append((batch, gradient))
        self._announced.append(announced)
        if rate is None:
            return None
        kept, self._kept = self._kept, []
        looked_up, self._announced = self._announced, []
        try:
            self._shards.update(*(kept[0] if len(kept) == 1 else _joined(kept)), rate=rate)
        except GradientError as bad:
            return bad
        finally:
            for one in looked_up:
                self._shards.release(one, is_dirty=True)
        return None


def _joined(passes: list[tuple[Batch, Tensor]]) -> tuple[Batch, Tensor]:
    batches = [batch for batch, _ in passes]
    first = batches[0]
    if any((batch.weights is None) != (first.weights is None) for batch in batches):
        raise ArgumentError("weights in some of the backward passes of a step; allowed: in all or none")
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return Batch(
        table_of_block=tuple(table for batch in batches for table in batch.table_of_block),
        bags_of_block=tuple(bags for batch in batches for bags in batch.bags_of_block),
        slice_of_block=tuple(number for batch in batches for number in batch.slice_of_block or ()),
        lengths=torch.cat([batch.lengths for batch in batches]),
        values=torch.cat([batch.values for batch in batches]),
        weights=torch.cat(weights) if weights else None,
        pooling=first.pooling,
    ), torch.cat([gradient for _, gradient in passes])
