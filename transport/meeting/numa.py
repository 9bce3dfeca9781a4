# SPDX-License-Identifier: Apache-2.0
"""Tells whether a process runs on the NUMA nodes of its network interfaces. Linux: sysfs.

The order of rails does not depend on it: two ranks pair their rails in order where subnets do not decide, and an order
of its own for each rank would join rails of different networks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

SYS = Path("/sys")


def node_of_interface(name: str, sys: Path) -> int | None:
    """Returns the NUMA node of the interface's device. None for a virtual one, and where the firmware names no node."""
    try:
        node = int((sys / "class/net" / name / "device/numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def nodes_of_cpus(cpus: Collection[int], sys: Path) -> set[int]:
    """Returns the NUMA nodes that have any of the CPUs. Empty where the kernel knows no nodes, or does not say."""
    try:
        lists = {
            folder.name: (folder / "cpulist").read_text(encoding="utf-8")
            for folder in sys.glob("devices/system/node/node[0-9]*")
        }
    except OSError:
        return set()
    nodes = set()
    for name, cpu_list in lists.items():
        # As in "0-3,8,10-11". A node with memory alone has an empty list.
        for part in cpu_list.strip().split(","):
            first, _, last = part.partition("-")
            if first and not set(range(int(first), int(last or first) + 1)).isdisjoint(cpus):
                nodes.add(int(name.removeprefix("node")))
    return nodes


def describe_distance(who: str, interfaces: Iterable[str], *, cpus: Collection[int] | None = None) -> str:
    """Returns a note if every interface is on another node than the CPUs (default: those that this thread may use).

    Empty if one of them is near, or if the node of any is unknown.
    """
    own = nodes_of_cpus(os.sched_getaffinity(0) if cpus is None else cpus, SYS)
    nodes = {name: node_of_interface(name, SYS) for name in interfaces}
    theirs = {node for node in nodes.values() if node is not None}
    if not own or not nodes or None in nodes.values() or own & theirs:
        return ""
    where = ", ".join(f"{name}: node {node}" for name, node in nodes.items())
    near = min(theirs)
    return (
        f"{who} runs on NUMA node {', '.join(map(str, sorted(own)))}, far from its network interfaces ({where}): what "
        f"it sends and receives crosses between processors. Bind it to node {near} (numactl --cpunodebind={near} "
        f"--membind={near}), or name an interface of its own node in SENNIT_INTERFACES"
    )
