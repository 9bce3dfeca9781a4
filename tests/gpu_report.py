# SPDX-License-Identifier: Apache-2.0
"""What a run of `sennit bench gpu --interpreter` must have found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sennit.testbed.bench.gpu import gpu, gpu_kernels


def check(report: Mapping[str, Any], summary: str) -> None:
    """All parts ran, nothing is wrong, and nothing was timed. `summary`: the page of the run."""
    parts = report["parts"]
    assert not any("skipped" in part or "error" in part for part in parts.values()), parts
    assert list(parts) == list(gpu.LIMITS_S)
    assert report["gpus"] == []
    assert report["versions"]["torch"] is not None
    assert {one["outcome"] for one in parts["kernels"]["results"]} == {gpu_kernels.EQUAL}
    assert parts["tests"]["counts"]["skipped"] > 100
    assert parts["tests"]["counts"]["failed"] == 0
    operations = ["forward", *(f"backward+{kind}" for kind in ("sgd", "adam", "row_wise_adagrad"))]
    assert {one["name"] for one in parts["embedding"]["results"]} == {
        f"{name}{ids}" for name in operations for ids in ("", ", uniform ids")
    }
    (bits, outputs) = parts["attention"]["results"]
    assert bits == {"name": "bits, silu", "outcome": gpu_kernels.EQUAL}
    assert outputs["outcome"].startswith("differ by ")
    staged = [one["name"].partition(",")[0] for one in parts["staging"]["results"]]
    assert staged == ["host to device", "device to host"] * 2 + ["AllReduce", "AlltoAll", "nccl"]
    assert [len(digest) for digest in parts["training step"]["results"][2]["digests"]] == [64, 64]
    assert parts["training step"]["results"][3]["absent"] == "no GPU"
    dynamic = [one["name"].partition(",")[0] for one in parts["training step"]["results"][4:]]
    assert dynamic == ["dynamic table", *["dynamic table", "fixed table"] * 2, "dynamic table that fills"]
    assert {one["spill_bytes"] for one in parts["compiler"]["kernels"]} == {0}
    assert parts["profile"]["torch_operations"] > 0
    times = [key for part in parts.values() for one in part.get("results", []) for key in one if key.endswith("_ms")]
    assert not times
    assert "## Wrong\n\nNothing.\n\n## Did not run\n\nNothing.\n" in summary
    assert "## Hot kernels, compiled for sm_90a\n\n| kernel | cases | registers |" in summary
    assert "Kernels: the bits of the native ones in 17 cases" in summary
