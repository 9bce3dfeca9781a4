# SPDX-License-Identifier: Apache-2.0
"""The loss of a slice of samples."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Log loss, summed over the samples of a slice, so that slices of different sizes weigh what they should."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
