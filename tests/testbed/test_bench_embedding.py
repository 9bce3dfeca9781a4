# SPDX-License-Identifier: Apache-2.0
"""`sennit bench embedding`: peers on the CPU; the data of the GPU benchmark, and the rest of it if there is a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from sennit.commands.cli import app
from sennit.doctor import capabilities
from sennit.runtime.kernels.spec import Pooling, Precision
from sennit.testbed.bench.tables import embedding, embedding_cuda, embedding_peers
from sennit.testbed.bench.tables.embedding_peers import Shape


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
    for options in (["--device", "tpu"], ["--device", "cuda", "--against", "torch"], ["--against", "sennit"]):
        assert CliRunner().invoke(app, ["bench", "embedding", *options]).exit_code == 2


def test_peers_take_turns_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"table_count": 2, "row_count": 100, "dim": 8, "bags": 16, "length": 3}
    shapes = [
        Shape(name="bags", **sizes, zipf=1.2),
        Shape(name="sequences", **sizes, pooling=Pooling.NONE),
        Shape(name="halves", **sizes, precision=Precision.FP16),
    ]
    monkeypatch.setattr(embedding, "shapes", lambda: shapes)
    path = tmp_path / "found.json"
    options = ["--against", "torch", "--against", "tensor-train", "--rounds", "3", "--force", "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "embedding", *options])
    assert result.exit_code == 0, result.output
    found = {shape["name"]: shape for shape in json.loads(path.read_text())["shapes"]}
    assert {name: sorted(shape["ratio"]) for name, shape in found.items()} == {
        "bags": ["tensor-train", "torch"],
        "sequences": ["tensor-train", "torch"],
        "halves": ["tensor-train"],
    }
    assert "torch" in found["halves"]["absent"]
    for shape in found.values():
        for peer, ratio in shape["ratio"].items():
            assert shape["spread"][peer]["low"] <= ratio == shape["spread"][peer]["median"]
            assert len(shape["median_ms"][peer]) == 2
        for seconds in (*shape["forward_s"].values(), *shape["backward_s"].values()):
            assert len(seconds) == 3
            assert min(seconds) > 0


def test_a_peer_with_other_results_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(name="bags", table_count=1, row_count=10, dim=8, bags=4, length=3)
    monkeypatch.setattr(embedding, "shapes", lambda: [shape])
    monkeypatch.setattr(embedding_peers.SennitTensorTrain, "HOLDS_ANY_WEIGHTS", True)
    with pytest.raises(AssertionError, match="not close"):
        embedding.run(against=["tensor-train"], rounds=1, seed=1)


@pytest.mark.gpu
def test_command_writes_every_figure(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["bench", "embedding", "--device", "cuda", "--rounds", "2", "--force", "--json", str(tmp_path / "found.json")],
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert {one["name"] for one in found if one["goal_ms"] is not None} == set(embedding_cuda.GOALS_MS)
    assert len(found) == 8
    assert all(one["graph_ms"] > 0 for one in found)
