# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of sharded tables, for autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sennit.transport.errors import ArgumentError

if TYPE_CHECKING:
    from sennit.runtime.sharded.module import ShardedTables


class Lookup(torch.autograd.Function):
    """Rows or sums of rows, by feature. Its backward pass is the optimizer step."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, tables: ShardedTables, step: Any, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        context.tables, context.step, context.is_over = tables, step, False
        with tables._wire.phase("lookup"):
            return tables._found(step)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        if context.is_over and context.tables.batches_ahead:
            raise ArgumentError("a second backward pass, but rows are in files and may have left memory; allowed: one")
        context.is_over = True
        with context.tables._wire.phase("sparse update"):
            bad, of_weights = context.tables._update(context.step, gradients, context.tables._rates())
        context.tables._bad = bad or context.tables._bad
        return torch.empty(0), None, None, of_weights


class Arrive(torch.autograd.Function):
    """What another thread has looked up. Its backward pass gives the gradients to that thread, and does not wait."""

    @staticmethod
    def forward(
        context: Any, anchor: Tensor, update: Callable[[Sequence[Tensor]], None], found: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        context.update, context.is_over = update, False
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if context.is_over:
            raise ArgumentError("a second backward pass of a lookup in another thread; allowed: one")
        context.is_over = True
        context.update(gradients)
        return torch.empty(0), None, None
