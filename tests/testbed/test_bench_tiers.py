# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tiers compares bits at every step, and counts what the file saw."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sennit.testbed.bench import embedding_tiers


@pytest.mark.parametrize("home", embedding_tiers.HOMES)
def test_a_small_load_runs_and_is_counted(tmp_path: Path, home: str) -> None:
    load = embedding_tiers.Load(table_count=2, row_count=3_000, dim=8, bags=16, length=5)
    result = embedding_tiers.run(tmp_path, load, home=home, steps=4, seed=1)
    assert len(result.memory_s) == len(result.tiers_s) == 4
    assert 0 < result.misses < load.lookup_count
    assert (result.reads > 0) == (home != "dram")
    assert not list(tmp_path.iterdir())
    console = Console(record=True, width=160)
    embedding_tiers.render([result], console)
    assert home in console.export_text()
    assert embedding_tiers.as_json([result], load, steps=4, seed=1)["homes"][0]["ratio"] == result.ratio
