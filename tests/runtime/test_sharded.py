# SPDX-License-Identifier: Apache-2.0
"""Sharded tables: the same bits in every world and with every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = "sharded_cases.py"
SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}


@pytest.fixture(scope="module", params=["bags", "weighted", "sequences"])
def alone(request: pytest.FixtureRequest, kept_world: Callable[..., Any]) -> tuple[str, list[Any]]:
    """A kind of module, and what one rank has with all tables."""
    arguments = {"placement": "table_wise", "kind": request.param}
    return request.param, kept_world(1).run(CASES, "trained", **arguments)[0]


@pytest.mark.parametrize("placement", [*SHARDINGS, MIXED], ids=str)
@pytest.mark.parametrize(("world", "transport"), [(1, "shm"), (2, "shm"), (3, "udp")])
def test_weights_have_the_same_bits_in_every_world(
    kept_world: Callable[..., Any], alone: tuple[str, list[Any]], world: int, transport: str, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments = {"placement": placement, "kind": kind}
    found = kept_world(world, transport).run(CASES, "trained", **arguments)
    assert [one for one, _ in found] == [digest] * world
    assert [sample for _, samples in found for sample in samples] == outputs


@pytest.mark.parametrize(
    ("placement", "then"),
    [
        ("table_wise", "row_wise"),
        ("row_wise", MIXED),
        (MIXED, "grid"),
        ("grid", "data_parallel"),
        ("data_parallel", "table_wise"),
        ("column_wise", "as it is"),
    ],
    ids=str,
)
def test_shards_move_between_steps_and_no_bit_changes(
    kept_world: Callable[..., Any], alone: tuple[str, list[Any]], placement: Any, then: Any
) -> None:
    kind, (digest, outputs) = alone
    found = kept_world(3, "udp").run(CASES, "trained", placement=placement, then=then, kind=kind)
    assert [one for one, _ in found] == [digest] * 3
    assert [sample for _, samples in found for sample in samples] == outputs


def test_tensor_trains_move(kept_world: Callable[..., Any]) -> None:
    mixed = {"user": "table_wise", "genre": "data_parallel", "city": "row_wise", "item": "table_wise"}
    expected = kept_world(1).run(CASES, "trained", placement="table_wise", trains=True)[0][0]
    for then in ("data_parallel", mixed):
        found = kept_world(2).run(CASES, "trained", placement="table_wise", then=then, trains=True)
        assert [one for one, _ in found] == [expected] * 2


def test_large_buffers_are_kept_when_asked(new_world: Callable[..., Any]) -> None:
    world = new_world(1)
    assert min(world.run(CASES, "faults_of_large_buffers", keeps=False)[0]) > 1_000
    # The first ones make room.
    assert max(world.run(CASES, "faults_of_large_buffers", keeps=True)[0][-8:]) < 1_000


def test_moves_that_cannot_be_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses_moves")


@pytest.mark.parametrize("placement", ["row_wise", MIXED], ids=str)
@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_can_be_sent_ahead(
    kept_world: Callable[..., Any], alone: tuple[str, list[Any]], placement: Any, ahead: int
) -> None:
    kind, (digest, outputs) = alone
    found = kept_world(2).run(CASES, "trained", placement=placement, kind=kind, ahead=ahead)
    assert [one for one, _ in found] == [digest] * 2
    assert [sample for _, samples in found for sample in samples] == outputs


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_sent_batch_is_used_once_by_its_module(kept_world: Callable[..., Any], kind: str) -> None:
    kept_world(2).run(CASES, "misuses_sent_batches", kind=kind)


@pytest.mark.parametrize("placement", SHARDINGS)
@pytest.mark.parametrize("kind", ["sum", "mean", "none"])
def test_a_step_is_that_of_torch(kept_world: Callable[..., Any], kind: str, placement: str) -> None:
    kept_world(2).run(CASES, "like_torch", kind=kind, placement=placement)


def test_wrong_input_of_one_rank_is_refused_on_all(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses")


def test_ranks_with_different_models_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "disagrees")


@pytest.mark.parametrize("placement", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_gradient_that_is_not_finite_is_reported_on_all_ranks(
    kept_world: Callable[..., Any], kind: str, placement: str
) -> None:
    kept_world(2).run(CASES, "reports_gradients", kind=kind, placement=placement)


def test_ids_come_in_the_forms_that_programs_have(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "takes_all_forms")


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
def test_the_reference_has_the_same_bits(kept_world: Callable[..., Any], kind: str) -> None:
    world = kept_world(1)
    arguments = {"placement": "row_wise", "kind": kind}
    assert world.run(CASES, "trained", **arguments) == world.run(
        CASES, "trained", implementation="reference", **arguments
    )


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_row_that_is_used_often_travels_once(kept_world: Callable[..., Any], kind: str) -> None:
    """Ids of a Zipf distribution (1.2), as in real data: at most 0.35 of the bytes of all lookups."""
    found = kept_world(2).run(CASES, "counts_bytes", kind=kind, placement="row_wise")
    sent, naive = (sum(part) for part in zip(*found, strict=True))
    assert sent <= 0.35 * naive, sent / naive


@pytest.mark.parametrize("placement", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_backward_passes_accumulate(kept_world: Callable[..., Any], kind: str, placement: str) -> None:
    kept_world(2).run(CASES, "accumulates", kind=kind, placement=placement)


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
def test_accumulated_gradients_have_the_same_bits_in_every_world(kept_world: Callable[..., Any], kind: str) -> None:
    found = {
        digest
        for world, placement in ((1, "table_wise"), (2, "row_wise"), (3, "data_parallel"), (3, MIXED))
        for digest, _ in kept_world(world).run(CASES, "trained", placement=placement, kind=kind, passes=2)
    }
    assert len(found) == 1


@pytest.mark.parametrize("placement", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam", "lamb"])
def test_it_is_known_which_rows_changed(kept_world: Callable[..., Any], optimizer: str, placement: str) -> None:
    kept_world(2).run(CASES, "tracks_changes", placement=placement, optimizer=optimizer)
