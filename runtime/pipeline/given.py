# SPDX-License-Identifier: Apache-2.0
"""Finds a loader that writes to a batch which it has given, and which is not trained on yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.backend.torch_versions import times_changed, tree_leaves
from sennit.transport.errors import ArgumentError


class GivenBatches:
    """The tensors of the batches that are ahead of their steps.

    Memory that a loader fills again is found by torch's version counters. So a write through NumPy is not found; and a
    ring of buffers is good, if it has one for each batch that is ahead, and one more.
    """

    def __init__(self, depth: int) -> None:
        """`depth`: how many batches may be ahead."""
        self._before: deque[dict[int, tuple[Tensor, int]]] = deque(maxlen=depth)

    def add(self, samples: Any) -> None:
        """The loader has given another batch. Raises `ArgumentError` if it is in the memory of one before."""
        given = {one.data_ptr(): one for one in _tensors(samples)}
        for before in self._before:
            for place, (tensor, version) in before.items():
                if place in given and times_changed(tensor) != version:
                    shape = tuple(tensor.shape)
                    raise ArgumentError(
                        f"the loader has written to a tensor of shape {shape} of a batch that it had given, and that "
                        "was not trained on yet; allowed: new tensors for each batch, or batches_ahead=0"
                    )
        self._before.append({place: (one, times_changed(one)) for place, one in given.items()})


def _tensors(samples: Any) -> Iterator[Tensor]:
    """The tensors of a batch: in tuples, lists and dicts, and in attributes of objects in them."""
    leaves = tree_leaves(samples)
    objects = [vars(leaf) for leaf in leaves if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")]
    for one in (*leaves, *tree_leaves(objects)):
        if isinstance(one, Tensor) and one.layout is torch.strided and one.numel():
            yield one
