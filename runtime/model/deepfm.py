# SPDX-License-Identifier: Apache-2.0
"""DeepFM: a factorisation machine and an MLP on the same vectors."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.model.inputs import ModelInputs, in_order, initialise, mlp

DEVIATION: Final = 0.05
"""Standard deviation of the vectors of dense features. The logit sums a product for each pair of fields, so larger
vectors begin with a large loss.
"""


class DeepFM(nn.Module):
    """Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.

    The logit is the sum of a first-order part, of the dot products of all pairs of fields, and of an MLP on all fields.
    A field is the vector of a table, or a dense feature times a vector of its own. Tables hold vectors alone, so the
    first-order part is linear in their columns and in the dense features. `inputs.top` are the widths of the MLP; there
    is no bottom MLP.
    """

    def __init__(self, inputs: ModelInputs) -> None:
        """Raises `ConfigError` if tables differ in dim."""
        super().__init__()
        dim = inputs.common_dim("deepfm")
        self._names = inputs.names
        self.dense_vectors = nn.Parameter(torch.empty(inputs.dense_count, dim)) if inputs.dense_count else None
        self.first_order = nn.Linear(inputs.width, inputs.label_count)
        widths = [(inputs.dense_count + len(inputs.tables)) * dim, *inputs.top, inputs.label_count]
        self.deep = mlp(widths, last_relu=False)
        initialise(self, inputs.seed)
        if self.dense_vectors is not None:
            with torch.no_grad():
                self.dense_vectors.normal_(0, DEVIATION, generator=torch_stream(inputs.seed, "dense", "dense_vectors"))

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """dense [B, D] and vectors [B, dim] by table -> logits, [B] of one label."""
        fields = torch.stack(in_order(vectors, self._names), 1)
        linear = self.first_order(torch.cat([dense, fields.flatten(1)], 1))
        if self.dense_vectors is not None:
            fields = torch.cat([dense.unsqueeze(2) * self.dense_vectors, fields], 1)
        # Rendle 2010: the square of the sum holds each pair twice, and each field with itself.
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
        logits: Tensor = linear + pairs + self.deep(fields.flatten(1))
        return logits.squeeze(1)
