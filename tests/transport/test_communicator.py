# SPDX-License-Identifier: Apache-2.0
"""The communicator between processes: all collectives over shared memory and udp, bit for bit, and its failures."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.transport.errors import ArgumentError, ConfigError

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport import _core
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, Congestion, PathPolicy
from sennit.transport.plans.elements import ReduceOp
from tests.extent import briefly
from tests.transport.collective_scenarios import (
    abandoned,
    arithmetic,
    described,
    dropped,
    flooded,
    forked,
    interrupted,
    killed,
    late,
    leaves,
    mismatch,
    movement,
    overlapping,
    point_to_point,
    reductions,
    trees,
)
from tests.transport.processes import Collective, run_ranks

TRANSPORTS = ("shm", "udp")
GROUPS = (("shm", 5), ("udp", 3), ("shm", 1))


@pytest.mark.parametrize(
    ("transport", "world"),
    briefly(product(TRANSPORTS, (1, 2, 3, 4)), [("shm", 1), ("udp", 2), ("shm", 3)]),
)
def test_collectives(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([reductions, movement, point_to_point, overlapping], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize("hosts", briefly(["aab", "abab"], ["aab"]))
def test_neighbours_by_shm_and_strangers_by_udp(hosts: str, tmp_path: Path) -> None:
    scenarios = [reductions, movement, point_to_point, overlapping]
    run_ranks(scenarios, len(hosts), "auto", tmp_path, seed=len(hosts), hosts=hosts)


@pytest.mark.parametrize("hosts", briefly(["aaabb", "aabb"], ["aabb"]))
def test_hosts_fold_or_gather_first(hosts: str, tmp_path: Path) -> None:
    hierarchical = {"SENNIT_ALGORITHM": "hierarchical"}
    run_ranks(
        [reductions, movement, overlapping], len(hosts), "auto", tmp_path, 1, hosts=hosts, variables=[hierarchical]
    )


@pytest.mark.parametrize(
    ("transport", "world"), briefly(product(TRANSPORTS, (1, 2, 3)), [("shm", 1), ("udp", 2), ("shm", 3)])
)
def test_arithmetic(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([arithmetic], world, transport, tmp_path, seed=10 + world)


@pytest.mark.parametrize(
    ("transport", "world"),
    briefly([("shm", 1), ("shm", 2), ("udp", 2), ("shm", 3), ("udp", 4), ("shm", 5)], [("shm", 1), ("shm", 3)]),
)
def test_leaves_sum_to_the_same_bits_in_every_world(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([leaves], world, transport, tmp_path, seed=1)


@pytest.mark.parametrize(
    ("algorithm", "transport", "world"),
    briefly(
        [(algorithm, *group) for algorithm in ("tree", "bruck", "ring") for group in GROUPS],
        [("tree", "shm", 5), ("bruck", "udp", 3), ("ring", "udp", 3), ("ring", "shm", 1)],
    ),
)
def test_calls_pass_data_by_way_of_other_ranks(algorithm: str, transport: str, world: int, tmp_path: Path) -> None:
    chosen = {"SENNIT_ALGORITHM": algorithm}
    run_ranks([reductions, movement, overlapping], world, transport, tmp_path, 1, variables=[chosen])


@pytest.mark.parametrize(("transport", "world"), briefly([("shm", 2), ("udp", 3), ("shm", 5)], [("udp", 3)]))
def test_trees(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([trees], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_an_operation_may_be_dropped_or_interrupted(transport: str, tmp_path: Path) -> None:
    run_ranks([dropped, interrupted, abandoned], 2, transport, tmp_path, seed=1, own_interpreter=True)


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_a_child_of_fork_may_not_use_its_parents_group(transport: str, tmp_path: Path) -> None:
    run_ranks([forked], 2, transport, tmp_path, seed=1, own_interpreter=True)


@pytest.mark.parametrize(
    ("transport", "world", "scenario"),
    briefly(
        product(TRANSPORTS, (2, 3), (mismatch, late, killed)),
        [("shm", 3, mismatch), ("udp", 2, mismatch), ("udp", 3, late), ("shm", 2, killed), ("udp", 3, killed)],
    ),
)
def test_failures(transport: str, world: int, scenario: Collective, tmp_path: Path) -> None:
    run_ranks([scenario], world, transport, tmp_path, seed=1)


def test_names_of_settings_are_those_of_the_core() -> None:
    assert tuple(PathPolicy) == _core.PATH_POLICIES
    assert tuple(Congestion) == _core.CONGESTION_CONTROLS


def test_defaults_of_settings_are_those_of_the_core() -> None:
    config = Config()
    assert {name: getattr(config, name) for name in _core.DEFAULTS} == _core.DEFAULTS


@pytest.mark.parametrize(
    ("path_policy", "congestion"),
    briefly(
        product(PathPolicy, Congestion),
        [
            (PathPolicy.ROUND_ROBIN, Congestion.FIXED),
            (PathPolicy.REPS, Congestion.DCTCP),
            (PathPolicy.ROUND_ROBIN, Congestion.SWIFT),
        ],
    ),
)
def test_every_policy_and_control_gives_the_same_bits(path_policy: str, congestion: str, tmp_path: Path) -> None:
    settings = {"SENNIT_PATH_POLICY": path_policy, "SENNIT_CONGESTION": congestion}
    run_ranks([reductions, movement, described], 2, "udp", tmp_path, seed=5, variables=[settings])


def test_ranks_need_not_agree_on_how_they_send(tmp_path: Path) -> None:
    one = {"SENNIT_PATH_POLICY": "reps", "SENNIT_CONGESTION": "swift", "SENNIT_WINDOW_BYTES": "65536"}
    another = {"SENNIT_PATHS": "3", "SENNIT_WINDOW_BYTES": f"{16 << 20}"}
    run_ranks([reductions, movement, described], 3, "udp", tmp_path, seed=6, variables=[one, another])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"path_policy": "random"}, 'path_policy "random"; allowed: round_robin, reps'),
        ({"congestion": "cubic"}, 'congestion "cubic"; allowed: dctcp, fixed, swift'),
        ({"window_bytes": 65_535}, "a window of 65535 bytes; 65536 to 67108864 are allowed"),
        ({"path_count": 0}, "0 paths over 1 rails"),
    ],
)
def test_the_core_refuses_unknown_settings_when_it_opens_its_sockets(changed: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"path_count": 1, "path_policy": "reps", "congestion": "swift", "window_bytes": 1 << 20}
    core = _core.Communicator(0, 2, timeout_s=1.0, seed=1)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        core.udp_open([("127.0.0.1", "")], **(settings | changed))


@pytest.mark.parametrize("world", briefly([2, 3], [2]))
def test_flood_of_fuzzed_packets(world: int, seed: int, tmp_path: Path) -> None:
    run_ranks([flooded], world, "udp", tmp_path, seed=seed)


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
    with Communicator(rank=0, world=1, config=Config()) as group:
        with pytest.raises(ArgumentError, match="object"):
            group.broadcast(np.array([object()]), 0)
        for factor in (0.5, math.nan, math.inf, 2.0**63):
            with pytest.raises(ArgumentError, match="of PREMUL_SUM of I64; allowed: whole numbers"):
                group.allreduce(np.arange(3), ReduceOp.PREMUL_SUM, scalar=factor)
        with pytest.raises(ArgumentError, match="allowed: uint8"):
            group.allreduce(np.array(["text"]))
        with pytest.raises(ArgumentError, match="allowed: 1 numbers"):
            group.alltoall(np.zeros(3), send_counts=[2])
        with pytest.raises(ArgumentError, match="peer 0; allowed"):
            group.send(np.zeros(3), 0)
