# SPDX-License-Identifier: Apache-2.0
"""Row-wise AdaGrad for embedding rows, the dense part's optimizers, and the rate of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sennit.transport.errors import ConfigError

DENSE_OPTIMIZERS = ("adagrad", "adam", "sgd")
DECAYS = ("linear", "none")


class RowWiseAdagrad:
    """AdaGrad with one accumulator a row: the running sum of the row's mean squared gradient.

    Neo (Mudigere et al. 2022, section 4.1.4; Gupta et al. 2014): `state += mean(g²)`,
    `w -= rate · g / (sqrt(state) + epsilon)`. Against full AdaGrad the state is smaller by the embedding dimension.
    """

    def __init__(self, row_count: int, *, epsilon: float = 1e-8) -> None:
        self.state = torch.zeros(row_count)
        self.epsilon = epsilon

    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, *, rate: float) -> None:
        """Updates `rows` (int64, each at most once) with `gradient` [rows, dim]."""
        state = self.state[rows] + gradient.square().mean(1)
        self.state[rows] = state
        weight[rows] -= gradient * (rate / (state.sqrt() + self.epsilon)).unsqueeze(1)


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
