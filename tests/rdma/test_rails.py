# SPDX-License-Identifier: Apache-2.0
"""Ranks over two RDMA devices each: both devices carry data, and if one link goes down the other continues."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from sennit.testbed.vm import links
from sennit.testbed.vm.guest_command import execute
from tests.ranks import command
from tests.rdma.steady_sums import sum_until_told, until

pytestmark = pytest.mark.rdma

DEADLINE_S = 120.0
COMMAND_TIMEOUT_S = 30.0
SYSFS = Path("/sys/class/infiniband")
# The second link, which the VM starts without. The first link has devices 0 and 1.
NEAR: Final = 2
FAR: Final = 3
FIRST_PREFERENCE: Final = 500
FIRST_TABLE: Final = 5_000


def has_gid(number: int) -> bool:
    gids = (SYSFS / f"rxe{number}/ports/1/gids").iterdir()
    return any(gid.read_text().strip() == links.gid(number, 6) for gid in gids)


@pytest.fixture
def second_link() -> Iterator[None]:
    """The devices rxe2 and rxe3, joined in the same way as rxe0 and rxe1 (testbed/vm/links.py)."""
    near, far = links.netdev(NEAR), links.netdev(FAR)
    ends = [f"mtu {links.MTU_DEFAULT} address {links.mac_address(number)}" for number in (NEAR, FAR)]
    try:
        execute(f"ip link add {near} {ends[0]} type veth peer name {far} {ends[1]}")
        for number in (NEAR, FAR):
            name, peer, table = links.netdev(number), links.address(number ^ 1, 6), FIRST_TABLE + number
            Path(f"/proc/sys/net/ipv6/conf/{name}/keep_addr_on_down").write_text("1")
            execute(f"ip addr add {links.address(number, 6)}/64 dev {name} nodad")
            execute(f"ip link set {name} up")
            execute(f"ip -6 rule add pref {FIRST_PREFERENCE + number} iif lo to {peer} lookup {table}")
        set_routes()
        for number in (NEAR, FAR):
            execute(f"rdma link add rxe{number} type rxe netdev {links.netdev(number)}")
            until(lambda number=number: has_gid(number), "the address in the GID table")  # type: ignore[misc]
        yield
    finally:
        # Some of these may not exist.
        for command in (
            *(f"rdma link delete rxe{number}" for number in (NEAR, FAR)),
            *(f"ip -6 rule del pref {FIRST_PREFERENCE + number}" for number in (NEAR, FAR)),
            f"ip link delete {near}",
        ):
            execute(command, check=False)


def set_routes() -> None:
    """Sets routes and neighbours, which vanish when the link goes down and do not come back with it."""
    for number in (NEAR, FAR):
        name, peer, table = links.netdev(number), links.address(number ^ 1, 6), FIRST_TABLE + number
        execute(f"ip -6 neigh replace {peer} lladdr {links.mac_address(number ^ 1)} dev {name} nud permanent")
        execute(f"ip -6 route replace {peer} dev {name} src {links.address(number, 6)} table {table}")


def sent_packets(number: int) -> int:
    return int((SYSFS / f"rxe{number}/ports/1/hw_counters/sent_pkts").read_text())


def is_active(number: int) -> bool:
    return (SYSFS / f"rxe{number}/ports/1/state").read_text().split()[-1] == "ACTIVE"


class Ranks:
    """Two ranks that sum until they are stopped: rank 0 on rxe0 and rxe2, rank 1 on rxe1 and rxe3."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = [
            subprocess.Popen(
                command(partial(sum_until_told, rank, 2, folder, 1)),
                env={
                    **os.environ,
                    "SENNIT_TRANSPORT": "verbs",
                    "SENNIT_INTERFACES": f"{links.netdev(rank)},{links.netdev(NEAR + rank)}",
                    "SENNIT_HOST_ID": f"host{rank}",
                    "SENNIT_TIMEOUT_S": "60",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]

    def rounds(self) -> int:
        path = self._folder / "rounds0"
        return int(path.read_text() or 0) if path.exists() else 0

    def go_on(self, what: str, rounds: int = 3) -> None:
        wanted = self.rounds() + rounds
        until(lambda: self.rounds() >= wanted or any(one.poll() is not None for one in self._processes), what)
        assert all(one.poll() is None for one in self._processes), self.end()

    def end(self) -> list[dict[str, int]]:
        """Ends the ranks and returns their counters."""
        (self._folder / "stop").touch()
        outputs = [one.communicate(timeout=DEADLINE_S)[0] for one in self._processes]
        assert [one.returncode for one in self._processes] == [0, 0], "\n".join(outputs)
        return [{name: int(value) for name, value in map(str.split, output.splitlines())} for output in outputs]

    def kill(self) -> None:
        for one in self._processes:
            one.kill()
            one.wait()


@pytest.mark.usefixtures("second_link")
def test_of_two_devices_one_whose_link_goes_down_takes_only_its_paths_along(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        ranks.go_on("the first rounds")
        assert min(sent_packets(number) for number in range(4)) > 50
        execute(f"ip link set {links.netdev(NEAR)} down")
        until(lambda: not is_active(NEAR) and not is_active(FAR), "both ports to be down")
        before = sent_packets(0), sent_packets(1)
        ranks.go_on("rounds over one link", 10)
        assert min(sent_packets(0) - before[0], sent_packets(1) - before[1]) > 500
        execute(f"ip link set {links.netdev(NEAR)} up")
        set_routes()
        until(lambda: is_active(NEAR) and is_active(FAR), "both ports to be up")
        again = sent_packets(NEAR)
        until(lambda: sent_packets(NEAR) > again + 500, "data over the second link again")
        for counters in ranks.end():
            assert counters["port_events"] >= 2, counters
    finally:
        ranks.kill()
