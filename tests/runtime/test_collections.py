# SPDX-License-Identifier: Apache-2.0
"""Sharded tables do what programs know from TorchRec's EmbeddingBagCollection and EmbeddingCollection."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = (
    "unshared",
    "one_table_of_two_features",
    "one_feature_of_two_tables",
    "means",
    "weighted",
    "other_keys",
    "missing_key",
    "all_bags_empty",
    "fewer_samples_than_slices",
    "wrong_input",
    "sequences",
)


@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_collection(kept_world: Callable[..., Any], case: str, world: int, placement: str) -> None:
    kept_world(world).run("collection_cases.py", case, placement=placement)


def _skip_without_torchrec() -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("the package torchrec is not installed: make frameworks")


def test_our_collections_beside_torchrec_s(new_world: Callable[..., Any], tmp_path: Path) -> None:
    _skip_without_torchrec()
    new_world(1, backend="").run("frameworks/collection_adapter_cases.py", "beside_theirs", folder=str(tmp_path))


def test_torchrec_s_own_tests_of_collections(new_world: Callable[..., Any], tmp_path: Path) -> None:
    """TORCHREC_TESTS: torchrec/modules/tests/test_embedding_modules.py of a clone. No package has it."""
    _skip_without_torchrec()
    if "TORCHREC_TESTS" not in os.environ:
        pytest.skip("TORCHREC_TESTS does not name TorchRec's test_embedding_modules.py, which it does not install")
    source = str(Path(os.environ["TORCHREC_TESTS"]).resolve())
    passed = new_world(1, backend="").run(
        "frameworks/collection_adapter_cases.py", "own_tests", folder=str(tmp_path), source=source
    )
    assert len(passed[0]) == 8
