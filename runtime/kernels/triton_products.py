# SPDX-License-Identifier: Apache-2.0
"""Runs of keys and folds of products on a GPU: torch sorts, and a Triton kernel folds."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from sennit.runtime.kernels.reference_products import runs_of
from sennit.runtime.kernels.triton_fold import fold_products_kernel

__all__ = ["fold_products", "runs_of"]

# Columns of an item (its rows side by side) and elements per program. There are many in the interpreter, where
# operations cost and elements do not.
WIDTH: Final = 256
TILE: Final = {"cuda": 1024, "cpu": 1 << 15}


def fold_products(
    left: Tensor,
    left_rows: Tensor,
    right: Tensor,
    right_rows: Tensor,
    starts: Tensor | None,
    *,
    into: Tensor | None = None,
) -> Tensor:
    items = len(left_rows) if starts is None else len(starts) - 1
    rows, depth, columns = left.shape[1], left.shape[2], right.shape[2]
    shape = (items, rows, columns)
    result = torch.empty(shape, device=left.device) if into is None else into.view(shape)
    if items == 0:
        return result
    width = min(WIDTH, triton.next_power_of_2(rows * columns))
    a_program = max(1, TILE[left.device.type] // width)
    grid = (triton.cdiv(items, a_program), triton.cdiv(rows * columns, width))
    with torch.cuda.device_of(left):  # type: ignore[no-untyped-call]
        fold_products_kernel[grid](
            result,
            left,
            left_rows,
            right,
            right_rows,
            starts,
            items,
            rows,
            depth,
            columns,
            *left.stride(),
            *right.stride()[:2],
            SINGLE=starts is None,
            ITEMS=a_program,
            WIDTH=width,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return result
