# SPDX-License-Identifier: Apache-2.0
"""One rank that sums arrays until it is told to stop: `python FILE RANK WORLD FOLDER SEED`.

Writes the number of finished rounds to FOLDER/rounds<RANK>. Rank 0 looks for FOLDER/stop. Checks every result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.meeting.store import FileStore

ELEMENTS = 100_003


def main() -> None:
    rank, world, folder, seed = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    rng = np.random.default_rng(seed)
    arrays = rng.integers(-1_000, 1_000, (world, ELEMENTS), np.int64)
    expected = arrays.sum(axis=0)
    with Communicator(rank=rank, world=world, store=FileStore(folder / "store"), config=from_environment()) as group:
        rounds = 0
        done = False
        while not done:
            np.testing.assert_array_equal(group.allreduce(arrays[rank]), expected)
            rounds += 1
            (folder / f"rounds{rank}").write_text(f"{rounds}")
            done = bool(group.allreduce(np.array([rank == 0 and (folder / "stop").exists()], np.int32))[0])
        for name, value in sorted(group.counters().items()):
            print(name, value)


if __name__ == "__main__":
    main()
