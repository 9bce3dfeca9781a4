# SPDX-License-Identifier: Apache-2.0
"""One SHA-256 over all weights of a model, independent of which rank holds which table.

Each tensor is hashed where it is, and only the digests are exchanged. The result is the digest of one line per tensor,
`name dtype shape sha256`, sorted by name, so it can be recomputed from a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor


def line(name: str, tensor: Tensor) -> str:
    """The line of one tensor. Its bytes are taken in row-major order, little-endian."""
    content = tensor.detach().cpu().contiguous().numpy()
    digest = hashlib.sha256(content.astype(content.dtype.newbyteorder("<"), copy=False).data).hexdigest()
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape} {digest}"


def fingerprint(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """The hash of all weights.

    Collective: every rank gives its tensors. Replicated tensors must be equal on all ranks.
    """
    mine = {name: line(name, tensor) for name, tensor in tensors.items()}
    gathered: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    lines: dict[str, str] = {}
    for rank, part in enumerate(gathered):
        for name, text in (part or {}).items():
            if lines.setdefault(name, text) != text:
                raise RuntimeError(f"replicated weight {name} differs on rank {rank}: {text!r} against {lines[name]!r}")
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()
