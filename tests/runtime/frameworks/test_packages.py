# SPDX-License-Identifier: Apache-2.0
"""Packages that build on torch.distributed run their own tests and models over sennit (extra `frameworks`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerate(ranks: Callable[[int], World], tmp_path: Path, port: int, name: str) -> None:
    ranks(2).run("frameworks/accelerate_cases.py", "script", folder=str(tmp_path), port=port, name=name)


def test_accelerate_data_loop(ranks: Callable[[int], World], tmp_path: Path, port: int) -> None:
    ranks(2).run("frameworks/accelerate_cases.py", "data_loop", folder=str(tmp_path), port=port)


@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel"])
def test_lightning(ranks: Callable[[int], World], port: int, model: str) -> None:
    ranks(2).run("frameworks/lightning_cases.py", "fit", port=port, model=model)


@pytest.mark.parametrize(
    ("sharding", "options"),
    [
        ("table_wise", {}),
        ("row_wise", {}),
        ("row_wise", {"codec": ["fp16", "bf16"]}),
        ("column_wise", {}),
        ("table_row_wise", {"local_size": 2}),
        ("data_parallel", {}),
    ],
)
def test_torchrec(ranks: Callable[[int], World], port: int, sharding: str, options: dict[str, Any]) -> None:
    """Rows over gloo TorchRec skips, because gloo sums no reduce_scatter in the background."""
    ranks(2).run("frameworks/torchrec_cases.py", "sharding", port=port, sharding_type=sharding, options=options)
