# SPDX-License-Identifier: Apache-2.0
"""A cable between a RoCE device here and a namespace without RDMA, where a socket can use RoCE's port."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.testbed.vm.guest_command import TIMEOUT_S, execute

NEAR: Final = "mixed"
NEAR_DEVICE: Final = "rxemixed"
NEAR_ADDRESS: Final = "fd5e:77:ff::1"
# The interface and the namespace.
FAR: Final = "mixedfar"
FAR_ADDRESS: Final = "fd5e:77:ff::2"


def is_served() -> bool:
    """Returns whether the device has the address."""
    gids = Path(f"/sys/class/infiniband/{NEAR_DEVICE}/ports/1/gids")
    wanted = ipaddress.IPv6Address(NEAR_ADDRESS).exploded
    return any(gid.read_text().strip() == wanted for gid in gids.iterdir())


def received_packets() -> int:
    """Returns the device's counter of packets with correct headers and ICRC."""
    return int(Path(f"/sys/class/infiniband/{NEAR_DEVICE}/ports/1/hw_counters/rcvd_pkts").read_text())


@contextlib.contextmanager
def link() -> Iterator[None]:
    execute(f"ip netns add {FAR}")
    try:
        execute(f"ip link add {NEAR} mtu 4200 type veth peer name {FAR} mtu 4200 netns {FAR}")
        Path(f"/proc/sys/net/ipv6/conf/{NEAR}/keep_addr_on_down").write_text("1")
        execute(f"ip addr add {NEAR_ADDRESS}/64 dev {NEAR} nodad")
        execute(f"ip -n {FAR} addr add {FAR_ADDRESS}/64 dev {FAR} nodad")
        execute(f"ip -n {FAR} link set {FAR} up")
        execute(f"ip link set {NEAR} up")
        execute(f"rdma link add {NEAR_DEVICE} type rxe netdev {NEAR}")
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_served():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{NEAR_DEVICE} has not had {NEAR_ADDRESS} for {TIMEOUT_S:g} s")
            time.sleep(0.001)
        yield
    finally:
        # Some of these may not exist.
        for command in (f"rdma link delete {NEAR_DEVICE}", f"ip netns delete {FAR}", f"ip link delete {NEAR}"):
            execute(command, check=False)
