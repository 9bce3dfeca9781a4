# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes of interfaces and CPUs, in a made-up sysfs tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from sennit.transport.config import Config, TransportKind
from sennit.transport.meeting import numa
from sennit.transport.meeting.rails import Rail
from tests.transport.meeting import Recorder, meet


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two processors with eth0 and eth1, a node of memory alone, and interfaces without a node."""
    for node, cpulist in enumerate(("0-3,8\n", "4-7,9-11\n", "\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist)
    for name, text in (("eth0", "0\n"), ("eth1", "1\n"), ("old0", "-1\n")):
        folder = tmp_path / "class/net" / name / "device"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    (tmp_path / "class/net/bond0").mkdir()
    monkeypatch.setattr(numa, "SYS", tmp_path)
    return tmp_path


def test_the_nodes_are_those_of_the_tree(machine: Path) -> None:
    nodes = {name: numa.node_of_interface(name, machine) for name in ("eth0", "eth1", "old0", "bond0", "absent")}
    assert nodes == {"eth0": 0, "eth1": 1, "old0": None, "bond0": None, "absent": None}
    assert numa.nodes_of_cpus({8}, machine) == {0}
    assert numa.nodes_of_cpus({3, 4}, machine) == {0, 1}
    assert numa.nodes_of_cpus({99}, machine) == set()
    assert numa.nodes_of_cpus({0}, machine / "absent") == set()


@pytest.mark.usefixtures("machine")
def test_only_a_process_that_is_far_from_all_its_interfaces_is_told() -> None:
    assert numa.describe_distance("rank 3", ["eth0"], cpus={4, 5}) == (
        "rank 3 runs on NUMA node 1, far from its network interfaces (eth0: node 0): what it sends and receives "
        "crosses between processors. Bind it to node 0 (numactl --cpunodebind=0 --membind=0), or name an interface of "
        "its own node in SENNIT_INTERFACES"
    )
    assert numa.describe_distance("rank 3", ["eth0"], cpus={3, 4}) == ""  # it may run near eth0
    assert numa.describe_distance("rank 3", ["eth0", "eth1"], cpus={4}) == ""
    assert numa.describe_distance("rank 3", ["eth0", "bond0"], cpus={4}) == ""
    assert numa.describe_distance("rank 3", [], cpus={4}) == ""


@pytest.mark.usefixtures("machine")
def test_a_group_notes_it() -> None:
    rails = [[Rail(interface="eth0", address="10.0.0.0")], [Rail(interface="eth1", address="10.0.0.1")]]
    notes: dict[int, tuple[str, ...]] = {}
    meet(
        [Recorder(0, "a"), Recorder(1, "b")],
        [Config(transport=TransportKind.UDP)] * 2,
        rails=rails,
        notes=notes,
        cores=[{4, 5}] * 2,
    )
    first, second = ([note for note in notes[rank] if "NUMA" in note] for rank in (0, 1))
    assert len(first) == 1
    assert first[0].startswith("rank 0 runs on NUMA node 1, far from its network interfaces (eth0: node 0)")
    assert not second


def test_nodes_that_cannot_be_read_are_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0/cpulist").mkdir(parents=True)
    assert numa.nodes_of_cpus({0}, tmp_path) == set()
