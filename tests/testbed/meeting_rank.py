# SPDX-License-Identifier: Apache-2.0
"""A rank that tells how the making of its group went."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.errors import SennitError
from sennit.transport.meeting.store import FileStore


def meet(rank: int, world: int, store: Path, *, again: bool = False) -> None:
    """Makes a group, runs one AllReduce, and prints the outcome as JSON: the error, the seconds, the group's notes.

    `again`: in between it prints "once", and runs another AllReduce when it gets a line.
    """
    begun_s = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            group = Communicator(rank=rank, world=world, store=FileStore(store), config=from_environment())
        except SennitError as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}", "took_s": time.monotonic() - begun_s}))
            return
        took_s = time.monotonic() - begun_s
    found = {"error": "", "took_s": took_s, "notes": group.notes, "describe": group.describe()}
    found["warnings"] = [str(warning.message) for warning in warned]
    try:
        with group:
            total = group.allreduce(np.full(300_000, rank + 1.0, np.float32))
            assert (total == world * (world + 1) / 2).all()
            if again:
                print("once", flush=True)
                sys.stdin.readline()
                group.allreduce(np.full(300_000, rank + 1.0, np.float32))
    except SennitError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
