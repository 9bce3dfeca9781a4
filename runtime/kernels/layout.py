# SPDX-License-Identifier: Apache-2.0
"""A table in memory: its weights and the states of its optimizer, named for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    """One table. Implementations read and write these tensors in place."""

    spec: TableSpec

    weight: Tensor
    """[row_count, dim] in the table's precision."""

    states: dict[str, Tensor]
    """Float32, in the order of `OptimizerSpec.states`."""


def allocate(spec: TableSpec, optimizer: OptimizerSpec, device: torch.device) -> TableMemory:
    """A table of zeros."""
    return TableMemory(
        spec=spec,
        weight=torch.zeros(spec.row_count, spec.dim, dtype=spec.precision.dtype, device=device),
        states={
            name: torch.zeros(optimizer.state_shape(name, spec), dtype=torch.float32, device=device)
            for name in optimizer.states
        },
    )
