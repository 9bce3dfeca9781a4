# SPDX-License-Identifier: Apache-2.0
"""`sennit top`: the ranks of this machine as they run."""

from __future__ import annotations

import os
import pwd
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from rich.table import Table
from rich.text import Text

from sennit.command_line import red
from sennit.runtime.telemetry.rates import (
    IDS,
    INGEST,
    AggregatorRates,
    IdRates,
    IngestRates,
    RankRates,
    aggregator_difference,
    difference,
    id_differences,
    ingest_difference,
)
from sennit.transport import counters
from sennit.transport.aggregator import COUNTER_GROUP
from sennit.transport.tracepoints import state_name

UNITS: Final = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
FOREIGN_MAX_ROWS: Final = 250
"""The most rows of a table that pages of all other users together may take, in equal shares. A row takes a
millisecond."""

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen in one interval."""

    ranks: list[RankRates]
    ingests: list[IngestRates]
    ids: list[IdRates]
    aggregators: list[AggregatorRates]
    left_out: dict[int, int] = field(default_factory=dict)
    """`counters.Look.left_out`"""


def looks(interval_s: float, folder: Path = counters.FOLDER) -> Iterator[Look]:
    """Yields everything since each rank began, then each interval; never ends."""
    before: dict[Path, counters.Page] = {}
    last_s = 0.0
    while True:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        seen = counters.look(folder)
        pages = sorted(seen.pages, key=lambda page: (page.owner != os.geteuid(), page.process, page.rank))
        look = Look([], [], [], [], seen.left_out)
        for page in pages:
            passed_s = _passed_s(page, page.file in before, now_s, last_s)
            if any(block.group == INGEST for block in page.blocks):
                look.ingests.append(ingest_difference(page, before.get(page.file), passed_s))
            elif any(block.group.startswith(IDS) for block in page.blocks):
                look.ids.extend(id_differences(page, before.get(page.file), passed_s))
            elif any(block.group == COUNTER_GROUP for block in page.blocks):
                look.aggregators.append(aggregator_difference(page, before.get(page.file), passed_s))
            elif page.blocks:  # A page that has nothing yet may become one of those above.
                look.ranks.append(difference(page, before.get(page.file), passed_s))
        yield look
        before, last_s = {page.file: page for page in pages}, now_s
        time.sleep(interval_s)


def _passed_s(page: counters.Page, is_known: bool, now_s: float, last_s: float) -> float:
    return max(now_s - (last_s if is_known else page.began_ns / 1e9), 1e-6)


def ranks_table(ranks: list[RankRates]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("process", "rank", "", "op/s", "mean µs", "sent", "received", "sent twice", "rtt µs", "paths", "failed")
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for rank in _limited(table, ranks, lambda one: one.page):
        page = rank.page
        paths = f"{rank.paths - rank.bad_paths}/{rank.paths}" if rank.paths else ""
        table.add_row(
            *_of_rank(page),
            f"{rank.operations_a_second:,.0f}",
            f"{rank.operation_us:,.0f}",
            _rate(rank.sent_bytes_a_second),
            _rate(rank.received_bytes_a_second),
            f"{rank.retransmitted_share:.2%}" if rank.paths else "",
            f"{rank.rtt_us:,}" if rank.paths else "",
            red(paths) if rank.bad_paths else paths,
            red(f"{rank.failed_operations:,}") if rank.failed_operations else "0",
        )
    return table


def ingests_table(ingests: list[IngestRates]) -> Table:
    """Ranks whose batches come from feeders."""
    table = Table(box=None, pad_edge=False)
    columns = ("process", "rank", "", "records/s", "received", "batches/s", "ready", "waited", "refused", "asked again")
    for name in (*columns, "feeders", "lost"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for ingest in _limited(table, ingests, lambda one: one.page):
        page = ingest.page
        table.add_row(
            *_of_rank(page),
            f"{ingest.records_a_second:,.0f}",
            _rate(ingest.bytes_a_second),
            f"{ingest.batches_a_second:,.1f}",
            f"{ingest.batches_ready}",
            f"{ingest.waited_share:.1%}",
            f"{ingest.refused_datagrams:,}",
            f"{ingest.asked_again:,}",
            f"{ingest.feeders_connected}" if ingest.feeders_connected else red("0"),
            red(f"{ingest.feeders_lost}") if ingest.feeders_lost else "0",
        )
    return table


def ids_table(ids: list[IdRates]) -> Table:
    """Dynamic tables of ranks."""
    table = Table(box=None, pad_edge=False)
    columns = (
        "process",
        "rank",
        "",
        "table",
        "rows",
        "load",
        "hits",
        "admitted/s",
        "evicted/s",
        "expired/s",
        "no row/s",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "table") else "right", no_wrap=True)
    for one in _limited(table, ids, lambda one: one.page):
        page = one.page
        table.add_row(
            *_of_rank(page),
            one.table,
            f"{one.rows:,}",
            f"{one.used / one.rows:.1%}" if one.rows else "",
            "" if one.hit_share is None else f"{one.hit_share:.1%}",
            f"{one.admitted_a_second:,.0f}",
            f"{one.evicted_a_second:,.0f}",
            f"{one.expired_a_second:,.0f}",
            f"{one.without_row_a_second:,.0f}",
        )
    return table


def aggregators_table(aggregators: list[AggregatorRates]) -> Table:
    """Aggregators of this machine."""
    table = Table(box=None, pad_edge=False)
    columns = ("process", "", "jobs", "leaves/s", "sums/s", "received", "sent", "XDP", "repeated", "junk")
    for name in (*columns, "other job", "no room", "lost", "slots", "memory"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in _limited(table, aggregators, lambda one: one.page):
        page = one.page
        refused = (one.repeated, one.junk, one.of_another_job, one.without_room, one.dropped)
        table.add_row(
            f"{page.process}",
            _standing(page),
            f"{one.jobs}",
            f"{one.leaves_a_second:,.0f}",
            f"{one.sums_a_second:,.0f}",
            _rate(one.received_bytes_a_second),
            _rate(one.sent_bytes_a_second),
            f"{one.kernel_share:.0%}",
            *(f"{number:,}" for number in refused),
            f"{one.slots_open:,}/{one.slots:,}",
            f"{one.memory_share:.1%}",
        )
    return table


def paths_table(ranks: list[RankRates]) -> Table:
    """Every path of every rank, since it began."""
    table = Table(box=None, pad_edge=False)
    for name in ("process", "rank", "peer", "path", "state", "rtt µs", "packets", "sent again", "lost", "marked"):
        table.add_column(name, justify="right", no_wrap=True)
    paths = [(rank.page, block) for rank in ranks for block in rank.page.blocks if block.group == "path"]
    for page, block in _limited(table, paths, lambda one: one[0]):
        values = block.values
        state = "unknown" if (number := values.get("state")) is None else state_name(number)
        names = ("rtt_us", "data_packets_sent", "retransmitted_packets", "lost_packets", "ecn_marked_packets")
        table.add_row(
            f"{page.process}",
            f"{page.rank}",
            f"{block.peer}",
            f"{block.path}",
            state if state == "good" else red(state),
            *(f"{values.get(name, 0):,}" for name in names),
        )
    return table


def left_out_text(left_out: Mapping[int, int]) -> str:
    """What is said of pages that were not read."""
    return f"not read: {sum(left_out.values()):,} pages of other users, most of {_most(left_out)}"


def _limited(table: Table, rows: Sequence[_Row], page_of: Callable[[_Row], counters.Page]) -> Iterator[_Row]:
    """The rows to show; a note under the table says how many others there are."""
    reader = os.geteuid()
    wanted = Counter(page_of(row).account for row in rows if page_of(row).owner != reader)
    left = counters.shares(wanted, FOREIGN_MAX_ROWS)
    more = {account: wanted[account] - left[account] for account in wanted if wanted[account] > left[account]}
    if more:
        table.caption = f"not shown: {sum(more.values()):,} rows of other users, most of {_most(more)}"
        table.caption_justify = "left"
    for row in rows:
        page = page_of(row)
        if page.owner != reader:
            if left[page.account] == 0:
                continue
            left[page.account] -= 1
        yield row


def _of_rank(page: counters.Page) -> tuple[str, str, Text]:
    """The first cells of a row: the process, its rank, and what is to be said of it."""
    return f"{page.process}", f"{page.rank}/{page.world}", _standing(page)


def _standing(page: counters.Page) -> Text:
    """Whose page it is, if it is another user's, and whether its rank is gone."""
    gone = red("" if page.is_alive else "gone")
    return gone if page.owner == os.geteuid() else Text(f"of {_user(page.owner)} ").append_text(gone)


def _most(numbers: Mapping[int, int]) -> str:
    return _user(max(numbers, key=numbers.__getitem__))


@lru_cache(maxsize=1024)
def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container has users that this machine does not know
        return f"user {number}"


def _rate(bytes_a_second: float) -> str:
    power = 0
    while bytes_a_second >= 1000 and power < len(UNITS) - 1:
        bytes_a_second /= 1000
        power += 1
    return f"{bytes_a_second:.3g} {UNITS[power]}"
