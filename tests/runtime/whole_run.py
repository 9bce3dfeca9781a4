# SPDX-License-Identifier: Apache-2.0
"""A `sennit train` in the process of the tests, for the results that other runs must reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.command import main


def train(report: Path, *arguments: str) -> dict[str, Any]:
    """Returns the report of a `sennit train`, whose ranks are forks of the process that forks worlds.

    A command of its own would import torch twice. What ranks print is not caught. Tables are table-wise unless the test
    says otherwise: to plan them takes half a second of a processor, which is most of a small run.
    """
    with pytest.raises(SystemExit) as ended:
        main(["--sharding", "table_wise", *arguments, "--json", str(report)])
    assert not ended.value.code
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what a `sennit train` that fails says, in one line."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code
    return " ".join(capfd.readouterr().err.split())
