# SPDX-License-Identifier: Apache-2.0
"""The optimizers of the dense part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sennit.transport.errors import ConfigError

DENSE_OPTIMIZERS = ("adagrad", "adam", "sgd")


def dense_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, rate: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer of the dense part. `weight_decay` times the weight is added to its gradient (L2)."""
    match name:
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate, eps=1e-8, weight_decay=weight_decay, foreach=False)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate, weight_decay=weight_decay, foreach=False)
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=weight_decay, foreach=False)
    raise ConfigError(f"dense optimizer {name!r}; allowed: {', '.join(DENSE_OPTIMIZERS)}")
