# SPDX-License-Identifier: Apache-2.0
"""`sennit bench embedding --device cuda`: its data here, the rest where there is a GPU."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from sennit.cli import app
from sennit.testbed import capabilities
from sennit.testbed.bench import embedding_cuda


def test_ids_follow_the_power_law() -> None:
    batch = embedding_cuda.power_law_batch(torch.device("cpu"), 1, lookups=100_000, rows=1000)
    assert len(batch.values) == sum(batch.bags_of_block) == 100_000
    assert int(batch.values.min()) >= 0
    counts = torch.bincount(batch.values[:10_000], minlength=1000).sort(descending=True).values
    share = torch.arange(1, 1001, dtype=torch.float64).pow(-embedding_cuda.EXPONENT)
    wanted = 10_000 * share / share.sum()
    assert torch.allclose(counts[:5].double(), wanted[:5], rtol=0.2)


@pytest.mark.skipif(capabilities.missing("gpu") is None, reason="has a GPU")
def test_command_names_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["bench", "embedding", "--device", "cuda"])
    assert result.exit_code == 1
    assert "gpu" in result.output.lower()


def test_options_of_the_other_device_are_refused() -> None:
    for options in (["--device", "tpu"], ["--device", "cuda", "--against", "torch"]):
        assert CliRunner().invoke(app, ["bench", "embedding", *options]).exit_code == 2


@pytest.mark.gpu
def test_command_writes_every_figure(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "embedding", "--device", "cuda", "--rounds", "2", "--json", str(tmp_path / "found.json")]
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [one["name"] for one in found] == list(embedding_cuda.GOALS_MS)
    assert all(one["graph_ms"] > 0 for one in found)
