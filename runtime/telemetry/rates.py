# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine's ranks: the difference of two readings of their counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from sennit.offload.admission import Verdict
from sennit.transport.aggregator import COUNTER_GROUP
from sennit.transport.counters import Page
from sennit.transport.tracepoints import PathState

SENT: Final = (("flow", "data_bytes_sent"), ("shm", "shm_bytes_sent"))
RECEIVED: Final = (("flow", "data_bytes_received"), ("shm", "shm_bytes_received"))
INGEST: Final = "ingest"
IDS: Final = "ids_"
"""The group of a dynamic table's counters begins with this; then comes the table's name."""
# Counters of an aggregator, by why a packet was refused.
JUNK: Final = ("truncated", "foreign", "wrong_version", "malformed", "unexpected", "corrupt")
OF_ANOTHER_JOB: Final = ("unknown_job", "other_plan", "other_job")
# Datagrams that were not accepted.
REFUSED: Final = tuple(f"ingest_{verdict.name.lower()}" for verdict in Verdict if verdict is not Verdict.ACCEPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRates:
    """One rank, over the time between two readings, or since it began without an earlier one."""

    page: Page
    operations_a_second: float
    operation_us: float
    """Mean time from post to end of operations that ended; 0 if none did."""
    sent_bytes_a_second: float
    received_bytes_a_second: float
    retransmitted_share: float
    """Retransmitted share of the data packets sent over a network."""
    rtt_us: int
    """The largest smoothed round trip of its peers."""
    bad_paths: int
    paths: int
    failed_operations: int


def difference(now: Page, before: Page | None, passed_s: float) -> RankRates:
    """`before` is of the same file, `passed_s` earlier.

    Without it, everything counted so far is spread over `passed_s`.
    """

    def grown(*names: tuple[str, str]) -> int:
        return sum(now.total(*name) - (before.total(*name) if before else 0) for name in names)

    ended = grown(("engine", "operations_completed"))
    packets = grown(("flow", "data_packets_sent"))
    states = [block.values.get("state") for block in now.blocks if block.group == "path"]
    return RankRates(
        page=now,
        operations_a_second=ended / passed_s,
        operation_us=grown(("engine", "operation_time_us")) / ended if ended else 0.0,
        sent_bytes_a_second=grown(*SENT) / passed_s,
        received_bytes_a_second=grown(*RECEIVED) / passed_s,
        retransmitted_share=grown(("flow", "retransmitted_packets")) / packets if packets else 0.0,
        rtt_us=max((block.values.get("rtt_us", 0) for block in now.blocks if block.group == "flow"), default=0),
        bad_paths=sum(state in (PathState.BAD, PathState.PROBING) for state in states),
        paths=len(states),
        failed_operations=now.total("engine", "operations_failed"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestRates:
    """One rank's ingest, over the same time."""

    page: Page
    records_a_second: float
    bytes_a_second: float
    """Payload of the records."""
    batches_a_second: float
    batches_ready: int
    waited_share: float
    """Share of the time in which the trainer waited for a batch."""
    refused_datagrams: int
    """Total so far."""
    asked_again: int
    """Records requested again so far."""
    feeders_connected: int
    feeders_lost: int


def ingest_difference(now: Page, before: Page | None, passed_s: float) -> IngestRates:
    """Like `difference`, for a page with ingest counters."""

    def total(name: str) -> int:
        return now.total(INGEST, f"ingest_{name}")

    def grown(name: str) -> int:
        return total(name) - (before.total(INGEST, f"ingest_{name}") if before else 0)

    return IngestRates(
        page=now,
        records_a_second=grown("records") / passed_s,
        bytes_a_second=grown("body_bytes") / passed_s,
        batches_a_second=grown("batches") / passed_s,
        batches_ready=total("batches_ready"),
        waited_share=grown("waited_us") / 1e6 / passed_s,
        refused_datagrams=sum(now.total(INGEST, name) for name in REFUSED),
        asked_again=total("gaps") + total("silences"),
        feeders_connected=total("feeders_connected"),
        feeders_lost=total("feeders_lost"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class IdRates:
    """The ids of one dynamic table of one rank, over the same time."""

    page: Page
    table: str
    rows: int
    used: int
    hit_share: float | None
    """Share of lookups whose id had a row; None: there was no lookup."""
    admitted_a_second: float
    evicted_a_second: float
    expired_a_second: float
    without_row_a_second: float


def id_differences(now: Page, before: Page | None, passed_s: float) -> list[IdRates]:
    """Like `difference`, for each table of a page with counters of ids."""
    found = []
    then = _of_tables(before) if before else {}
    for group, counts in _of_tables(now).items():
        old = then.get(group, Counter())

        def grown(name: str, counts: Counter[str] = counts, old: Counter[str] = old) -> int:
            return counts[IDS + name] - old[IDS + name]

        lookups = grown("lookups")
        found.append(
            IdRates(
                page=now,
                table=group.removeprefix(IDS),
                rows=counts[f"{IDS}rows"],
                used=counts[f"{IDS}used"],
                hit_share=grown("hits") / lookups if lookups else None,
                admitted_a_second=grown("admitted") / passed_s,
                evicted_a_second=grown("evicted") / passed_s,
                expired_a_second=grown("expired") / passed_s,
                without_row_a_second=grown("without_row") / passed_s,
            )
        )
    return found


def _of_tables(page: Page) -> dict[str, Counter[str]]:
    """The counters of each dynamic table: there may be many, so the page is gone through once."""
    tables: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for block in page.blocks:
        if block.group.startswith(IDS):
            tables[block.group].update(block.values)
    return tables


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregatorRates:
    """An aggregator, over the same time."""

    page: Page
    jobs: int
    leaves_a_second: float
    """Packets with a leaf that was new."""
    sums_a_second: float
    received_bytes_a_second: float
    sent_bytes_a_second: float
    """Payload of UDP."""
    kernel_share: float
    """Share of the packets that XDP programs dealt with."""
    repeated: int
    """Total so far, as are the next five: leaves that came once more."""
    junk: int
    of_another_job: int
    """Packets of a job that is not there, or that other ranks of the job contradict."""
    without_room: int
    """Jobs that asked in vain, each time they asked."""
    dropped: int
    """By the kernel, or because a slot was in use."""
    slots_open: int
    """Blocks of which some leaves are here, and others not."""
    slots: int
    memory_share: float
    """What jobs have of the memory."""


def aggregator_difference(now: Page, before: Page | None, passed_s: float) -> AggregatorRates:
    """Like `difference`, for the page of an aggregator."""

    def total(*names: str) -> int:
        return sum(now.total(COUNTER_GROUP, f"{COUNTER_GROUP}_{name}") for name in names)

    def grown(*names: str) -> int:
        old = sum(before.total(COUNTER_GROUP, f"{COUNTER_GROUP}_{name}") for name in names) if before else 0
        return total(*names) - old

    packets = grown("packets")
    return AggregatorRates(
        page=now,
        jobs=total("jobs"),
        leaves_a_second=grown("stored", "completed") / passed_s,
        sums_a_second=grown("completed") / passed_s,
        received_bytes_a_second=grown("received_bytes") / passed_s,
        sent_bytes_a_second=grown("sent_bytes") / passed_s,
        kernel_share=grown("packets_in_kernel") / packets if packets else 0.0,
        repeated=total("repeated", "repeated_late", "stale"),
        junk=total(*JUNK),
        of_another_job=total(*OF_ANOTHER_JOB),
        without_room=total("no_room"),
        dropped=total("busy", "kernel_drops"),
        slots_open=total("slots_open"),
        slots=total("slots"),
        memory_share=total("job_bytes") / max(total("memory_bytes"), 1),
    )
