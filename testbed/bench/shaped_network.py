# SPDX-License-Identifier: Apache-2.0
"""Hosts for benchmarks: network namespaces of this machine, with links that are as slow as asked. Needs root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from sennit.testbed.topology import Planes
from sennit.testbed.topology.switch import Impairer

# Of a host's own queue at a limited link, which holds its sockets back.
QUEUE_BYTES: Final = 1 << 20


@contextlib.contextmanager
def hosts_of(
    count: int, *, round_trip_us: int = 0, rate_mbit: int | None = None
) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """For each host its namespace (`testbed.topology.namespace.enter`), and what its ranks need in the environment.

    `round_trip_us`: what the network adds to a round trip. `rate_mbit`: of each host's link, in each direction. One
    host: this machine as it is, an empty list.
    """
    if count == 1:
        yield []
        return
    with Planes(hosts=count, planes=1, mtu=9000, impairer=Impairer.AUTO) as planes:
        if round_trip_us:
            planes.delay(round_trip_us // 2)
        if rate_mbit is not None:
            planes.limit_rate(rate_mbit * 10**6, queue_bytes=QUEUE_BYTES)
        yield [
            # Ranks of a host share memory.
            (planes.netns_name(host), {**planes.environment(host), "SENNIT_TRANSPORT": "auto"})
            for host in range(count)
        ]
