# SPDX-License-Identifier: Apache-2.0
"""The program: starts the ranks, and waits for them."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sennit.testbed.differential.callbacks import stress
from sennit.testbed.differential.outcomes import compare, run_rank


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sennit.testbed.differential")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to repeat one that failed")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--callbacks", action="store_true", help="random programs of callbacks instead (callbacks.py)")
    asked = parser.parse_args(arguments)
    context = multiprocessing.get_context("forkserver")
    options = {"calls": asked.calls, "seed": asked.seed, "first": asked.first}
    what = stress if asked.callbacks else compare
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=run_rank, args=(rank, asked.ranks, store, what, options))
            for rank in range(asked.ranks)
        ]
        for process in ranks:
            process.start()
            stack.callback(process.kill)
        for process in ranks:
            process.join()
        return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
