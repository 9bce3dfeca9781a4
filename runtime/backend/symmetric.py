# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory for tensors: memory that the other ranks of this host map, so that collectives copy less.

A transfer from or to a symmetric tensor is one copy in place of two, and an AllReduce folds the tensors where they are.
Nothing else changes: results have the same bits, and symmetric and other tensors may be mixed on any rank. Only CPU
tensors of 16 KiB and more are symmetric. `SENNIT_SHARED_ALLOCATOR=1` makes all of them so.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator, communicator_or_names, load_extension


@contextlib.contextmanager
def symmetric_memory() -> Iterator[None]:
    """Inside `with`, new CPU tensors of this thread are symmetric: a model, DDP's buckets, buffers of exchanges.

    Where the host has no memory left for one, it gets ordinary memory, and torch warns once.
    """
    allocator = load_extension().symmetric
    allocator.begin()
    try:
        yield
    finally:
        allocator.end()


def memory_for_peers(group: dist.ProcessGroup | None) -> contextlib.AbstractContextManager[None]:
    """`symmetric_memory` if ranks of the group share a host, and nothing otherwise."""
    found = communicator_or_names(group)
    is_shared = not isinstance(found, list) and found.hosts.peers[0] > 0
    return symmetric_memory() if is_shared else contextlib.nullcontext()


def symmetric_empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns a symmetric CPU tensor with any content. `dtype`: torch's default type if None.

    If a `group` is given, its RDMA devices register the tensor once, and not for each operation. Otherwise the tensor
    belongs to no group: all groups of the process gain from it.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    with symmetric_memory():
        tensor = torch.empty(sizes, dtype=dtype)
    if group is not None and math.prod(sizes) != 0:
        storage = tensor.untyped_storage()
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        registration = communicator(group).register(memory).__enter__()
        weakref.finalize(storage, registration.close)
    return tensor


def is_symmetric(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is symmetric."""
    return tensor.device.type == "cpu" and bool(load_extension().symmetric.contains(tensor.data_ptr()))
