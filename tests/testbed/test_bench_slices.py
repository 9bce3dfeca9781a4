# SPDX-License-Identifier: Apache-2.0
"""The benchmark of slices: the three steps agree, and a rank that fails is named. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sennit.testbed.bench.training import slices

pytestmark = pytest.mark.needs("backend", "shm")


def test_slices_one_slice_a_rank_and_ddp_take_turns() -> None:
    report = slices.run(slices.Settings(slices=4, local_batch=8, rounds=2))
    assert {peer: len(seconds) for peer, seconds in report.seconds.items()} == dict.fromkeys(
        (slices.OURS, *slices.PEERS), 2
    )
    console = Console(record=True, width=160)
    slices.render(report, console)
    assert f"{report.ratio('ddp'):.3f}" in console.export_text()
    assert json.loads(json.dumps(report.as_json()))["slices / peer"]["ddp"] == report.ratio("ddp")


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks, 8 slices, 3072 samples in all; allowed: each divides the next"):
        slices.Settings(world=3)
