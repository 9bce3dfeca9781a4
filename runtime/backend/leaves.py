# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on how many ranks took part: a rank gives leaves of one tree (docs/reference/plans.md).

span = leaves_of(rank, world, 8)                   # of 8 micro-batches, those of this rank
rows = torch.stack([gradient(i) for i in range(*span)])
total = all_reduce_leaves(rows, leaves=8)          # the same bits with 1, 2, 3 or 8 ranks
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from sennit.runtime.backend.gathering import all_gather_parts
from sennit.runtime.backend.process_group import communicator_or_names
from sennit.runtime.backend.reductions import known_reduction
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.arithmetic import run_program
from sennit.transport.plans.elements import DTYPES, Dtype, ReduceOp, accumulator
from sennit.transport.plans.tree import check_rows, combinations, given_spans

# torch's names are NumPy's, and these.
_TYPES: Final = DTYPES | {"bfloat16": Dtype.BF16, "complex32": Dtype.C32}
# PREMUL_SUM needs a factor, which torch's name for the operation does not hold.
_OPS: Final = {op.name: op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM}


def all_reduce_leaves(
    tensor: torch.Tensor,
    leaves: int,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    partial: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the reduction of `leaves` leaves. Row i of `tensor` is leaf `leaves_of(rank, world, leaves).low + i`.

    With `partial`, row i is the sum of the rank's i-th node (`given_spans`), in the type of partial sums: float32 for
    16-bit floats. `dtype` then says which type the leaves had. All ranks give the same `leaves`, `op`, `partial` and
    types. The result has the shape of a row, and the leaves' type. AVG divides by `leaves`. Waits until the result is
    there. Raises ArgumentError, before anything is sent, if the rows are not those of this rank, if the operation is
    not defined for the type, or if the tensor is not in host memory.

    Over another backend than sennit all rows go to all ranks, which fold them here: slow, for comparisons.
    """
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor on {tensor.device}; allowed: cpu")
    result_type = tensor.dtype if dtype is None else dtype
    summed = _known(result_type)
    given = accumulator(summed) if partial else summed
    if _known(tensor.dtype) is not given:
        what = "partial sums" if partial else "leaves"
        raise ArgumentError(f"{what} of {result_type} given as {tensor.dtype}; allowed: {given.name}")
    reduction = known_reduction(op, _OPS)
    result = torch.empty(tensor.shape[1:], dtype=result_type)
    rows = tensor.shape[0] if tensor.ndim else 0
    backend = communicator_or_names(group)
    if isinstance(backend, list):
        folded = _folded_here(_bytes(tensor), rows, summed, reduction, leaves, group, partial=partial)
        _bytes(result)[:] = folded
        return result
    backend.reduce_leaves(
        _bytes(tensor),
        _bytes(result),
        summed,
        reduction,
        rows=rows,
        elements=result.numel(),
        leaves=leaves,
        partial=partial,
    )
    return result


def _folded_here(
    own: npt.NDArray[np.uint8],
    rows: int,
    dtype: Dtype,
    op: ReduceOp,
    leaves: int,
    group: dist.ProcessGroup | None,
    *,
    partial: bool,
) -> npt.NDArray[np.uint8]:
    """The bytes of the result, from this rank's `rows` and those of all others."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    check_rows(rows, rank, world, leaves, partial=partial)
    spans = [given_spans(other, world, leaves, partial=partial) for other in range(world)]
    row_bytes = len(own) // rows
    given = all_gather_parts(torch.from_numpy(own), [len(of_rank) * row_bytes for of_rank in spans], group)
    nodes = tuple(span for of_rank in spans for span in of_rank)
    return run_program(
        [row.numpy() for row in given.view(len(nodes), row_bytes)],
        combinations(nodes, leaves),
        dtype,
        op,
        partial=[partial] * len(nodes),
        divisor=leaves,
    )


def _known(dtype: torch.dtype) -> Dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise ArgumentError(f"dtype {dtype}; allowed: {', '.join(_TYPES)}")
    return _TYPES[name]


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's memory, or a copy's if it is not contiguous."""
    flat: npt.NDArray[np.uint8] = (
        tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    )
    return flat
