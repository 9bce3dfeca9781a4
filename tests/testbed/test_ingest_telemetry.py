# SPDX-License-Identifier: Apache-2.0
"""The counters of a running ingest, in `sennit top` and `sennit metrics`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sennit.runtime.ingest.page import GROUP
from sennit.runtime.telemetry import openmetrics, samples, top
from sennit.transport import counters
from tests.forked_commands import ForkedCommand, forked
from tests.free_ports import free_ports

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "counters.md"
DATA = ["--data", "synthetic", "--samples", "600", "--row-limit", "200"]
# So many epochs that the test ends the run.
TRAIN = ["--batch-size", "64", "--dim", "4", "--bottom", "8", "--top", "8", "--epochs", "100000", "--timeout", "60"]
DEADLINE_S = 60.0


class Ingest:
    """A trainer over loopback, and feeders on request."""

    def __init__(self, processes: ExitStack) -> None:
        self._processes = processes
        (self.port,) = free_ports(1)
        self.trainer = self._start("sennit.runtime.training", *TRAIN, "--ingest", f"cpu://127.0.0.1:{self.port}")

    def feed(self) -> ForkedCommand:
        return self._start("sennit", "feed", *DATA, "--to", f"127.0.0.1:{self.port}", "--timeout", "60")

    def _start(self, module: str, *arguments: str) -> ForkedCommand:
        return self._processes.enter_context(ForkedCommand(module, *arguments))

    def page(self) -> counters.Page | None:
        for page in counters.pages():
            is_ingest = any(block.group == GROUP for block in page.blocks)
            with contextlib.suppress(ProcessLookupError):  # somebody else's, which has just ended
                if is_ingest and page.is_alive and os.getpgid(page.process) == self.trainer.pid:
                    return page
        return None

    def count(self, name: str) -> int:
        page = self.page()
        return -1 if page is None else page.total(GROUP, f"ingest_{name}")


@pytest.fixture(scope="module")
def ingest() -> Iterator[Ingest]:
    with ExitStack() as processes:
        yield Ingest(processes)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_running_ingest_is_seen(ingest: Ingest) -> None:
    until(lambda: ingest.page() is not None, "no page of the ingest")
    assert (ingest.count("records"), ingest.count("feeders_connected")) == (0, 0)
    first = ingest.feed()
    until(lambda: ingest.count("batches") > 10, "no batches")
    page = ingest.page()
    assert page is not None
    assert page.is_alive
    assert page.total(GROUP, "ingest_records") >= page.total(GROUP, "ingest_batches") * 60
    assert page.total(GROUP, "ingest_body_bytes") > 30 * page.total(GROUP, "ingest_records")
    assert page.total(GROUP, "ingest_waited_us") > 0
    assert ingest.count("feeders_connected") == 1

    looks = top.looks(0.5)
    next(looks)
    (rates,) = [found for found in next(looks).ingests if found.page.process == page.process]
    assert rates.records_a_second > 0
    assert rates.batches_a_second > 0
    assert 0 <= rates.waited_share <= 1.5

    # So that the trainer waits for it, and not for the processor that the others need.
    os.killpg(first.pid, signal.SIGSTOP)
    text = openmetrics.render(samples.of_pages([page]))
    labels = f'{{group="ingest",page="{page.number}",process="{page.process}",rank="0"}}'
    assert f"sennit_ingest_records_total{labels} {page.total(GROUP, 'ingest_records')}.0\n" in text
    assert "# TYPE sennit_ingest_feeders_connected gauge\n" in text
    shown = forked("sennit", "top", "--once").stdout
    assert "records/s" in shown
    assert re.search(rf"^ *{page.process} +0/1 ", shown, re.MULTILINE)

    second = ingest.feed()
    until(lambda: ingest.count("feeders_connected") == 2, "the second feeder is not seen")
    os.killpg(first.pid, signal.SIGKILL)
    until(lambda: ingest.count("feeders_connected") == 1, "the first feeder's end is not seen")
    os.killpg(second.pid, signal.SIGKILL)
    until(lambda: ingest.count("feeders_connected") == 0, "the second feeder's end is not seen")
    assert ingest.count("feeders") == 2
    waited = ingest.count("waited_us")
    until(lambda: ingest.count("waited_us") > waited + 500_000, "a wait is not seen while it lasts")


def test_every_counter_is_on_the_page_of_the_docs(ingest: Ingest) -> None:
    until(lambda: ingest.page() is not None, "no page of the ingest")
    page = ingest.page()
    assert page is not None
    (block,) = page.blocks
    documented = re.findall(r"^\|[^|]*\| `(ingest_\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert list(block.values) == documented
