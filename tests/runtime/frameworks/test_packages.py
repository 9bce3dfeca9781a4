# SPDX-License-Identifier: Apache-2.0
"""Packages that build on torch.distributed run their own tests and models over sennit (extra `frameworks`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import World

pytestmark = pytest.mark.timeout(180)


def skip_without(package: str) -> None:
    """Does not import it: that takes seconds, and only the ranks need it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed: make frameworks")


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerate(ranks: Callable[[int], World], tmp_path: Path, port: int, name: str) -> None:
    skip_without("accelerate")
    ranks(2).run("frameworks/accelerate_cases.py", "script", folder=str(tmp_path), port=port, name=name)


def test_accelerate_data_loop(ranks: Callable[[int], World], tmp_path: Path, port: int) -> None:
    skip_without("accelerate")
    ranks(2).run("frameworks/accelerate_cases.py", "data_loop", folder=str(tmp_path), port=port)


@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel"])
def test_lightning(ranks: Callable[[int], World], port: int, model: str) -> None:
    skip_without("lightning")
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
    skip_without("torchrec")
    ranks(2).run("frameworks/torchrec_cases.py", "sharding", port=port, sharding_type=sharding, options=options)


def test_our_collections_beside_torchrec_s(ranks: Callable[[int], World], tmp_path: Path) -> None:
    skip_without("torchrec")
    ranks(1).run("frameworks/collection_adapter_cases.py", "beside_theirs", folder=str(tmp_path))


def test_torchrec_s_own_tests_of_collections(ranks: Callable[[int], World], tmp_path: Path) -> None:
    """TORCHREC_TESTS: torchrec/modules/tests/test_embedding_modules.py of a clone. No package has it."""
    skip_without("torchrec")
    if "TORCHREC_TESTS" not in os.environ:
        pytest.skip("TORCHREC_TESTS does not name TorchRec's test_embedding_modules.py, which it does not install")
    source = str(Path(os.environ["TORCHREC_TESTS"]).resolve())
    passed = ranks(1).run("frameworks/collection_adapter_cases.py", "own_tests", folder=str(tmp_path), source=source)
    assert len(passed[0]) == 8
