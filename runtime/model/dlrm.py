# SPDX-License-Identifier: Apache-2.0
"""DLRM: bottom MLP, products of all pairs of vectors, top MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sennit.runtime.model.inputs import ModelInputs, in_order, initialise, mlp
from sennit.transport.errors import ConfigError


class DLRM(nn.Module):
    """Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.

    With z0 = bottom(dense) and z1 … zT the tables' vectors, the top MLP sees z0 and all dot products zi · zj, i > j.
    Without dense features there is no z0.
    """

    def __init__(self, inputs: ModelInputs) -> None:
        """Raises `ConfigError` if tables differ in dim, or if there are no two vectors to multiply."""
        super().__init__()
        self._names = inputs.names
        dim = inputs.common_dim("dlrm")
        vectors = len(inputs.tables) + (inputs.dense_count > 0)
        if vectors < 2:
            raise ConfigError(
                f"dlrm multiplies pairs of vectors, but there is only that of table {inputs.names[0]}; allowed: dense "
                "features, more tables, or the models dcnv2 and deepfm"
            )
        self.bottom = mlp([inputs.dense_count, *inputs.bottom, dim], last_relu=True) if inputs.dense_count else None
        seen = vectors * (vectors - 1) // 2 + (dim if self.bottom is not None else 0)
        self.top = mlp([seen, *inputs.top, inputs.label_count], last_relu=False)
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        # Not a buffer, because DDP would broadcast it before each forward pass.
        self._pairs = lower[0] * vectors + lower[1]
        initialise(self, inputs.seed)

    def early(self, dense: Tensor, vectors: None) -> Tensor | None:
        """The bottom MLP's output, which needs no vectors, so that they can travel meanwhile."""
        return None if self.bottom is None else self.bottom(dense)

    def forward(self, dense: Tensor, vectors: dict[str, Tensor], early: Tensor | None = None) -> Tensor:
        """dense [B, D] and vectors [B, dim] by table -> logits, [B] of one label.

        `early`: its result for the same samples.
        """
        if early is None:
            early = self.early(dense, None)
        first = [] if early is None else [early]
        found = in_order(vectors, self._names)
        stacked = torch.stack(first + found, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        interactions = products.index_select(1, self._pairs.to(products.device))
        logits: Tensor = self.top(torch.cat([*first, interactions], 1))
        return logits.squeeze(1)
