# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Two ranks train and save in the background, and are killed at seeded moments, life after life in one folder.

`forked("tests.runtime.checkpoint_kills", FOLDER, SEED, COUNT)` prints one JSON line for each life. A rank dies just
before an action on the folder (as in checkpoint_crashes.py), or at a moment of training, when the background is
anywhere. The other rank is killed at once. Then the newest checkpoint must be the last one that was reported or a newer
one, and must have the bits of its step. The next life goes on from there.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import reading
from sennit.runtime.checkpoint.manifest import Manifest
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.checkpoint.writing import Saver
from tests.runtime.checkpoint_crashes import die_at_action

WORLD = 2
HELD = (("user/0.0", "genre/0.0"), ("user/1.0", "genre/0.0"))
"""Shards of each rank. Both have those of `genre`."""

ROWS = 300
TICKS = 4
"""Of one step of training."""


class Training:
    """What ranks train: every value is a function of the number of steps."""

    def __init__(self, shards: tuple[str, ...]) -> None:
        self.step = 0
        self.tensors = {"dense.weight": torch.zeros(50)}
        for name in shards:
            self.tensors |= {f"tables.{name}.weight": torch.zeros(ROWS, 8), f"tables.{name}.sum": torch.zeros(ROWS)}
        self._changed: dict[str, set[int]] = {f"tables.{name}": set() for name in shards}

    def train(self) -> None:
        self.step += 1
        self.tensors["dense.weight"].add_(self.step)
        for name, changed in self._changed.items():
            generator = torch.Generator().manual_seed(1000 * self.step + len(name) + int(name[-3]))
            rows = torch.randint(0, ROWS, (6,), generator=generator)
            self.tensors[f"{name}.weight"][rows] += torch.randn(6, 8, generator=generator)
            self.tensors[f"{name}.sum"][rows] += 1
            changed.update(rows.tolist())

    def changes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dense.weight": self.tensors["dense.weight"], "position": {"step": self.step}}
        for name, changed in self._changed.items():
            rows = torch.tensor(sorted(changed), dtype=torch.int64)
            found |= {f"{name}.{kind}": self.tensors[f"{name}.{kind}"][rows] for kind in ("weight", "sum")}
            found[f"{name}.changed_rows"] = rows
            changed.clear()
        return found

    def whole(self) -> dict[str, Any]:
        for changed in self._changed.values():
            changed.clear()
        return self.state()

    def state(self) -> dict[str, Any]:
        return {**self.tensors, "position": {"step": self.step}}

    def restore(self, path: Path, *, alone: bool = False) -> None:
        state = self.state()
        reading.load(path, state, alone=alone)
        self.step = state["position"]["step"]


def live(rank: int, folder: Path, store: Path, reported: int, kill: Mapping[str, Any], log: Path) -> None:
    """One life of a rank: goes on from the newest checkpoint, and saves after every second step."""
    dist.init_process_group("gloo", store=FileStore(str(store), WORLD), rank=rank, world_size=WORLD)
    is_doomed = kill["rank"] == rank
    if is_doomed and kill["kind"] == "action":
        die_at_action(folder, kill["moment"], log)
    training = Training(HELD[rank])
    newest = [str(path) if (path := checkpoint.latest(folder)) else None]
    dist.broadcast_object_list(newest, src=0)
    if newest[0] is not None:
        training.restore(Path(newest[0]))
    saver = Saver(folder, keep=2, increments=3, in_background=True, digests=True, timeout_s=30)
    known: Path | None = None
    for tick in itertools.count(1):
        if rank == 0 and saver.durable != known:
            known = saver.durable
            assert known is not None
            os.write(reported, f"{known.name}\n".encode())
        if is_doomed and kill["kind"] == "tick" and tick == kill["moment"]:
            log.write_text(f"tick {tick}")
            os.kill(os.getpid(), signal.SIGKILL)
        torch.ones(200, 200) @ torch.ones(200, 200)
        if tick % TICKS == 0:
            training.train()
            if training.step % 2 == 0:
                about = Manifest(run_id="0123456789abcdef", step=training.step, fixed={}, free={}, code={})
                saver.save(about, training.whole, changes=training.changes, documents={"more.json": "{}"})


def lives(folder: Path, root: Path, number: int, kill: Mapping[str, Any]) -> list[str]:
    """Lets both ranks live until one dies. Returns the names of the checkpoints that they reported."""
    store, log, told = root / f"{number}.store", root / f"{number}.log", root / f"{number}.reported"
    reported = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                live(rank, folder, store, reported, kill, log)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    os.close(reported)
    first, _ = os.wait()
    # The other rank may see the death, and end, before this process does.
    has_died = log.exists()
    for child in children:
        if child != first:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert has_died, f"rank {children.index(first)} ended by itself"
    return told.read_text().split()


def check(path: Path, expected: Training) -> int:
    """Checks that a checkpoint has the bits of its step. Returns how many increments it has."""
    opened = OpenedCheckpoint(path, alone=True)
    while expected.step < opened.about.step:
        expected.train()
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.tensors.items()}
    state: dict[str, Any] = {**found, "position": {"step": 0}}
    opened.read(state)
    assert state["position"]["step"] == opened.about.step == expected.step
    for name, tensor in expected.tensors.items():
        assert torch.equal(found[name], tensor), name
    assert json.loads((path / "more.json").read_text()) == {}
    return len(opened.about.after)


def main(root: Path, seed: int, count: int) -> None:
    folder = root / "saved"
    folder.mkdir()
    draw = random.Random(seed)
    everything = Training(("user/0.0", "user/1.0", "genre/0.0"))
    last = ""
    for number in range(count):
        rank, kind = draw.randrange(WORLD), draw.choice(("action", "tick"))
        moment = draw.randint(1, 120 if kind == "tick" else (60, 250)[rank == 0])
        kill = {"rank": rank, "kind": kind, "moment": moment}
        reported = lives(folder, root, number, kill)
        last = max([last, *reported])
        unfinished = sorted(entry.name for entry in folder.iterdir() if entry.suffix)
        newest = checkpoint.latest(folder)
        assert (newest.name if newest else "") >= last, (kill, newest, last)
        log = root / f"{number}.log"
        answer = {
            **kill,
            "died_at": log.read_text(),
            "reported": len(reported),
            "unfinished": unfinished,
            "newest": newest.name if newest else "",
            "increments": check(newest, everything) if newest else 0,
            "kept": len(checkpoint.whole(folder)),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
