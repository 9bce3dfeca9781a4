# SPDX-License-Identifier: Apache-2.0
"""The dense part's optimizers, and the rate of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sennit.transport.errors import ConfigError

DENSE_OPTIMIZERS = ("adagrad", "adam", "sgd")
DECAYS = ("linear", "none")


def dense_optimizer(name: str, parameters: Iterable[nn.Parameter], *, rate: float) -> torch.optim.Optimizer:
    """The optimizer of the replicated part."""
    match name:
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate, eps=1e-8, foreach=False)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate, foreach=False)
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, foreach=False)
    raise ConfigError(f"dense optimizer {name!r}; allowed: {', '.join(DENSE_OPTIMIZERS)}")


def rate_factor(decay: str, step: int, step_count: int) -> float:
    """What step `step` of `step_count` multiplies the learning rates by."""
    match decay:
        case "none":
            return 1.0
        case "linear":
            return 1.0 - step / step_count
    raise ConfigError(f"decay {decay!r}; allowed: {', '.join(DECAYS)}")
