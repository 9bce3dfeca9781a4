# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: `sennit train` on the device must end with the weights of a run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sennit.runtime.data.packages import check_installed
from sennit.testbed.bench.gpu.gpu import Settings

RUN: Final = (
    *("--data", "synthetic", "--samples", "600", "--row-limit", "200", "--batch-size", "64", "--dim", "4"),
    *("--bottom", "8", "--top", "8", "--epochs", "1"),
)
ONE_RANK: Final = ("--ranks", "1")


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Without a GPU both runs are on the CPU, with other numbers of ranks.

    Raises RuntimeError if digests differ, and MissingPackage without pyarrow.
    """
    check_installed("pyarrow", purpose="training")
    device = "cpu" if settings.interpreter else "cuda"
    with tempfile.TemporaryDirectory() as made:
        timeline = Path(made) / "timeline.json.gz"
        there = _train(Path(made), "--device", device, "--ranks", str(settings.world), "--timeline", str(timeline))
        summary = json.loads(_sennit("timeline", str(timeline), "--json"))
        found: dict[str, Any] = {
            "timeline": summary,
            "results": [{"name": f"sennit train --device {device}", "outcome": there}],
        }
        save(found)
        here = _train(Path(made), "--device", "cpu", *ONE_RANK)
        found["results"].append({"name": "sennit train --device cpu", "outcome": here})
        save(found)
    if here != there:
        raise RuntimeError(f"sennit train ended with weights {there} on {device}, and {here} on cpu")
    return found


def _train(folder: Path, *arguments: str) -> str:
    """SHA-256 of the weights at the end."""
    report = folder / "train.json"
    _sennit("train", *RUN, *arguments, "--json", str(report))
    digest: str = json.loads(report.read_text(encoding="utf-8"))["weights_sha256"]
    return digest


def _sennit(*arguments: str) -> str:
    """What a command prints. The limit of the part ends it. Raises RuntimeError with all its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "sennit", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"sennit {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
    return done.stdout
