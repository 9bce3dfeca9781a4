# SPDX-License-Identifier: Apache-2.0
"""The trainer on a device: the bits of the trainer in host memory, and checkpoints that either reads.

`device_double` stands for the GPU: it finds operations that mix devices, and counts waits.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

pytest.importorskip("torch")

from sennit.runtime.training.display import ConsoleDisplay
from sennit.runtime.training.trainer import StepReport

pytestmark = pytest.mark.timeout(180)

CASES = "training_device_cases.py"
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "increments": {"checkpoint_increments": 4, "sharding": "row_wise", "row_shards": 4, "checkpoint_async": True},
    "stored": {"sharding": "row_wise", "row_shards": 4, "checkpoint_increments": 4},
    "coded": {"exchange": "int8"},
    "others": {"dense_optimizer": "adam", "clip_norm": 0.01, "sharding": "data_parallel", "gradient": "int8"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_it_has_the_bits_of_host_memory(kept_world: Any, seed: int, tmp_path: Path, plan: str) -> None:
    """Each run also goes on from the other's checkpoint."""
    world = kept_world(2)
    plan_of = PLANS[plan] | ({"rows": str(tmp_path)} if plan == "stored" else {})

    def trained(*, there: bool, folder: str, resumed: bool = False) -> Any:
        found = world.run(
            CASES, "train", seed=seed, there=there, folder=str(tmp_path / folder), resumed=resumed, **plan_of
        )
        # The gradients of a step, which travel from host memory; numbers of rows of replicated tables; changed rows of
        # files, with their states; and what is coded on its way, there and back.
        waits_of_step = {"others": 2, "stored": 3, "coded": 3}.get(plan, 1)
        assert {waits for _, waits in found} == {there * waits_of_step * (2 if resumed else 6)}
        return [result for result, _ in found]

    wanted = trained(there=False, folder="host")
    assert trained(there=True, folder="device") == wanted
    if plan != "others":
        assert trained(there=True, folder="host", resumed=True) == wanted
        assert trained(there=False, folder="device", resumed=True) == wanted


@pytest.mark.parametrize("ahead", [1, 3])
def test_input_is_copied_there_beside_the_steps_before(kept_world: Any, seed: int, ahead: int) -> None:
    """The double refuses to let the host wait for a stream, an event or the device."""
    steps = 4
    for streams in kept_world(2).run(CASES, "uploaded", seed=seed, ahead=ahead, steps=steps):
        step, samples, *tables = (streams.pop(name) for name in ("step", "copies 1", *sorted(streams)[1:-1]))
        # Dense features and labels.
        assert samples == ["copy", "copy", "record"] * (steps + ahead)
        assert step.count("waits for copies 1") == steps
        # Lengths and ids, which the lookup and the update read.
        assert tables
        assert all(ids == samples for ids in tables)
        for number in range(2, 2 + len(tables)):
            assert step.count(f"waits for copies {number}") == 2 * steps
        assert step.count("keeps a tensor") == 2 * sum(what.startswith("waits") for what in step)


def test_a_step_that_did_not_wait_for_its_copies_would_be_seen(kept_world: Any, seed: int) -> None:
    assert kept_world(2).run(CASES, "not_awaited", seed=seed) == ["nan"] * 2


def test_a_handover_keeps_them(kept_world: Any, seed: int) -> None:
    wanted = kept_world(2).run(CASES, "handed_over", seed=seed, there=False)
    assert wanted[0][0] == wanted[0][1]
    assert kept_world(2).run(CASES, "handed_over", seed=seed, there=True) == wanted
    # Error feedback belongs to a place in the old group. It begins at zero.
    coded = kept_world(2).run(CASES, "handed_over", seed=seed, there=False, gradient="int8")
    assert coded[0] == coded[1]
    assert coded[0][0] != coded[0][1]


def test_no_broken_weights_are_saved(kept_world: Any, seed: int, tmp_path: Path) -> None:
    """Nothing waits for the loss of a step but what shows it or needs it."""
    told = "[1, 2] 3 TrainingError, [] 4 GradientError"
    assert kept_world(2).run(CASES, "broken", seed=seed, folder=str(tmp_path)) == [told] * 2


def test_tables_get_the_memory_of_their_gpu(kept_world: Any) -> None:
    assert kept_world(3).run(CASES, "limits") == [[900, 900, 450]] * 3


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_display_reads_the_losses_that_it_shows(is_terminal: bool) -> None:
    """Reading one waits for the device."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120)
    display = ConsoleDisplay(console, batch_size=4)
    losses = [mock.MagicMock(**{"__float__.return_value": float(number)}) for number in range(1000)]
    for step, loss in enumerate(losses):
        display.on_step(StepReport(step=step + 1, step_count=1000, epoch=0, samples=4, loss_sum=loss))
    display.close()
    assert sum(loss.__float__.called for loss in losses) < len(losses) - 100
    assert ("loss 249.7500" in shown.getvalue()) == is_terminal
