# SPDX-License-Identifier: Apache-2.0
"""The dense part of a DLRM (Naumov et al. 2019): bottom MLP, pairwise interaction, top MLP.

It is replicated on every rank (DDP); the embedding tables are not part of this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream


class DenseModel(nn.Module):
    """dense [B, D] and pooled embeddings [T, B, dim] -> logits [B].

    With z0 = bottom(dense) and z1 … zT the pooled embeddings, the top MLP sees z0 and all dot products zi · zj, i > j.
    """

    def __init__(
        self,
        *,
        dense_count: int,
        table_count: int,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        seed: int,
    ) -> None:
        super().__init__()
        vectors = table_count + 1
        pair_count = vectors * (vectors - 1) // 2
        self.bottom = _mlp([dense_count, *bottom, dim], last_relu=True)
        self.top = _mlp([dim + pair_count, *top, 1], last_relu=False)
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        # Not a buffer, because DDP would broadcast it before each forward pass.
        self._pairs = lower[0] * vectors + lower[1]
        _initialise(self, seed)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        first: Tensor = self.bottom(dense)
        vectors = torch.cat((first.unsqueeze(0), pooled)).transpose(0, 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        interactions = products.index_select(1, self._pairs.to(products.device))
        logits: Tensor = self.top(torch.cat((first, interactions), 1))
        return logits.squeeze(1)


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _initialise(model: nn.Module, seed: int) -> None:
    """Initial weights: normal, with the deviations of the reference code; each parameter has its own stream."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            outputs = parameter.shape[0]
            variance = 2 / (outputs + parameter.shape[1]) if parameter.ndim == 2 else 1 / outputs
            parameter.normal_(0, variance**0.5, generator=torch_stream(seed, "dense", name))
