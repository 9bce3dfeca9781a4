# SPDX-License-Identifier: Apache-2.0
"""A rank of `sennit bench group`: makes a group with one backend after the other, and measures it.

`python -m sennit.testbed.bench.transport.group_rank HOST PORT ROUND PEER ..` is a process as torchrun starts it.
It imports torch, and nothing that a backend would import when it makes a group. So this file must not, either.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.torch_versions import PrefixStore, Store, TCPStore

ELEMENTS: Final = 1_024
TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One group on one rank. Times are readings of `time.monotonic`, which all ranks share."""

    peer: str
    begin_s: float
    end_s: float
    read_bytes: int
    """Bytes that the rank read from the store."""

    memory_bytes: int
    """Bytes of private memory that the rank holds more than before, without shared memory."""

    processor_s: float
    """Processor seconds of this rank from begin to end."""

    segments: dict[str, int]
    """Bytes of the segments that the rank has open in /dev/shm, its own and those of others, by inode."""


class CountingStore(Store):
    """A rank's view of a store. Counts what is read."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.read_bytes = 0

    def get(self, key: str, /) -> bytes:
        value: bytes = self._store.get(key)
        self.read_bytes += len(value)
        return value

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        self.read_bytes += len(value)
        return value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self.read_bytes += sum(map(len, values))
        return values


def _pass_on(name: str) -> Any:
    def method(self: CountingStore, *arguments: Any) -> Any:
        return getattr(self._store, name)(*arguments)

    return method


for _name in ("set", "multi_set", "add", "check", "wait", "delete_key", "append", "has_extended_api"):
    setattr(CountingStore, _name, _pass_on(_name))


def take_turns(
    peers: Sequence[str], rank: int, world: int, store: Store, *, first: int, are_counted: bool
) -> list[Turn]:
    """A group with each of the peers. `first`: the number of the first turn, the same on all ranks."""
    torch.set_num_threads(1)
    return [
        _take_turn(peer, rank, world, PrefixStore(f"turn-{number}", store), is_counted=are_counted)
        for number, peer in enumerate(peers, first)
    ]


def _take_turn(peer: str, rank: int, world: int, store: Store, *, is_counted: bool) -> Turn:
    values = torch.full((ELEMENTS,), float(rank))
    counting = CountingStore(store)
    before_bytes = _anonymous_bytes()
    _meet(store, "begin", world)
    begin_s, begin_processor_s = time.monotonic(), time.process_time()
    dist.init_process_group(
        peer,
        store=counting if is_counted else store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dist.all_reduce(values)
    end_s, processor_s = time.monotonic(), time.process_time() - begin_processor_s
    memory_bytes = _anonymous_bytes() - before_bytes
    segments = _segments()
    if not bool((values == sum(range(world))).all()):
        raise RuntimeError(f"{peer}: wrong sum")
    _meet(store, "end", world)
    dist.destroy_process_group()
    return Turn(
        peer=peer,
        begin_s=begin_s,
        end_s=end_s,
        read_bytes=counting.read_bytes,
        memory_bytes=memory_bytes,
        processor_s=processor_s,
        segments=segments,
    )


def _meet(store: Store, name: str, world: int) -> None:
    if store.add(name, 1) == world:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def _segments() -> dict[str, int]:
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(link).startswith("/dev/shm/"):
                found = link.stat()
                sizes[str(found.st_ino)] = found.st_blocks * 512
    return sizes


def result_key(round_number: int, rank: int) -> str:
    """Where a rank of its own process leaves its turns."""
    return f"round-{round_number}/rank-{rank}"


def main(host: str, port: str, round_number: str, *peers: str) -> None:
    """The rank and the world are in the environment, as torchrun gives them.

    Round 0 has further groups that are counted, whose turns come first in what it leaves.
    """
    rank, world, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(round_number)
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    turns = take_turns(peers, rank, world, store, first=(number + 1) * len(peers), are_counted=False)
    if number == 0:
        turns = [*take_turns(peers, rank, world, store, first=0, are_counted=True), *turns]
    store.set(result_key(number, rank), json.dumps([asdict(turn) for turn in turns]))


if __name__ == "__main__":
    main(*sys.argv[1:])
