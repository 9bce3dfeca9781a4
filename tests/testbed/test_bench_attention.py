# SPDX-License-Identifier: Apache-2.0
"""A small run of the benchmark of attention. No timing is asserted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rich.console import Console

from sennit.testbed.bench.training import attention

SMALL: dict[str, Any] = {"count": 6, "mean": 20.0, "longest": 40, "heads": 2, "dim": 8, "seed": 3}


def test_all_ways_compute_the_same() -> None:
    sequences = attention.draw(**SMALL)
    assert max(sequences.lengths) <= 40
    assert len(set(sequences.lengths)) > 1
    ours = attention.attend(sequences)
    for theirs in (attention.looped(sequences), attention.padded(sequences)()):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_small_run() -> None:
    report = attention.run(**SMALL, rounds=2)
    figures = attention.as_json(report, **SMALL, rounds=2)
    peers = [way(name) for name in attention.PEERS for way in (str, attention.narrow)]
    assert sorted(figures["peer_over_sennit"]) == sorted(peers)
    assert figures["added_bytes"][attention.PADDED] > 0
    assert all(len(taken) == 2 for taken in figures["step_s"].values())
    console = Console(width=100, record=True)
    attention.render(report, console)
    assert "6 sequences, mean" in console.export_text()


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    lengths = attention.draw(**SMALL | {"count": 4000, "longest": 10_000, "heads": 1, "dim": 1}).lengths
    assert 19 < sum(lengths) / len(lengths) < 21
