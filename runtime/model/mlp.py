# SPDX-License-Identifier: Apache-2.0
"""Multi-layer perceptrons, and the initial weights of all models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from sennit.runtime.data.seeds import torch_stream


def mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Linear layers from `widths[0]` inputs to `widths[-1]` outputs, with ReLU between them."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def initialise(model: nn.Module, seed: int) -> None:
    """Initial weights: normal, with the deviations of DLRM's reference code.

    Each parameter has a stream of its own, so it depends on seed, name and shape alone.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            outputs = parameter.shape[0]
            variance = 2 / (outputs + parameter.shape[1]) if parameter.ndim == 2 else 1 / outputs
            parameter.normal_(0, variance**0.5, generator=torch_stream(seed, "dense", name))
