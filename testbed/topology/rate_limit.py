# SPDX-License-Identifier: Apache-2.0
"""Token buckets (tc-tbf) on the interfaces of one namespace, and their queues' counters. Called inside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pyroute2 import IPRoute

ETHERNET_HEADER_BYTES: Final = 14
# The tc-tbf attribute that pyroute2 writes has 32 bits for bytes per second.
RATE_MAX_BITS_PER_S: Final = 8 * ((1 << 32) - 1)
RATE_MIN_BITS_PER_S: Final = 8_000
# The bucket holds what arrives in this time, so that a late timer costs no rate, and at least two packets.
BUCKET_US: Final = 200
HANDLE: Final = 0x10000
ROOT: Final = 0xFFFFFFFF


class Direction(StrEnum):
    """Which of the two queues between a host and its switch."""

    SEND = "send"
    """The host's own, for what it sends. A full queue pushes back on its sockets, as a network card's does."""

    RECEIVE = "receive"
    """The switch's, towards the host. A full queue drops, and nobody is told."""


@dataclass(frozen=True, kw_only=True)
class QueueCounters:
    """What a rate-limited queue did since it was made."""

    packets: int
    bytes: int
    dropped: int
    """Dropped for lack of room. A super-packet (GSO) without room counts once, one with room as its packets."""

    backlog_bytes: int
    """In the queue now."""


def set_limit(interface: str, bits_per_s: int | None, queue_bytes: int, mtu: int) -> None:
    """Replaces the limit of an interface; None removes it."""
    with IPRoute() as route:
        index = route.link_lookup(ifname=interface)[0]
        if bits_per_s is None:
            if _find_limit(route, index) is not None:
                route.tc("del", index=index, root=True)
            return
        frame_bytes = mtu + ETHERNET_HEADER_BYTES
        burst_bytes = max(2 * frame_bytes, bits_per_s * BUCKET_US // 8_000_000)
        route.tc("replace", "tbf", index, handle=HANDLE, rate=f"{bits_per_s}bit", burst=burst_bytes, limit=queue_bytes)


def read_queue(interface: str) -> QueueCounters | None:
    """The counters of the interface's limit; None if it has none."""
    with IPRoute() as route:
        found = _find_limit(route, route.link_lookup(ifname=interface)[0])
    if found is None:
        return None
    stats = found.get_attr("TCA_STATS")
    return QueueCounters(
        packets=stats["packets"], bytes=stats["bytes"], dropped=stats["drop"], backlog_bytes=stats["backlog"]
    )


def _find_limit(route: Any, index: int) -> Any:
    return next((qdisc for qdisc in route.get_qdiscs(index=index) if qdisc.get_attr("TCA_KIND") == "tbf"), None)
