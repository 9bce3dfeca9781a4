# SPDX-License-Identifier: Apache-2.0
"""DCNv2: explicit products of features in cross layers, and an MLP above or beside them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sennit.runtime.model.inputs import ModelInputs, in_order, initialise, mlp
from sennit.transport.errors import ConfigError

STRUCTURES: Final = ("parallel", "stacked")


class CrossLayer(nn.Module):
    """x0 and x [B, n] -> x0 ⊙ (W x + b) + x. With a rank r, W = U Vᵀ, where U and V are [n, r]."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        if rank is None:
            self.product: nn.Module = nn.Linear(width, width)
        else:
            self.product = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, first: Tensor, found: Tensor) -> Tensor:
        return torch.addcmul(found, first, self.product(found))


class DCNv2(nn.Module):
    """Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021.

    x0 has the dense features and the vectors of all tables, whose dims may differ. It goes through the cross layers
    (section 3.2). With "stacked" the MLP sees their output, with "parallel" x0 (section 3.3); then the last layer sees
    both outputs. `inputs.top` are the widths of the MLP; there is no bottom MLP.
    """

    def __init__(
        self, inputs: ModelInputs, *, cross_layers: int = 3, rank: int | None = None, structure: str = "parallel"
    ) -> None:
        """`rank`: the rank of the cross layers' matrices (section 3.4); None: full. Raises `ConfigError`."""
        super().__init__()
        width = inputs.width
        if cross_layers < 1:
            raise ConfigError(f"dcnv2: {cross_layers} cross layers; allowed: 1 or more")
        if rank is not None and not 1 <= rank <= width:
            raise ConfigError(f"dcnv2: rank {rank}; allowed: 1 to {width}, the width of a sample")
        if structure not in STRUCTURES:
            raise ConfigError(f"dcnv2: structure {structure!r}; allowed: {', '.join(STRUCTURES)}")
        self._names = inputs.names
        self._is_stacked = structure == "stacked"
        self.cross = nn.ModuleList(CrossLayer(width, rank) for _ in range(cross_layers))
        self.deep = mlp([width, *inputs.top], last_relu=True)
        deep_width = inputs.top[-1] if inputs.top else width
        self.head = nn.Linear(deep_width if self._is_stacked else width + deep_width, inputs.label_count)
        initialise(self, inputs.seed)

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """dense [B, D] and vectors [B, dim] by table -> logits, [B] of one label."""
        first = torch.cat([dense, *in_order(vectors, self._names)], 1)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        seen = self.deep(crossed) if self._is_stacked else torch.cat([crossed, self.deep(first)], 1)
        logits: Tensor = self.head(seen)
        return logits.squeeze(1)
