# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the relay: the interfaces that it reads from, its process, and its table."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Final

from pyroute2 import IPRoute

from sennit.testbed.topology import namespace
from sennit.testbed.topology.cable import await_links
from sennit.testbed.topology.relay_table import READY, RelayCounters, RelayTable, make_table

# Packets to be delayed enter here; the relay reads them at the other end.
INLET_IFINDEX: Final = 900
_INLET, _OUTLET = "delay0", "delay1"
DELAY_MAX_US: Final = 10_000_000
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0


class Delay:
    """A running relay in the namespace `switch_name`."""

    def __init__(self, switch_name: str, mtu: int) -> None:
        namespace.within(switch_name, _add_interfaces, mtu)
        descriptor = make_table()
        try:
            self._table = RelayTable(descriptor)
            command = ["nsenter", f"--net={namespace.path_of(switch_name)}", "--", sys.executable]
            command += ["-m", "sennit.testbed.topology.relay", _OUTLET, f"{descriptor}"]
            self._process = subprocess.Popen(
                command, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        finally:
            os.close(descriptor)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        if not ready or self._process.stdout.readline().strip() != READY:
            self.close()
            raise RuntimeError(f"the relay ended with {self._process.returncode}, or was not ready in time")

    def set_delay_us(self, host: int, plane: int, delay_us: int) -> None:
        self._table.set_delay_us(host, plane, delay_us)

    def counters(self) -> RelayCounters:
        if self._process.poll() is not None:
            raise RuntimeError(f"the relay has ended with {self._process.returncode}")
        return self._table.counters()

    def close(self) -> None:
        """Ends the relay. Packets that it still delays are lost."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _add_interfaces(mtu: int) -> None:
    with IPRoute() as route:
        route.link(
            "add", ifname=_INLET, index=INLET_IFINDEX, kind="veth", mtu=mtu, peer={"ifname": _OUTLET, "mtu": mtu}
        )
        for name in (_INLET, _OUTLET):
            route.link("set", index=route.link_lookup(ifname=name)[0], state="up")
    await_links()
