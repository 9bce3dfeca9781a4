# SPDX-License-Identifier: Apache-2.0
# Torch types its backward pass thinly:
# mypy: disable-error-code="no-untyped-call"
"""A layer of the research HSTU of meta-recsys/generative-recommenders beside ours, with the same weights.

Theirs has one bias by distance for all heads, no affine norms, no bias before the split, and padded sequences. Its bias
by time is between the next event and an earlier one, which the last position of a history does not have: it is left out
here. Everything else is one formula.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.kernels.attention import jagged_attention
from sennit.runtime.model.hstu import HstuLayer

LONGEST, WIDTH, HEADS = 24, 16, 2


def pair() -> tuple[Any, HstuLayer]:
    """Their layer and ours, with the weights of theirs."""
    importlib.import_module("fbgemm_gpu")  # their operators
    theirs = importlib.import_module("generative_recommenders.research.modeling.sequential.hstu")
    bias = theirs.RelativePositionalBias(LONGEST)
    layer = theirs.SequentialTransductionUnitJagged(
        embedding_dim=WIDTH, linear_hidden_dim=WIDTH // HEADS, attention_dim=WIDTH // HEADS, dropout_ratio=0.0,
        attn_dropout_ratio=0.0, num_heads=HEADS, linear_activation="silu", relative_attention_bias_module=bias,
        epsilon=1e-5,
    )  # fmt: skip
    ours = HstuLayer(WIDTH, HEADS, LONGEST, has_times=False, dtype=torch.float32)
    with torch.no_grad():
        ours.split.weight.copy_(layer._uvqk.T)
        ours.split.bias.zero_()
        ours.out.weight.copy_(layer._o.weight)
        ours.out.bias.copy_(layer._o.bias)
        # Theirs begins with the distance to the first position of all; ours counts distances from 0.
        by_distance = bias(torch.zeros(1, LONGEST, dtype=torch.int64))[0, :, 0]
        ours.position_bias.copy_(by_distance.expand(HEADS, -1))
    return layer, ours


def compare(seed: int) -> None:
    """Raises AssertionError where results or gradients differ by more than rounding."""
    torch.manual_seed(seed)
    layer, ours = pair()
    lengths = torch.tensor([LONGEST, 1, 7, 0, 19])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rows = torch.randn(int(lengths.sum()), WIDTH)
    weights = torch.randn_like(rows)

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # Theirs does not scale scores.
        return jagged_attention(query, key, value, offsets, activation="silu", scale=1.0, **options)

    found = []
    for run in (
        lambda given: layer(given, offsets, torch.zeros(len(lengths), LONGEST), torch.ones(LONGEST, LONGEST).tril())[0],
        lambda given: ours(given, attend),
    ):
        given = rows.clone().requires_grad_()
        output = run(given)
        (output * weights).sum().backward()
        found.append((output.detach(), given.grad))
    (output, gradient), (our_output, our_gradient) = found
    torch.testing.assert_close(our_output, output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.split.weight.grad, layer._uvqk.grad.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.out.weight.grad, layer._o.weight.grad, rtol=1e-4, atol=1e-5)
    assert ours.position_bias.grad is not None
    torch.testing.assert_close(
        ours.position_bias.grad.sum(0), layer._rel_attn_bias._w.grad[:LONGEST].flip(0), rtol=1e-4, atol=1e-5
    )


if __name__ == "__main__":
    compare(int(sys.argv[1]))
