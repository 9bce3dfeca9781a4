# SPDX-License-Identifier: Apache-2.0
"""The communicator between processes: all collectives over shared memory and udp, bit for bit, and its failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sennit.transport.errors import ArgumentError, ConfigError, Unsupported

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport.communicator import Communicator
from sennit.transport.config import Config

WORKER = Path(__file__).with_name("communicator_worker.py")
DEADLINE_S = 90.0


def run_ranks(
    scenario: str, world: int, transport: str, folder: Path, seed: int, timeout_s: float = 60.0, hosts: str = ""
) -> None:
    """Runs one process a rank; fails with what the failing ranks wrote. Leaves no process behind.

    `hosts`: a letter for each rank, its pretended host; by default they share one.
    """
    hosts = hosts or "a" * world
    environment = {
        **os.environ,
        "HOSTS": ",".join(hosts),
        "SENNIT_TRANSPORT": transport,
        "SENNIT_INTERFACES": "lo",
        "SENNIT_TIMEOUT_S": f"{timeout_s}",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(world):
        command = [sys.executable, str(WORKER), scenario, f"{rank}", f"{world}", str(folder / "store"), f"{seed}"]
        with (folder / f"rank{rank}").open("wb") as log:
            mine = environment | {"SENNIT_HOST_ID": hosts[rank]}
            ranks.append(subprocess.Popen(command, env=mine, stderr=log))
    deadline_s = time.monotonic() + DEADLINE_S
    codes: list[int | None] = []
    try:
        for process in ranks:
            try:
                codes.append(process.wait(max(deadline_s - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    texts = [
        f"rank {rank} ({'hangs' if code is None else f'exit {code}'}):\n{(folder / f'rank{rank}').read_text()[-3000:]}"
        for rank, code in enumerate(codes)
        if code != 0
    ]
    assert not texts, "\n".join(texts)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_collectives(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks("reductions,movement,point_to_point,overlapping", world, transport, tmp_path, seed=world)


@pytest.mark.parametrize("hosts", ["aab", "abab"])
def test_neighbours_by_shm_and_strangers_by_udp(hosts: str, tmp_path: Path) -> None:
    scenarios = "reductions,movement,point_to_point,overlapping"
    run_ranks(scenarios, len(hosts), "auto", tmp_path, seed=len(hosts), hosts=hosts)


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_arithmetic(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks("arithmetic", world, transport, tmp_path, seed=10 + world)


@pytest.mark.parametrize("scenario", ["mismatch", "late", "killed"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_failures(transport: str, world: int, scenario: str, tmp_path: Path) -> None:
    # A dead udp peer is noticed at the deadline at the latest.
    run_ranks(scenario, world, transport, tmp_path, seed=1, timeout_s=5.0)


@pytest.mark.parametrize("world", [2, 3])
def test_flood_of_fuzzed_packets(world: int, seed: int, tmp_path: Path) -> None:
    run_ranks("flooded", world, "udp", tmp_path, seed=seed)


def test_one_rank_needs_no_store_and_no_ports() -> None:
    with Communicator(rank=0, world=1, config=Config()) as group:
        assert group.routes == ("self",)
        array = np.arange(6, dtype=np.float32)
        np.testing.assert_array_equal(group.allreduce(array), array)
        np.testing.assert_array_equal(group.alltoall(array), array)
        group.barrier()


def test_bad_arguments_raise_before_anything_is_sent() -> None:
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        Communicator(rank=2, world=2)
    with pytest.raises(ConfigError, match="without a store"):
        Communicator(rank=0, world=2, config=Config())
    with pytest.raises(Unsupported, match="verbs"):
        Communicator(rank=0, world=1, config=Config(transport="verbs"))  # type: ignore[arg-type]
    with Communicator(rank=0, world=1, config=Config()) as group:
        with pytest.raises(ArgumentError, match="object"):
            group.broadcast(np.array([object()]), 0)
        with pytest.raises(ArgumentError, match="allowed: uint8"):
            group.allreduce(np.array(["text"]))
        with pytest.raises(ArgumentError, match="allowed: 1 numbers"):
            group.alltoall(np.zeros(3), send_counts=[2])
        with pytest.raises(ArgumentError, match="peer 0; allowed"):
            group.send(np.zeros(3), 0)
