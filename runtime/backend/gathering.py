# SPDX-License-Identifier: Apache-2.0
"""AllGather of parts of different sizes, over any backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator_or_names


def all_gather_parts(own: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the flat tensors of all ranks, one after another: `sizes[r]` elements of rank r.

    Other backends than sennit gather equal parts alone: they get padding.
    """
    if not isinstance(communicator_or_names(group), list):
        output = own.new_empty(sum(sizes))
        dist.all_gather(list(torch.split(output, list(sizes))), own, group=group)
        return output
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
