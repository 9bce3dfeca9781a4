# SPDX-License-Identifier: Apache-2.0
"""Saves a checkpoint over and over in child processes, and kills each child at another point of the save.

`forked("tests.runtime.checkpoint_crashes", FOLDER, STEP, KEEP)` prints one JSON line for each point: the action that
did not happen, the newest whole checkpoint afterwards, the value of its weights, and the result of a later save by a
process that lives.
A point is an event of Python's audit hooks on a path below the folder (open, rename, mkdir, remove, rmdir), or an
fsync.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import reading, writing
from sennit.runtime.checkpoint.manifest import Manifest

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
RUN_ID = "0123456789abcdef"
OLD, NEW, LATER = 1.0, 2.0, 3.0


def save(folder: Path, step: int, value: float, keep: int | None) -> None:
    about = Manifest(run_id=RUN_ID, step=step, fixed={}, free={}, code={})
    writing.save(folder, about, {"weights": torch.full((1000,), value)}, documents={"more.json": "{}"}, keep=keep)


def value_in(path: Path) -> float:
    """Reads a checkpoint that must be whole: one value in all weights, a manifest and the other document."""
    state = {"weights": torch.zeros(1000)}
    reading.load(path, state, alone=True)
    assert Manifest.read(path).run_id == RUN_ID
    assert json.loads((path / "more.json").read_text()) == {}
    assert len(set(state["weights"].tolist())) == 1
    return float(state["weights"][0])


def in_child(function: Callable[[], None]) -> bool:
    """Runs `function` in a process with its own process group. Returns whether it ended normally."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        return status == 0
    try:
        with tempfile.NamedTemporaryFile() as store:
            dist.init_process_group("gloo", store=FileStore(store.name, 1), rank=0, world_size=1)
            function()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def die_at_action(folder: Path, point: int, log: Path) -> None:
    """Makes this process die just before its action number `point` on the folder, and writes to `log` which one."""
    count, root = 0, str(folder)
    fsync = os.fsync

    def about_to(what: str) -> None:
        nonlocal count
        count += 1
        if count == point:
            log.write_text(what)
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        path = str(arguments[0])
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
            # The path is relative to a folder's descriptor.
            path = f"{os.readlink(f'/proc/self/fd/{arguments[1]}')}/{path}"
        if path.startswith(root):
            about_to(f"{event} {path[len(root) :]}")

    def sync(descriptor: int) -> None:
        about_to(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')[len(root) :]}")
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = sync  # type: ignore[assignment]


def main(root: Path, step: int, keep: int | None) -> None:
    start = root / "start"

    def save_two() -> None:
        for number in (6, 7):
            save(start, number, OLD, None)

    assert in_child(save_two)
    point = 0
    while True:
        point += 1
        folder, log = root / f"{point}", root / f"{point}.log"
        shutil.copytree(start, folder)

        def save_and_die(folder: Path = folder, log: Path = log, point: int = point) -> None:
            die_at_action(folder, point, log)
            save(folder, step, NEW, keep)

        is_done = in_child(save_and_die)
        newest = checkpoint.latest(folder)
        assert newest is not None
        answer: dict[str, Any] = {
            "died_at": None if is_done else log.read_text(),
            "newest": newest.name,
            "value": value_in(newest),
            "whole": len(checkpoint.whole(folder)),
        }
        assert in_child(lambda folder=folder: save(folder, step, LATER, keep))  # type: ignore[misc]
        after = checkpoint.whole(folder)
        assert value_in(after[0]) == LATER
        answer["after"] = sorted(entry.name for entry in folder.iterdir())
        print(json.dumps(answer), flush=True)
        if is_done:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None)
