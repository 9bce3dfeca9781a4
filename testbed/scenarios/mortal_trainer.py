# SPDX-License-Identifier: Apache-2.0
"""`sennit train` whose ranks die and wait where the environment says so: `python -m` this module. Also by torchrun.

DEATHS is JSON, [[rank, step, marker file], ...]: the rank is killed at this step, once, because its marker file
prevents a second time. MARKS is JSON, [[step, file], ...]: rank 0 makes the file at this step, and two steps later it
waits until the file is gone. HALTS is JSON, [[world size, step, marker file], ...]: all ranks wait there, once in a
process, until a newcomer wants to join (or as many as a fourth item says); rank 0 makes the marker file first.
DIES_IN_HANDOVER: this process is killed when it is to receive a state.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sennit.runtime.backend import elastic
from sennit.runtime.training import elastic_run
from sennit.runtime.training.command import main
from sennit.runtime.training.handover import take_over
from sennit.runtime.training.trainer import StepReport, Trainer

DEADLINE_S: Final = 120.0
LOOK_S: Final = 0.02

_train_step = Trainer.train_step
_halted: set[str] = set()


def _mortal_step(self: Trainer) -> StepReport:
    for rank, step, marker in json.loads(os.environ.get("DEATHS", "[]")):
        if (self.rank, self.step) == (rank, step) and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    for step, marker in json.loads(os.environ.get("MARKS", "[]")):
        if (self.rank, self.step) == (0, step):
            Path(marker).touch()
        if (self.rank, self.step) == (0, step + 2):
            _wait_until(functools.partial(_is_gone, Path(marker)), f"{marker} is still there")
    for world_size, step, marker, *newcomers in json.loads(os.environ.get("HALTS", "[]")):
        if (self.world_size, self.step) == (world_size, step) and marker not in _halted:
            _halted.add(marker)
            if self.rank == 0:
                Path(marker).touch()
            _wait_for_newcomers(*newcomers)
    return _train_step(self)


def _wait_for_newcomers(count: int = 1) -> None:
    _wait_until(lambda: elastic.waiting_count() >= count, f"not {count} want to join")


def _is_gone(file: Path) -> bool:
    return not file.exists()


def _wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(otherwise)
        time.sleep(LOOK_S)


def _mortal_take_over(*arguments: Any) -> None:
    if "DIES_IN_HANDOVER" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    take_over(*arguments)


# Ranks that are forks of a server run this module too, as __mp_main__.
if __name__ in ("__main__", "__mp_main__"):
    Trainer.train_step = _mortal_step  # type: ignore[method-assign]
    elastic_run.take_over = _mortal_take_over  # type: ignore[attr-defined,assignment]

if __name__ == "__main__":
    main(forked=True)
