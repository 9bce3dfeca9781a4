# SPDX-License-Identifier: Apache-2.0
"""Trains a small DLRM with two ranks, once for each transport named on the standard input.

Imports what ranks need once, then forks the ranks, because that costs seconds in a VM. Answers each line with
the SHA-256 of the trained weights, which must be equal on both ranks.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pandas  # noqa: F401  pyarrow imports it
import pyarrow.compute  # noqa: F401
import torch
import torch._dynamo  # DDP imports it.
import torch.distributed as dist

from sennit.runtime.backend.process_group import register
from sennit.runtime.data import sources
from sennit.runtime.data.source import Source
from sennit.runtime.stream.settings import short_stream
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.report import RunReport
from sennit.runtime.training.streamed import stream_source
from sennit.runtime.training.stretch import History, train
from sennit.testbed.vm import links

WORLD = 2
TIMEOUT = datetime.timedelta(seconds=60)
DATA = Source(data="synthetic", samples=8192, row_limit=20_000)
CONFIG = TrainingConfig(source=DATA, epochs=1, max_steps=6, batch_size=1024, timeout_s=60.0)


def run_rank(transport: str, rank: int, folder: Path) -> None:
    os.environ.update(SENNIT_TRANSPORT=transport, SENNIT_INTERFACES=links.netdev(rank))
    meeting = f"file://{folder / transport}"
    dist.init_process_group("sennit", init_method=meeting, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    found = short_stream(sources.load(CONFIG.source, seed=CONFIG.seed), CONFIG.stream, CONFIG.order_settings)
    source = stream_source(CONFIG, found, found.fit(), rank=rank, world_size=WORLD)
    report = train(CONFIG, source, History(), begin=lambda trainer: None, timeline=None)
    assert isinstance(report, RunReport)
    (folder / f"weights{rank}").write_text(report.weights_sha256)
    dist.destroy_process_group()


def start(function: Callable[[], None]) -> int:
    """Calls the function in a fork of this process. Returns the process number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is for answers only
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(what: str, children: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"{what} ended with {codes}")


def main() -> None:
    torch.set_num_threads(1)
    register()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for line in sys.stdin:
            transport = line.strip()
            ranks = [start(functools.partial(run_rank, transport, rank, folder)) for rank in range(WORLD)]
            finish(f"training over {transport}", ranks)
            (digest,) = {(folder / f"weights{rank}").read_text() for rank in range(WORLD)}
            print(digest, flush=True)


if __name__ == "__main__":
    main()
