# SPDX-License-Identifier: Apache-2.0
"""Overlapped steps have the bits of serial ones, and nothing hangs when one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CASES = "pipeline_cases.py"
# Of each world. 500 of two worlds make the thousand that the project promises.
SCHEDULES = [12, pytest.param(500, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def serial(kept_world: Callable[..., Any]) -> Any:
    return kept_world(1).run(CASES, "serial", placement="table_wise")[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedules", SCHEDULES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_schedule_changes_a_bit(
    kept_world: Callable[..., Any], serial: Any, world: int, schedules: int, seed: int
) -> None:
    for first in range(0, schedules, 50):
        count = min(50, schedules - first)
        for found in kept_world(world).run(
            CASES, "schedules", placement="row_wise", first=seed * 10_000 + first, count=count
        ):
            assert len(found) == 1
            assert found[0][0] == serial[0]


def test_records_say_when_and_where_tasks_ran(kept_world: Callable[..., Any]) -> None:
    for records in kept_world(2).run(CASES, "recorded"):
        assert all(rises for *_, rises, _ in records)
        by_task = {(name, step): (thread, inputs, error) for name, step, thread, inputs, _, error in records}
        assert by_task["step", 0] == ("main", [], None)
        assert by_task["AllReduce", 1] == ("gradients", [], None)
        assert by_task["input", 1] == ("input", [], None)
        assert by_task["ids", 0] == ("ids", [["input", 0]], None)
        assert by_task["ids", 1] == ("ids", [["input", 1], ["ids", 0]], None)
        assert by_task["ids", 2][2] == "InputEnded"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_of_a_loader_is_told_to_all(kept_world: Callable[..., Any], depth: int) -> None:
    *others, last = kept_world(2).run(CASES, "loader_raises", depth=depth)
    assert last[:2] == [2, "OSError: the disk is gone"]
    for other in others:
        assert other[0] == 2
        assert other[1].startswith("PeerInputError: the input of rank 1 is wrong")
        assert other[2] == last[2]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_training_ends_with_the_shortest_loader(kept_world: Callable[..., Any], depth: int) -> None:
    found = kept_world(2).run(CASES, "loader_ends", depth=depth)
    assert all(steps == [2, 2] for steps, _ in found)
    assert found[0][1] == found[1][1] == kept_world(1).run(CASES, "loader_ends", depth=0)[0][1]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loop_may_be_left(kept_world: Callable[..., Any], depth: int) -> None:
    found = kept_world(2).run(CASES, "left_early", depth=depth)
    assert found == kept_world(1).run(CASES, "left_early", depth=0) * 2


@pytest.mark.parametrize("where", ["input", "ids", "step", "AllReduce"])
def test_a_rank_that_dies_is_named(new_world: Callable[..., Any], where: str) -> None:
    survivor, victim = new_world(2).run(CASES, "dies", victim=1, where=where)
    assert victim is None
    assert "rank 1" in survivor
    assert "no error" not in survivor


def test_mistakes_are_refused(kept_world: Callable[..., Any]) -> None:
    for deep, negative, without, copied in kept_world(2).run(CASES, "refused"):
        assert deep == "4 batches ahead; allowed: 0 to 3"
        assert negative == "-1 batches ahead; allowed: 0 to 3"
        assert without.startswith("a model without sharded tables")
        assert copied.startswith("the model did not call ShardedEmbeddingBags with the object that was sent")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_bad_gradient_is_told_with_the_next_ids(kept_world: Callable[..., Any], depth: int) -> None:
    """Always after the same step: when the first batch arrives that was begun after the bad pass."""
    for steps, error in kept_world(2).run(CASES, "bad_gradient", depth=depth):
        assert (steps, error) == (2 + depth, "GradientError")
