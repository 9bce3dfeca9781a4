# SPDX-License-Identifier: Apache-2.0
"""Collectives over planes that lose, duplicate, corrupt and reorder: byte-exact, and every corrupt packet counted."""

from __future__ import annotations

import contextlib
import operator
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.testbed.topology import Impairment, Planes
from sennit.testbed.topology.rate_limit import ETHERNET_HEADER_BYTES, RATE_MIN_BITS_PER_S
from sennit.transport.oracle.roce import REFUSALS
from tests.testbed.answering_ranks import DEADLINE_S, WORLD, Ranks, Start

pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf", "nsenter")]

# The ICRC leaves out the fifth byte of the BTH, which switches may write, so a change there is not detected
# (docs/reference/wire.md).
CORRUPT_SKIP_BYTES = 5
# Elements of a collective: enough packets that each plane loses some of 1 %.
LARGEST = 2_000_003


def start_on(planes: Planes) -> Start:
    def start(rank: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, **planes.environment(rank), "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
        return planes.popen(rank, command, env=environment, **options)

    return start


def unread_packets(rank: subprocess.Popen[str]) -> int:
    """Returns how many UDP packets reached the rank's host but no socket: it had no room, or was closed."""
    folder = Path(f"/proc/{rank.pid}/net")
    names, values = (
        line.split()[1:] for line in folder.joinpath("snmp").read_text().splitlines() if line[:4] == "Udp:"
    )
    counts = {f"Udp{name}": int(value) for name, value in zip(names, values, strict=True)}
    counts |= {name: int(value) for name, value in map(str.split, folder.joinpath("snmp6").read_text().splitlines())}
    return sum(counts[f"{family}{name}"] for family in ("Udp", "Udp6") for name in ("InErrors", "NoPorts"))


def test_a_stuck_interface_holds_up_no_other(tmp_path: Path, seed: int) -> None:
    """The interface's queue is full for seconds, as when a network card pauses. It takes nothing from the kernel."""
    with Planes(hosts=WORLD, planes=4) as planes:
        planes.limit_rate(RATE_MIN_BITS_PER_S, queue_bytes=planes.mtu + ETHERNET_HEADER_BYTES, hosts=[0], planes=[1])
        with Ranks(start_on(planes), tmp_path, seed, largest=LARGEST) as ranks:
            counters = ranks.counted()
            print(counters)
            assert counters[0]["send_blocked"] > 0
            assert counters[0]["send_errors"] > 0  # Batches were given up, so that the other planes could continue.
            ranks.end()


@pytest.mark.parametrize("per_packet", [True, False])
def test_collectives_are_exact_and_every_corrupt_packet_is_counted(per_packet: bool, tmp_path: Path, seed: int) -> None:
    wanted = Impairment(
        loss_fraction=0.01,
        duplicate_fraction=0.02,
        corrupt_fraction=0.01,
        corrupt_skip_bytes=CORRUPT_SKIP_BYTES,
        reorder_fraction=0.05,
        reorder_depth=64,
        seed=seed,
    )
    with Planes(hosts=WORLD, planes=4, per_packet=per_packet) as planes, contextlib.ExitStack() as stack:
        planes.impair(wanted)
        ranks = stack.enter_context(Ranks(start_on(planes), tmp_path, seed, largest=LARGEST))

        # From now on packets arrive whole. The barriers make the ranks read everything that has arrived.
        planes.impair(Impairment())
        switches = [[planes.counters(host, plane) for plane in range(4)] for host in range(WORLD)]
        corrupted = [sum(switch.corrupted for switch in switches[1 - rank]) for rank in range(WORLD)]
        refused, missed = [-1] * WORLD, [0] * WORLD
        deadline_s = time.monotonic() + DEADLINE_S
        while any(map(operator.lt, map(operator.add, refused, missed), corrupted)) and time.monotonic() < deadline_s:
            counters = ranks.counted()
            refused = [sum(counter[name] for name in REFUSALS) for counter in counters]
            missed = [unread_packets(process) for process in ranks.processes]  # mostly probes to a socket not open yet
        print(counters, switches, missed)
        for seen, lost, sent in zip(refused, missed, corrupted, strict=True):
            assert sent - lost <= seen <= sent
        flat = [switch for of_host in switches for switch in of_host]
        assert sum(switch.failed for switch in flat) == 0
        assert sum(switch.corrupted for switch in flat) > 0
        assert sum(switch.dropped for switch in flat) > 0
        assert sum(counter["retransmitted_packets"] for counter in counters) > 0
        assert sum(counter["duplicate_packets"] for counter in counters) > 0
        if per_packet:  # Enough packets that every plane has lost, duplicated and held back some.
            assert all(switch.dropped and switch.duplicated and switch.released for switch in flat)
        ranks.end()
