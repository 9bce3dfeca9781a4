# SPDX-License-Identifier: Apache-2.0
"""Sharded tables do what programs know from TorchRec's EmbeddingBagCollection and EmbeddingCollection."""

from __future__ import annotations

from collections.abc import Callable
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
