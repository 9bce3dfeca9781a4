# SPDX-License-Identifier: Apache-2.0
"""What dynamic tables do, in `sennit top`, `sennit metrics` and the page of counters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rich.console import Console

from sennit.runtime.sharded import DynamicIds, ShardedEmbeddingBags, Table
from sennit.runtime.telemetry import openmetrics, samples, top
from sennit.runtime.training.ids_page import IdsPage
from sennit.transport import counters
from sennit.transport.counter_page import CounterPage
from tests.runtime.world import WorldFactory

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "counters.md"
COUNTS = {"rows": 40, "used": 30, "lookups": 1000, "hits": 750, "admitted": 90, "evicted": 50, "expired": 10}
COUNTS["without_row"] = 7


@pytest.fixture
def counted() -> Iterator[dict[str, dict[str, int]]]:
    """Counters that are on a page, which shows them."""
    found = {"User-Id": dict(COUNTS), "item": dict.fromkeys(COUNTS, 0)}
    page = IdsPage(3, 8, lambda: found)
    page.show()
    yield found
    page.close()


def own_page() -> counters.Page:
    (page,) = [one for one in counters.pages() if one.process == os.getpid() and (one.rank, one.world) == (3, 8)]
    return page


def test_top_shows_load_hits_and_rates(counted: dict[str, dict[str, int]]) -> None:
    looked = [one for one in next(top.looks(0.5)).ids if one.page.process == os.getpid()]
    user, item = looked
    assert (user.table, user.rows, user.used, user.hit_share) == ("user_id", 40, 30, 0.75)
    assert user.admitted_a_second > user.evicted_a_second > user.expired_a_second > user.without_row_a_second > 0
    assert (item.table, item.hit_share) == ("item", None)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(top.ids_table(looked))
    assert re.search(rf"{os.getpid()} +3/8 +user_id +40 +75.0% +75.0% ", shown.get())


def test_a_page_that_has_nothing_yet_is_no_rank() -> None:
    """As the one for the ingest of a rank that waits for its first feeder: the rank would have two rows."""
    with closing(CounterPage(7, 9)):
        shown = [one.page for one in next(top.looks(0.5)).ranks]
    assert not [page for page in shown if (page.process, page.rank, page.world) == (os.getpid(), 7, 9)]


def test_metrics_have_the_table_as_a_label(counted: dict[str, dict[str, int]]) -> None:
    page = own_page()
    text = openmetrics.render(samples.of_pages([page]))
    labels = f'{{group="ids",page="{page.number}",process="{page.process}",rank="3",table="user_id"}}'
    assert f"sennit_ids_admitted_total{labels} 90.0\n" in text
    assert f"sennit_ids_used{labels} 30.0\n" in text


def test_every_counter_is_on_the_page_of_the_docs(counted: dict[str, dict[str, int]]) -> None:
    documented = re.findall(r"^\|[^|]*\| `(ids_\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert [list(block.values) for block in own_page().blocks] == [documented, documented]


def module_counters(rank: int, world: int) -> list[str]:
    module = ShardedEmbeddingBags([Table(name="user", rows=8, dim=4, ids=DynamicIds())], lr=0.1)
    return list(module.id_counters()["user"])


def test_a_module_counts_what_the_docs_list(kept_world: WorldFactory) -> None:
    assert kept_world(1).run(module_counters)[0] == list(COUNTS)
