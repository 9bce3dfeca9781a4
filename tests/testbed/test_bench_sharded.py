# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sharded tables: all placements agree on the loss. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import sharded

pytestmark = [pytest.mark.needs("backend", "shm"), pytest.mark.timeout(180)]


def test_all_placements_take_turns() -> None:
    report = sharded.run(sharded.Settings(local_batch=8, rows=50, tables=3, pooling=2, zipf=1.2, rounds=2))
    peers = {*sharded.SHARDINGS} if report.absent else {*sharded.SHARDINGS, sharded.TORCHREC}
    assert {peer: len(seconds) for peer, seconds in report.seconds.items()} == dict.fromkeys(peers, 2)
    console = Console(record=True, width=160)
    sharded.render(report, console)
    text = console.export_text()
    assert f"{report.ratio('row_wise'):.2f}" in text
    assert report.absent is None or "torchrec did not run: torchrec: cannot be imported" in text
    assert json.loads(json.dumps(report.as_json()))["peer / table_wise"]["table_wise"] == 1


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks, 8 slices, 3072 samples in all; allowed: each divides the next"):
        sharded.Settings(world=3)
