# SPDX-License-Identifier: Apache-2.0
"""Batches ahead that have no room in memory are refused on all ranks before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from sennit.runtime.pipeline import room
from sennit.runtime.pipeline.room import Need, fitting, host_bytes, refusal
from sennit.transport.errors import ConfigError
from tests.runtime.pipeline_model import Batch, Model, batches, pipeline
from tests.runtime.trainer_runs import trainer
from tests.runtime.world import WorldFactory


def crowded_pipeline(rank: int, world: int, depth: int, left: int) -> list[Any]:
    """When the first batch is there the host has so many bytes left.

    The error, steps, batches that were taken, and whether weights changed.
    """
    model, taken = Model("row_wise"), []
    before = model.digest()

    def watched() -> Iterator[Batch]:
        for batch in batches(model):
            taken.append(batch)
            yield batch

    steps, told = 0, "no error"
    with mock.patch.object(room, "available_bytes", return_value=left):
        try:
            with pipeline(model, watched(), batches_ahead=depth) as run:
                for _ in run:
                    steps += 1
        except ConfigError as error:
            told = str(error)
    return [told, steps, len(taken), model.digest() != before]


def crowded_trainer(rank: int, world: int, /, *, seed: int, left: int, **changed: Any) -> list[Any]:
    """The host has so many bytes left after the first batch. Steps that were taken of one, and the error."""
    told = "no error"
    with mock.patch.object(room, "available_bytes", return_value=left), trainer(seed, **changed) as run:
        try:
            run.train_step()
        except ConfigError as error:
            told = str(error)
        return [run.step, told]


def need(host: str, available: int, ahead: int = 30) -> Need:
    return Need(host=host, step=100, ahead=ahead, looked_up=50, available=available)


@pytest.mark.parametrize(
    ("available", "depth"), [(99, None), (100, 0), (179, 0), (180, 1), (209, 1), (210, 2), (240, 3), (1 << 40, 3)]
)
def test_the_depth_that_fits_is_the_most_that_has_room(available: int, depth: int | None) -> None:
    assert fitting([need("a", available)], 3) == depth
    assert (refusal([need("a", available)], 3) is None) == (depth == 3)


def test_a_refusal_names_ranks_bytes_and_depths() -> None:
    roomy, crowded = need("a", 10_000), need("b", 1_400, ahead=1_000)
    assert refusal([roomy, crowded], 2) == (
        "2 batches ahead of a step: rank 1 needs 2,150 bytes, 1,000 of them for each batch ahead, and 1,400 bytes are "
        "left there; 1 batch ahead would fit. Give 1, or smaller batches"
    )
    # Two ranks of a host share its memory. What they measured differs.
    assert refusal([crowded, roomy, need("b", 1_300)], 1) == (
        "1 batch ahead of a step: ranks 0, 2 of one host need 1,330 bytes, 1,030 of them for each batch ahead, and "
        "1,300 bytes are left there; 0 batches ahead would fit. Give 0, or smaller batches"
    )
    assert str(refusal([need("a", 99)], 1)).endswith(
        "99 bytes are left there; a step alone does not fit: give smaller batches, or more hosts"
    )


@dataclass
class OwnBatch:
    ids: dict[str, Any]
    dense: Any
    name: str = "ours"


def test_bytes_of_a_batch_count_each_tensor_once() -> None:
    ids, dense = torch.zeros(10, dtype=torch.int64), np.zeros((4, 2), np.float32)
    batch = OwnBatch({"user": ids, "again": ids, "part": ids[:3]}, [dense, (torch.zeros(5), None)])
    assert host_bytes(batch) == 80 + 24 + 32 + 20
    # A tensor of a device takes no host memory.
    assert host_bytes([torch.empty(1_000, device="meta"), ids]) == 80
    # What another object leads to may be anything: a data set, say.
    assert host_bytes(SimpleNamespace(values=ids, source=SimpleNamespace(everything=torch.zeros(100)))) == 80
    endless: list[Any] = [ids]
    endless.append(endless)
    assert host_bytes(endless) == 80


def test_a_pipeline_without_room_is_refused_before_its_first_step(kept_world: WorldFactory) -> None:
    """What it says it needs is what it needs, and the depth that it names does run."""

    def taken(depth: int, left: int) -> Any:
        first, second = kept_world(2).run(crowded_pipeline, depth=depth, left=left)
        assert first == second
        return first

    told, steps, batches, is_changed = taken(3, 0)
    assert (steps, batches, is_changed) == (0, 1, False)
    assert told.endswith("0 bytes are left there; a step alone does not fit: give smaller batches, or more hosts")
    needed = int(told.split("ranks 0, 1 of one host need ")[1].split(" bytes")[0].replace(",", ""))
    assert taken(3, needed) == ["no error", 4, 4, True]
    told, steps, batches, is_changed = taken(3, needed - 1)
    assert (steps, batches, is_changed) == (0, 1, False)
    assert told.endswith(f"{needed - 1:,} bytes are left there; 2 batches ahead would fit. Give 2, or smaller batches")
    assert taken(2, needed - 1) == ["no error", 4, 4, True]
    # Nothing is ahead that could be refused.
    assert taken(0, 0) == ["no error", 4, 4, True]


def test_a_trainer_without_room_is_refused_before_its_first_step(kept_world: WorldFactory, seed: int) -> None:
    for step, told in kept_world(2).run(crowded_trainer, seed=seed, batches_ahead=2, left=100):
        assert step == 0
        assert told.startswith("2 batches ahead of a step: ranks 0, 1 of one host need ")
    for step, told in kept_world(2).run(crowded_trainer, seed=seed, batches_ahead=2, left=1 << 30):
        assert (step, told) == (1, "no error")
