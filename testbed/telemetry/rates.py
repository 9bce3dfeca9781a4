# SPDX-License-Identifier: Apache-2.0
"""What the ranks of this machine do now: the difference of two looks at their counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sennit.transport.counters import Page
from sennit.transport.tracepoints import PathState

SENT: Final = (("flow", "data_bytes_sent"), ("shm", "shm_bytes_sent"))
RECEIVED: Final = (("flow", "data_bytes_received"), ("shm", "shm_bytes_received"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRates:
    """One rank, over the time between two looks; since it began where there was no earlier one."""

    page: Page
    operations_a_second: float
    operation_us: float
    """Mean time from post to end of those that ended; 0 where none did."""
    sent_bytes_a_second: float
    received_bytes_a_second: float
    retransmitted_share: float
    """Of the data packets sent over a network."""
    rtt_us: int
    """The largest of its peers'."""
    bad_paths: int
    paths: int
    failed_operations: int


def difference(now: Page, before: Page | None, passed_s: float) -> RankRates:
    """`before` is of the same file, `passed_s` earlier; without it, everything counted so far is over `passed_s`."""

    def grown(*names: tuple[str, str]) -> int:
        return sum(now.total(*name) - (before.total(*name) if before else 0) for name in names)

    ended = grown(("engine", "operations_completed"))
    packets = grown(("flow", "data_packets_sent"))
    states = [block.values["state"] for block in now.blocks if block.group == "path"]
    return RankRates(
        page=now,
        operations_a_second=ended / passed_s,
        operation_us=grown(("engine", "operation_time_us")) / ended if ended else 0.0,
        sent_bytes_a_second=grown(*SENT) / passed_s,
        received_bytes_a_second=grown(*RECEIVED) / passed_s,
        retransmitted_share=grown(("flow", "retransmitted_packets")) / packets if packets else 0.0,
        rtt_us=max((block.values["rtt_us"] for block in now.blocks if block.group == "flow"), default=0),
        bad_paths=sum(state in (PathState.BAD, PathState.PROBING) for state in states),
        paths=len(states),
        failed_operations=now.total("engine", "operations_failed"),
    )
