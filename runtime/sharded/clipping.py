# SPDX-License-Identifier: Apache-2.0
"""Clipping by the common norm of dense gradients and of those of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.errors import ArgumentError


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], tables: Iterable[ShardedTables], max_norm: float) -> Tensor:
    """Scales gradients down if their common 2-norm is above `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    `parameters`: dense ones, with the same `grad` on all ranks, or DTensors. `tables`: modules whose backward pass ran
    inside `no_sync`. Then `module.optimizer.step()` takes their step.

    Returns the norm before, float32 []. Collective. Raises `ArgumentError` for a `max_norm` that is not above 0, and if
    tables have updated their rows already.
    """
    if not max_norm > 0:
        raise ArgumentError(f"max_norm {max_norm}; allowed: above 0")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    dense, modules = [one for one in given if one.grad is not None], list(tables)
    of_dense: Any = get_total_norm([one.grad for one in dense if one.grad is not None])
    if hasattr(of_dense, "full_tensor"):  # Of DTensors.
        of_dense = of_dense.full_tensor()
    total = torch.tensor(math.hypot(float(of_dense), *(module.grad_norm() for module in modules)))
    # As torch, which multiplies finite gradients by 0 if the norm is infinite. A norm may be NaN for those of tables.
    clip_grads_with_norm_(dense, max_norm, total.nan_to_num(nan=math.inf, posinf=math.inf))
    factor = max_norm / (float(total) + 1e-6)
    if factor < 1:
        for module in modules:
            module.multiply_grads(factor)
    return total
