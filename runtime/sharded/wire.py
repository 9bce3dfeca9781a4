# SPDX-License-Identifier: Apache-2.0
"""The exchanges of sharded tables, and how many bytes they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """AlltoAll and AllGather of flat tensors with counts, among the ranks of a group. A rank alone sends nothing."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._world_size, self._group = rank, world_size, group
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that this rank gave other ranks, by kind: "lengths", "ids", "rows", "gradients" and so on."""

    def all_to_all(self, kind: str, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        """Sends `send[r]` elements of `source` to rank r. Returns `receive[r]` elements of each rank."""
        if self._world_size == 1:
            return source
        output = source.new_empty(sum(receive))
        dist.all_to_all_single(output, source, list(receive), list(send), group=self._group)
        self.sent_bytes[kind] += (sum(send) - send[self._rank]) * source.element_size()
        return output

    def all_gather(self, kind: str, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns the elements of all ranks, `sizes[r]` of rank r."""
        if self._world_size == 1:
            return own
        output = own.new_empty(sum(sizes))
        dist.all_gather(list(torch.split(output, list(sizes))), own, group=self._group)
        self.sent_bytes[kind] += own.nbytes * (self._world_size - 1)
        return output
