# SPDX-License-Identifier: Apache-2.0
"""A whole model on sharded tables: one digest of all weights, whatever the run looked like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = "sharded_model_cases.py"
SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")


@pytest.fixture(scope="module")
def alone(kept_world: Callable[..., Any]) -> str:
    """The digest of one rank's run."""
    found: str = kept_world(1).run(CASES, "trained", placement="table_wise")[0]
    return found


@pytest.mark.parametrize("placement", SHARDINGS)
@pytest.mark.parametrize(
    ("world", "transport"), [(1, "shm"), (2, "shm"), (2, "udp"), (3, "shm"), (3, "udp"), (4, "shm")]
)
def test_a_model_has_the_same_bits_in_every_world(
    kept_world: Callable[..., Any], alone: str, world: int, transport: str, placement: str
) -> None:
    assert set(kept_world(world, transport).run(CASES, "trained", placement=placement)) == {alone}


def test_eight_ranks_have_the_same_bits(kept_world: Callable[..., Any], alone: str) -> None:
    assert set(kept_world(8).run(CASES, "trained", placement="row_wise")) == {alone}


@pytest.mark.parametrize(("world", "placement"), [(1, "table_wise"), (2, "column_wise"), (3, "row_wise")])
def test_a_checkpoint_goes_on_in_any_world_and_placement(
    kept_world: Callable[..., Any], alone: str, tmp_path: Path, world: int, placement: str
) -> None:
    kept_world(2).run(CASES, "saved", placement="row_wise", folder=str(tmp_path))
    found = kept_world(world).run(CASES, "resumed", placement=placement, folder=str(tmp_path))
    assert set(found) == {alone}


def test_a_checkpoint_of_other_shards_is_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses_other_shards")


def test_ddp_leaves_tables_alone(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "beside_ddp")


@pytest.mark.parametrize("how", ["compile", "fsdp2"])
def test_a_model_with_tables_can_be_compiled_and_sharded_by_fsdp2(kept_world: Callable[..., Any], how: str) -> None:
    found = kept_world(2).run(CASES, "compiled_or_sharded", how=how)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "deepfm"])
def test_models_of_the_trainer_have_the_same_bits_in_every_world(kept_world: Callable[..., Any], name: str) -> None:
    found = {
        digest
        for world, placement in ((1, "table_wise"), (2, "row_wise"), (3, "row_wise"), (3, "table_wise"))
        for digest in kept_world(world).run(CASES, "trained_by_name", name=name, placement=placement)
    }
    assert len(found) == 1
