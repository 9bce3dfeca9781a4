# SPDX-License-Identifier: Apache-2.0
"""The operator for autograd and `torch.compile`: the backward pass of a lookup is the optimizer step.

As in fbgemm's fused tables, the gradient of a table never exists: when the gradient of the result arrives, rows are
updated in place. The engine's tensors are arguments of the ops, and the update declares that it changes them, so the
compiler keeps reads and writes of a table in order. Ops take only tensors and plain values, so they know an engine by
its number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.spec import Pooling
from sennit.transport.errors import ArgumentError

_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, FusedTables] = weakref.WeakValueDictionary()


class FusedTables(nn.Module):
    """An engine as a module whose backward pass updates its tables at learning rate `lr`.

    A forward pass without a backward one changes nothing. Several forward passes before the backward pass are several
    optimizer steps; under `torch.compile` they must then be in one compiled function. The gradient of `weights` is
    computed if they require it, from the rows before the update.
    """

    def __init__(self, engine: EmbeddingEngine, *, lr: float) -> None:
        super().__init__()
        self.engine = engine
        self.dims = [spec.dim for spec in engine.specs]
        self.memory = engine.memory
        """The tensors that the ops read and the backward pass changes."""
        # Autograd calls the backward pass only if an argument requires a gradient. This one is empty, and so is its
        # gradient.
        self.anchor = nn.Parameter(torch.empty(0, device=engine.device))
        self.optimizer = torch.optim.SGD([self.anchor], lr=lr)
        """Holds the learning rate, for `torch.optim.lr_scheduler`. Its `step` does nothing more to rows."""
        self.number = next(_numbers)
        _tables[self.number] = self

    @property
    def lr(self) -> float:
        """The learning rate of the next backward pass."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def forward(
        self,
        lengths: Tensor,
        values: Tensor,
        weights: Tensor | None = None,
        *,
        table_of_block: Sequence[int],
        bags_of_block: Sequence[int],
        slice_of_block: Sequence[int] | None = None,
        pooling: Pooling = Pooling.SUM,
    ) -> Tensor:
        """The flat result of `EmbeddingEngine.lookup`; the arguments are those of `Batch`."""
        result: Tensor = torch.ops.sennit.embedding_lookup(
            self.anchor,
            self.memory,
            weights,
            lengths,
            values,
            list(table_of_block),
            list(bags_of_block),
            None if slice_of_block is None else list(slice_of_block),
            pooling.value,
            self.dims,
            self.number,
        )
        return result


def _engine(number: int) -> FusedTables:
    tables = _tables.get(number)
    if tables is None:
        raise ArgumentError(f"fused tables number {number} no longer exist")
    return tables


def _batch(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    tables: Sequence[int],
    bags: Sequence[int],
    slices: Sequence[int] | None,
    pooling: str,
) -> Batch:
    return Batch(
        table_of_block=tuple(tables),
        bags_of_block=tuple(bags),
        slice_of_block=None if slices is None else tuple(slices),
        lengths=lengths,
        values=values,
        weights=weights,
        pooling=Pooling(pooling),
    )


@torch.library.custom_op("sennit::embedding_lookup", mutates_args=())
def _lookup(
    anchor: Tensor,
    memory: Sequence[Tensor],
    weights: Tensor | None,
    lengths: Tensor,
    values: Tensor,
    table_of_block: list[int],
    bags_of_block: list[int],
    slice_of_block: list[int] | None,
    pooling: str,
    dims: list[int],
    number: int,
) -> Tensor:
    engine = _engine(number).engine
    with engine.placed(memory):
        return engine.lookup(_batch(lengths, values, weights, table_of_block, bags_of_block, slice_of_block, pooling))


@_lookup.register_fake
def _lookup_shape(
    anchor: Tensor,
    memory: Sequence[Tensor],
    weights: Tensor | None,
    lengths: Tensor,
    values: Tensor,
    table_of_block: list[int],
    bags_of_block: list[int],
    slice_of_block: list[int] | None,
    pooling: str,
    dims: list[int],
    number: int,
) -> Tensor:
    used = [dims[table] for table in table_of_block]
    size: Any
    if pooling != Pooling.NONE.value:
        size = sum(bags * dim for bags, dim in zip(bags_of_block, used, strict=True))
    elif len(set(used)) == 1:
        size = values.shape[0] * used[0]
    else:
        size = torch.library.get_ctx().new_dynamic_size()
    return anchor.new_empty((size,))


@torch.library.custom_op("sennit::embedding_update", mutates_args=("memory",))
def _update(
    anchor: Tensor,
    gradient: Tensor,
    memory: Sequence[Tensor],
    weights: Tensor | None,
    wants_weights: bool,
    lengths: Tensor,
    values: Tensor,
    table_of_block: list[int],
    bags_of_block: list[int],
    slice_of_block: list[int] | None,
    pooling: str,
    number: int,
) -> tuple[Tensor, Tensor]:
    tables = _engine(number)
    batch = _batch(lengths, values, weights, table_of_block, bags_of_block, slice_of_block, pooling)
    gradient = gradient.contiguous()
    with tables.engine.placed(memory):
        of_weights = tables.engine.weight_gradient(batch, gradient) if wants_weights else gradient.new_empty(0)
        tables.engine.update(batch, gradient, rate=tables.lr)
    return torch.empty_like(anchor), of_weights


@_update.register_fake
def _update_shape(
    anchor: Tensor,
    gradient: Tensor,
    memory: Sequence[Tensor],
    weights: Tensor | None,
    wants_weights: bool,
    lengths: Tensor,
    values: Tensor,
    table_of_block: list[int],
    bags_of_block: list[int],
    slice_of_block: list[int] | None,
    pooling: str,
    number: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(anchor), gradient.new_empty(values.shape[0] if wants_weights else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    anchor, ctx.memory, weights, lengths, values, *ctx.rest = inputs
    # The tables are not saved: autograd would refuse to go back through tables that another backward pass has changed.
    ctx.save_for_backward(anchor, weights, lengths, values)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    anchor, weights, lengths, values = ctx.saved_tensors
    tables, bags, slices, pooling, _, number = ctx.rest
    wants_weights = weights is not None and ctx.needs_input_grad[2]
    # The anchor's gradient depends on the update, so compiled graphs keep the update.
    of_anchor, of_weights = torch.ops.sennit.embedding_update(
        anchor, gradient, ctx.memory, weights, wants_weights, lengths, values, tables, bags, slices, pooling, number
    )
    of_memory: list[None] = [None] * len(ctx.memory)
    return of_anchor, of_memory, (of_weights if wants_weights else None), *[None] * 8


_lookup.register_autograd(_backward, setup_context=_keep)
