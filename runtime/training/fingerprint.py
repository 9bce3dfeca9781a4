# SPDX-License-Identifier: Apache-2.0
"""One SHA-256 for all weights of a model, independent of which rank holds which table.

Each tensor is digested where it lives; only digests travel. The result is the digest of one line a tensor,
`name dtype shape sha256`, sorted by name, so that it can be recomputed from a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor


def line(name: str, tensor: Tensor) -> str:
    """The line of one tensor; its bytes are taken row-major, little-endian."""
    content = tensor.detach().cpu().contiguous().numpy()
    digest = hashlib.sha256(content.astype(content.dtype.newbyteorder("<"), copy=False).data).hexdigest()
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape} {digest}"


def fingerprint(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """Collective: every rank gives the tensors it holds. Replicated ones must agree on all ranks."""
    mine = {name: line(name, tensor) for name, tensor in tensors.items()}
    gathered: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    lines: dict[str, str] = {}
    for rank, part in enumerate(gathered):
        for name, text in (part or {}).items():
            if lines.setdefault(name, text) != text:
                raise RuntimeError(f"replicated weight {name} differs on rank {rank}: {text!r} against {lines[name]!r}")
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()
