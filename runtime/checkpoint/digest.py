# SPDX-License-Identifier: Apache-2.0
"""One SHA-256 over all weights of a model, independent of which rank holds which table.

Each tensor is hashed where it is, and only the digests are exchanged. The result is the digest of one line per tensor,
`name dtype shape sha256`, sorted by name, so it can be recomputed from a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def line(name: str, tensor: Tensor) -> str:
    """The line of one tensor."""
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {shape} {sha256_of_tensor(tensor)}"


def digest(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
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


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_tensor(tensor: Tensor) -> str:
    """SHA-256 over the elements' bytes in row-major order, little-endian as on all processors that torch runs on."""
    elements = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().data).hexdigest()
