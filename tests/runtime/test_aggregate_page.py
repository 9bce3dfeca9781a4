# SPDX-License-Identifier: Apache-2.0
"""What an aggregator does, in `sennit top`, `sennit metrics` and the page of counters."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sennit.runtime.aggregate import page
from sennit.runtime.aggregate.serving import Serving
from sennit.runtime.telemetry import openmetrics, samples, top
from sennit.transport import counters
from sennit.transport.aggregator import MEMORY_MIN_BYTES
from tests.aggregation_wire import F32, JOINED, LEAF, Packet, join, unpack

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "counters.md"
KEY, RANKS, WINDOW = 0x0123456789ABCDEF, 2, 16
ANSWERS_IN_S = 0.002
LEAF_BYTES = 40 + 64


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Has summed one block, has a leaf of the next one, and has refused a packet for each reason."""
    monkeypatch.setattr(page, "INTERVAL_S", 0.0)
    with (
        Serving(None, addresses=["127.0.0.1"], port=0, memory_bytes=MEMORY_MIN_BYTES) as serving,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rank,
    ):
        rank.connect(("127.0.0.1", serving.port))

        def send(content: bytes) -> None:
            rank.send(content)
            serving.run(ANSWERS_IN_S)

        for number in range(RANKS):
            send(join(KEY, number, RANKS, WINDOW).pack())
            joined = unpack(rank.recv(2048))
            assert joined.kind == JOINED
        leaf = Packet(kind=LEAF, job=joined.job, key=KEY, arithmetic=F32, stripes=bytes(64))
        for sent in (leaf, replace(leaf, leaf=1), replace(leaf, leaf=1), replace(leaf, block=1)):
            send(sent.pack())
        # A key of another job; a window for which there is no memory; no packet of this protocol.
        send(replace(leaf, key=KEY + 1).pack())
        send(join(KEY + 1, 0, 64, 1024).pack())
        send(join(KEY + 2, 0, 64, 1024).pack())
        send(b"no packet" * 9)
        yield serving


def own_page() -> counters.Page:
    (found,) = [one for one in counters.pages() if one.process == os.getpid() and one.world == 0]
    return found


def test_top_shows_jobs_rates_slots_and_why_packets_were_refused(serving: Serving) -> None:
    (seen,) = [one for one in next(top.looks(0.5)).aggregators if one.page.process == os.getpid()]
    assert (seen.jobs, seen.slots_open, seen.repeated, seen.junk) == (2, 1, 1, 1)
    assert (seen.of_another_job, seen.without_room, seen.dropped, seen.kernel_share) == (1, 1, 0, 0.0)
    assert seen.leaves_a_second == pytest.approx(3 * seen.sums_a_second)
    assert seen.sent_bytes_a_second > 3 * LEAF_BYTES * seen.sums_a_second
    assert seen.received_bytes_a_second > seen.sent_bytes_a_second > 0
    assert 0.5 < seen.memory_share <= 1
    console = Console(width=200)
    with console.capture() as shown:
        console.print(top.aggregators_table([seen]))
    assert re.search(rf"{os.getpid()} +2 +.* 0% +1 +1 +1 +1 +0 +1/{seen.slots} ", shown.get())


def test_metrics_are_those_of_no_rank(serving: Serving) -> None:
    found = own_page()
    text = openmetrics.render(samples.of_pages([found]))
    labels = f'{{group="aggregator",page="{found.number}",process="{found.process}"}}'
    for name, value in {"completed": 1, "stored": 2, "unknown_job": 1, "no_room": 1, "foreign": 1}.items():
        assert f"sennit_aggregator_{name}_total{labels} {value}.0\n" in text
    assert f"sennit_aggregator_slots_open{labels} 1.0\n" in text
    assert f"sennit_aggregator_memory_bytes{labels} 4.194304e+06\n" in text


def test_every_counter_is_on_the_page_of_the_docs(serving: Serving) -> None:
    documented = re.findall(r"^\|[^|]*\| `(aggregator_\w+)` \|", DOCS.read_text(), re.MULTILINE)
    (block,) = own_page().blocks
    assert list(block.values) == [name for name in documented if name != "aggregator_failed"]


def test_the_page_goes_with_the_aggregator(serving: Serving) -> None:
    file = own_page().file
    serving.close()
    assert not file.exists()
