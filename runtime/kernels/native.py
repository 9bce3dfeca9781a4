# SPDX-License-Identifier: Apache-2.0
"""The operator on the CPU in C++ (csrc/), for the best instruction set of the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.batch import Batch, RowSums
from sennit.runtime.kernels.checks import BadGradients
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import Optimizer, StepConstants
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding
from sennit.transport.errors import Unsupported

# Numbered as in csrc/job.hpp.
_PRECISIONS: Final = (Precision.FP32, Precision.FP16, Precision.BF16)
_POOLINGS: Final = (Pooling.SUM, Pooling.MEAN, Pooling.NONE)
_OPTIMIZERS: Final[tuple[Optimizer | None, ...]] = (
    Optimizer.SGD,
    Optimizer.ADAGRAD,
    Optimizer.ROW_WISE_ADAGRAD,
    Optimizer.ADAM,
    Optimizer.PARTIAL_ROW_WISE_ADAM,
    Optimizer.LAMB,
    Optimizer.FTRL,
    None,
)


class NativeOperator:
    """Keeps the native side's view of the tables, and its scratch memory, between calls."""

    device_type: Final = "cpu"

    def __init__(self, instruction_set: str | None = None, *, threads: int = 1) -> None:
        """`instruction_set`: `avx512`, `avx2` or `portable`; None for the best one.

        `threads`: threads per call, including the caller's. Results do not depend on it.
        """
        there = _kernels.instruction_sets()
        if instruction_set is not None and instruction_set not in there:
            raise Unsupported(f"instruction set {instruction_set}", f"this processor has: {', '.join(there)}")
        self.instruction_set = instruction_set or there[0]
        self._threads = threads
        self._tables: Sequence[ShardMemory] = ()
        self._operators: dict[Optimizer | None, _kernels.Operator] = {}

    def lookup(self, tables: Sequence[ShardMemory], batch: Batch) -> Tensor:
        specs = tuple(table.spec for table in tables)
        result = torch.empty(batch.output_size(specs), dtype=torch.float32)
        self._operator(tables).lookup(*_arguments(batch), result.data_ptr())
        return result

    def weight_gradient(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> Tensor:
        result = torch.empty(len(batch.values), dtype=torch.float32)
        self._operator(tables).weight_gradient(*_arguments(batch), gradient.data_ptr(), result.data_ptr())
        return result

    def update(
        self,
        tables: Sequence[ShardMemory],
        batch: Batch,
        gradient: Tensor,
        *,
        kind: Optimizer,
        constants: StepConstants,
        rounding: Rounding,
        seed: int,
    ) -> list[BadGradients]:
        bad = self._operator(tables, kind).update(
            *_arguments(batch),
            batch.slice_of_block or (),
            gradient.data_ptr(),
            constants.floats,
            constants.decay_after,
            constants.nesterov,
            rounding is Rounding.STOCHASTIC,
            constants.step & 0xFFFFFFFF,
            seed,
        )
        return [BadGradients(table=table, row_count=count, first_row=first) for table, count, first in bad]

    def sum_rows(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> list[RowSums]:
        found: list[RowSums] = []

        def room(table: int, count: int) -> tuple[int, int]:
            sums = torch.empty(count, tables[table].spec.dim)
            found.append(RowSums(table=table, rows=torch.empty(count, dtype=torch.int64), sums=sums))
            return found[-1].rows.data_ptr(), sums.data_ptr()

        self._operator(tables).sum_rows(*_arguments(batch), batch.slice_of_block or (), gradient.data_ptr(), room)
        return found

    @property
    def scratch_bytes(self) -> int:
        """Bytes that updates have needed so far, without tables, batch and gradient."""
        return sum(operator.scratch_bytes for operator in self._operators.values())

    def _operator(self, tables: Sequence[ShardMemory], kind: Optimizer | None = None) -> _kernels.Operator:
        if tables is not self._tables:
            self._tables, self._operators = tables, {}
        operator = self._operators.get(kind)
        if operator is None:
            operator = self._operators[kind] = _kernels.Operator(
                self.instruction_set, _OPTIMIZERS.index(kind), self._threads
            )
            for table in tables:
                states = [*(state.data_ptr() for state in table.states.values()), 0, 0]
                operator.add(
                    table.weight.data_ptr(),
                    table.spec.row_count,
                    table.spec.dim,
                    _PRECISIONS.index(table.spec.precision),
                    table.spec.first_row,
                    table.spec.stream,
                    states[0],
                    states[1],
                    0 if table.row_numbers is None else table.row_numbers.data_ptr(),
                )
        return operator


def _arguments(batch: Batch) -> tuple[Sequence[int], Sequence[int], tuple[int, bool], tuple[int, bool], int, int]:
    return (
        batch.table_of_block,
        batch.bags_of_block,
        (batch.lengths.data_ptr(), batch.lengths.dtype is torch.int64),
        (batch.values.data_ptr(), batch.values.dtype is torch.int64),
        0 if batch.weights is None else batch.weights.data_ptr(),
        _POOLINGS.index(batch.pooling),
    )
