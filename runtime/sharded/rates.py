# SPDX-License-Identifier: Apache-2.0
"""The learning rates of tables whose backward pass is their optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class TableRates(torch.optim.Optimizer):
    """Learning rates, one parameter group for each group of tables, so that torch's schedulers can set them.

    `step` and `zero_grad` do nothing: rows were updated in the backward pass.
    """

    def __init__(self, names: Sequence[Sequence[str]], *, rate: float) -> None:
        """`names`: the tables of each group."""
        groups = [{"params": [nn.Parameter(torch.empty(0))], "tables": list(of_group)} for of_group in names]
        super().__init__(groups, {"lr": rate})

    def rate(self, group: int) -> float:
        """The learning rate of the next backward pass."""
        return float(self.param_groups[group]["lr"])

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()
