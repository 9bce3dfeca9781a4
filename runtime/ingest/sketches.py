# SPDX-License-Identifier: Apache-2.0
"""One sketch for a run: the sum of what the receivers of all ranks counted."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from sennit.offload.sketch import Sketch
from sennit.runtime.data.batch_source import BatchSource


def save_sketch(source: BatchSource, path: Path, *, earlier: Sketch | None = None, note: str = "") -> None:
    """Sums the sketches, and writes them on rank 0. Collective. Nothing is written if a rank has no sketch.

    `earlier`: what this rank counted before, in other groups. `note`: for people, in the file.
    """
    found: list[Sketch | None] = [None] * dist.get_world_size()
    own = source.sketch()
    if own is not None and earlier is not None:
        own.merge(earlier)
    dist.all_gather_object(found, own)
    sketches = [sketch for sketch in found if sketch is not None]
    if dist.get_rank() == 0 and len(sketches) == len(found):
        total = sketches[0]
        for other in sketches[1:]:
            total.merge(other)
        total.note = note
        total.save(path)
