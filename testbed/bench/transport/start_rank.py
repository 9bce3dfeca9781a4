# SPDX-License-Identifier: Apache-2.0
"""The program of `sennit bench start`: `torchrun .. start_rank.py BACKEND FOLDER`, as a user would write it.

It imports torch alone. Each rank leaves a file in the folder: when torch was imported and when its first AllReduce was
done, both as readings of `time.time`, or what failed.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

imported_s = time.time()
backend, folder = sys.argv[1:]
try:
    dist.init_process_group(backend)
    tensor = torch.ones(1024)
    dist.all_reduce(tensor)
    done_s = time.time()
    world = dist.get_world_size()
    if tensor[0] != world:
        raise RuntimeError(f"the sum of {world} ones is {tensor[0]:g}")
except Exception as error:
    (Path(folder) / "failure").write_text(str(error), encoding="utf-8")
    raise
(Path(folder) / f"{dist.get_rank()}").write_text(f"{imported_s!r} {done_s!r}", encoding="utf-8")
dist.destroy_process_group()
