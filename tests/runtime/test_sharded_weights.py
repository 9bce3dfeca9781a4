# SPDX-License-Identifier: Apache-2.0
"""Weights of ids that require gradients: the same bits in every world and with every placement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)

CASES = "sharded_weight_cases.py"
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}


@pytest.fixture(scope="module")
def alone(kept_world: Callable[..., Any]) -> Any:
    return kept_world(1).run(CASES, "trained", placement="table_wise")[0]


@pytest.mark.parametrize("placement", ["row_wise", "column_wise", "grid", "data_parallel", MIXED], ids=str)
@pytest.mark.parametrize(("world", "transport"), [(1, "shm"), (2, "shm"), (3, "udp")])
def test_gradients_have_the_same_bits(
    kept_world: Callable[..., Any], alone: Any, world: int, transport: str, placement: Any
) -> None:
    digest, gradients = alone
    found = kept_world(world, transport).run(CASES, "trained", placement=placement)
    assert [one for one, _ in found] == [digest] * world
    assert [sample for _, samples in found for sample in samples] == gradients


def test_neither_reference_nor_lossless_changes_a_bit(kept_world: Callable[..., Any], alone: Any) -> None:
    assert kept_world(1).run(CASES, "trained", placement="grid", implementation="reference")[0] == alone
    assert kept_world(2).run(CASES, "trained", placement="grid", codec=True)[0][0] == alone[0]


def test_tables_in_files_change_no_bit(kept_world: Callable[..., Any], alone: Any, tmp_path: Path) -> None:
    assert kept_world(1).run(CASES, "trained", placement="grid", folder=str(tmp_path))[0] == alone


def test_tensor_trains_give_weights_gradients(kept_world: Callable[..., Any]) -> None:
    expected = kept_world(1).run(CASES, "trained", placement="table_wise", trains=True)[0]
    for placement in ("table_wise", "data_parallel"):
        found = kept_world(2).run(CASES, "trained", placement=placement, trains=True)
        assert [digest for digest, _ in found] == [expected[0]] * 2
        assert [sample for _, samples in found for sample in samples] == expected[1]


@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize(("gradients", "pooling"), [("mean", "sum"), ("sum", "sum"), ("mean", "mean")])
def test_gradients_are_those_of_torch(
    kept_world: Callable[..., Any], gradients: str, pooling: str, placement: str
) -> None:
    kept_world(2).run(CASES, "like_torch", placement=placement, gradients=gradients, pooling=pooling)


def test_ranks_that_give_other_weights_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses")
