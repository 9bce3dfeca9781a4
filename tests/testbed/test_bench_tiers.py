# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of tiers compare bits at every step, and count the file's reads and writes. No timing is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sennit.testbed.bench.tables import embedding_tiers, tiers, training_tiers

LOAD = embedding_tiers.Load(table_count=2, row_count=3_000, dim=8, bags=16, memory_share=0.3)


@pytest.mark.parametrize("home", embedding_tiers.HOMES)
def test_a_small_load_of_the_operator_runs_and_is_counted(tmp_path: Path, home: str) -> None:
    result = embedding_tiers.run(tmp_path, LOAD, home=home, steps=4, seed=1)
    assert len(result.memory_s) == len(result.tiers_s) == 4
    assert 0 < result.misses < LOAD.lookup_count
    assert (result.reads > 0) == (home != "dram")
    assert not list(tmp_path.iterdir())


def test_a_small_load_of_the_trainer_runs_and_is_shown(tmp_path: Path) -> None:
    trained = training_tiers.run(tmp_path, LOAD, steps=10, seed=1, warm_steps=5)
    assert len(trained.memory_s) == len(trained.stored_s) == 2
    assert 0 < trained.counts["misses"] < LOAD.lookup_count
    assert trained.phases_s["stored"].keys() - trained.phases_s["memory"].keys() == {"wait for rows"}
    assert not list(tmp_path.iterdir())
    report = tiers.Report(load=LOAD, steps=10, seed=1, trainer=trained, homes=[])
    console = Console(record=True, width=160)
    tiers.render(report, console)
    assert f"{trained.ratio:.3f}" in console.export_text()
    found: Any = report.as_json()
    assert found["trainer"]["ratio"] == trained.ratio
    assert found["trainer"]["stored_samples_per_s"] > 0
