# SPDX-License-Identifier: Apache-2.0
"""The training process of the benchmark of feeders, without any: its turns have all steps, and their input."""

from __future__ import annotations

import json

from rich.console import Console

from sennit.testbed.bench.samples import ingest
from tests.forked_commands import forked

TURNS, STEPS = 2, 3


def test_turns_from_memory_are_results() -> None:
    run = forked("sennit.testbed.bench.samples.ingest_turns", "synthetic", str(TURNS), str(STEPS))
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.strip().rpartition("\n")[2])
    assert [len(turns) for turns in told["turns"].values()] == [TURNS]
    assert all(elapsed_s > input_s > 0 for elapsed_s, input_s in told["turns"]["memory"])
    (memory,) = ingest.results(told)
    assert (memory.source, memory.ratio_to_memory) == ("memory", 1.0)
    console = Console(record=True, width=160)
    ingest.render([memory], console)
    assert f"{memory.input_ms:.2f}" in console.export_text()
