# SPDX-License-Identifier: Apache-2.0
"""Runs of keys and folds of products on the CPU in C++ (csrc/), for the best instruction set of the processor."""

from __future__ import annotations

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.reference_products import Runs


class NativeProducts:
    """The functions of `reference_products`, with the same bits. One thread; keeps scratch memory between calls."""

    def __init__(self, instruction_set: str | None = None) -> None:
        """`instruction_set`: one that this processor has; None for the best one."""
        self._native = _kernels.Products(instruction_set or _kernels.instruction_sets()[0])

    def runs_of(self, keys: Tensor, key_count: int) -> Runs:
        keys = keys.contiguous()
        distinct, order, places = (torch.empty_like(keys) for _ in range(3))
        starts = torch.empty(len(keys) + 1, dtype=torch.int64)
        count = self._native.runs_of(
            keys.data_ptr(),
            len(keys),
            key_count,
            distinct.data_ptr(),
            order.data_ptr(),
            starts.data_ptr(),
            places.data_ptr(),
        )
        starts = starts[: count + 1]
        return Runs(keys=distinct[:count], order=order[: int(starts[-1])], starts=starts, places=places)

    def fold_products(
        self,
        left: Tensor,
        left_rows: Tensor,
        right: Tensor,
        right_rows: Tensor,
        starts: Tensor | None,
        *,
        into: Tensor | None = None,
    ) -> Tensor:
        shape = (len(left_rows) if starts is None else len(starts) - 1, left.shape[1], right.shape[2])
        result = torch.empty(shape) if into is None else into.view(shape)
        # Names keep them alive during the call.
        left_rows, right_rows = left_rows.contiguous(), right_rows.contiguous()
        starts = None if starts is None else starts.contiguous()
        self._native.fold_products(
            _matrices(left, left_rows),
            _matrices(right, right_rows),
            0 if starts is None else starts.data_ptr(),
            shape[0],
            left.shape[1],
            left.shape[2],
            right.shape[2],
            result.data_ptr(),
        )
        return result


def _matrices(matrices: Tensor, numbers: Tensor) -> tuple[int, int, int, int, int]:
    stride, row_stride, column_stride = matrices.stride()
    return matrices.data_ptr(), stride, row_stride, column_stride, numbers.data_ptr()
