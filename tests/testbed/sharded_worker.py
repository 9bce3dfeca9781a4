# SPDX-License-Identifier: Apache-2.0
"""One rank of test_sharded_over_loss.py: `python FILE RANK WORLD STORE PLACEMENT`. Prints the digest of its run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

CASES = Path(__file__).parents[1] / "runtime" / "sharded_model_cases.py"


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("cpu:sennit", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    print(runpy.run_path(str(CASES))["trained"](rank, world, sys.argv[4]), flush=True)
    dist.barrier()  # Nobody leaves while others still wait for its packets.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
