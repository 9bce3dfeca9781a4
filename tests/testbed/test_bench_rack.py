# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a rack: an aggregator and hosts take turns, and give the same bits. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from sennit.testbed.bench.transport import rack


@pytest.mark.needs("shm", "netns")
def test_an_aggregator_and_hosts_take_turns(tmp_path: Path) -> None:
    report = rack.run(rack.Settings(ranks=2, rates_mbit=(500,), size_bytes=256 << 10, rounds=2, native=True))
    (row,) = report.rows
    assert (row.rate_mbit, row.mode) == (500, "native")
    assert {name: len(turns) for name, turns in row.turns.items()} == dict.fromkeys(rack.turn_names(), 2)
    assert row.best in ("direct", "halving")
    console = Console(record=True, width=200)
    rack.render(report, console)
    assert "500 Mbit/s" in console.export_text()
    (found,) = json.loads(json.dumps(report.as_json()))["results"]
    assert found["ratio"][1] <= found["ratio"][0] <= found["ratio"][2]
    rack.plot(report, tmp_path / "rack.png")
    assert (tmp_path / "rack.png").stat().st_size > 5_000


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 ranks; allowed: 2\.\.16"):
        rack.Settings(ranks=1)
    with pytest.raises(ValueError, match=r"7 bytes; allowed: whole float32 numbers, 64 KiB or more"):
        rack.Settings(size_bytes=7)
