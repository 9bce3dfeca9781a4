# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu`: all parts run without a GPU in Triton's interpreter. No timing is asserted."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton")

from sennit import capabilities
from sennit.cli import app
from sennit.testbed.bench import gpu
from sennit.transport.errors import Unsupported

pytestmark = [pytest.mark.needs("backend", "shm"), pytest.mark.timeout(180)]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


@without_gpu
def test_all_parts_run_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["bench", "gpu", "--interpreter", "--json", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    parts = report["parts"]
    assert not any("skipped" in part or "error" in part for part in parts.values()), parts
    assert parts["tests"]["counts"]["skipped"] > 100
    assert parts["tests"]["counts"]["failed"] == 0
    assert [one["name"] for one in parts["embedding"]["results"]] == ["forward", "backward+sgd", "backward+adam"]
    staged = [one["name"].partition(",")[0] for one in parts["staging"]["results"]]
    assert staged == ["host to device", "device to host"] * 2 + ["AllReduce", "AlltoAll", "nccl"]
    assert [len(digest) for digest in parts["training step"]["results"][0]["digests"]] == [64, 64]
    assert report["versions"]["torch"] == torch.__version__
    assert report["gpus"] == []
    times = [key for part in parts.values() for one in part.get("results", []) for key in one if "ms" in key]
    assert not times


def test_ranks_that_cannot_share_slices_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "gpu", "--interpreter", "--world", "3"])
    assert result.exit_code == 2
    assert "3 ranks; allowed: 2, 4, 8 and so on" in result.output


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    assert capabilities.missing("gpu") is not None
    result = CliRunner().invoke(app, ["bench", "gpu"])
    assert result.exit_code == 1
    assert result.output.startswith("error: missing capability gpu")
    assert len(result.output.strip().splitlines()) == 1


def test_a_part_that_cannot_run_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_: Any) -> Any:
        raise Unsupported("staging", "no such thing")

    def fails(_: Any) -> Any:
        raise ValueError("of no use")

    monkeypatch.setattr(gpu, "_tests", lambda _: {"counts": {"failed": 1}, "seconds": 1.0, "failed_tests": ["a::b"]})
    monkeypatch.setattr(gpu, "_staging", unsupported)
    monkeypatch.setattr(gpu, "_embedding", fails)
    monkeypatch.setattr(gpu, "_training_step", lambda _: {"results": [{"name": "x", "ms": 2, "samples_per_s": 500}]})
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["bench", "gpu", "--interpreter", "--json", str(path)], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "error: embedding: ValueError: of no use; test a::b" in result.output
    assert "2.000 ms, 500 samples/s" in result.output
    parts = json.loads(path.read_text())["parts"]
    assert parts["staging"]["skipped"].endswith("no such thing")
    assert parts["embedding"] == {"error": "ValueError: of no use"}


def test_every_outcome_of_a_test_is_counted() -> None:
    text = """<testsuites><testsuite>
      <testcase classname="a" name="good" time="1.5"/>
      <testcase classname="a" name="bad" time="0.5"><failure message="x"/></testcase>
      <testcase classname="a" name="broken"><error message="x"/></testcase>
      <testcase classname="a" name="left"><skipped message="no GPU"/></testcase>
    </testsuite></testsuites>"""
    counted = gpu._counts(ElementTree.fromstring(text))
    assert counted["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert counted["failed_tests"] == ["a::bad", "a::broken"]
    assert counted["reasons_to_skip"] == ["no GPU"]
    assert counted["seconds"] == 2


def test_figures_of_a_gpu_have_their_units() -> None:
    one = {"name": "forward", "graph_ms": 0.25, "share_of_copy": 0.42, "goal_ms": 0.345}
    parts: dict[str, Any] = {name: {} for name in ("tests", "embedding", "staging", "training step")}
    parts["embedding"] = {"results": [one]}
    parts["staging"] = {"results": [{"name": "AllReduce, 64 KiB", "bytes": 65536, "ms": 1, "bytes_per_s": 65.5e6}]}
    console = Console(record=True, width=160)
    gpu.render({"parts": parts}, console)
    text = console.export_text()
    assert "0.250 ms, 42% of a copy; FBGEMM on an H100 0.345 ms" in text
    assert "1.000 ms, 0.1 GB/s" in text
