# SPDX-License-Identifier: Apache-2.0
"""Learning rates by step, against torch's schedulers and the formulas of DLRM's reference code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sennit.runtime.model.schedule import RateSchedule
from sennit.transport.errors import ConfigError


def rates_of(made: object, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    assert isinstance(made, lr_scheduler.LRScheduler)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_linear_decay_ends_at_zero() -> None:
    schedule = RateSchedule(decay="linear", decay_end=4)
    assert [schedule(step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert {RateSchedule()(step) for step in range(6)} == {1.0}


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_polynomial_decay_is_that_of_torch(power: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    wanted = rates_of(lr_scheduler.PolynomialLR(optimizer, 7, power), optimizer, 10)
    schedule = RateSchedule(decay="polynomial", decay_end=7, power=power)
    assert [schedule(step) for step in range(10)] == pytest.approx(wanted, abs=1e-12)


def test_warm_up_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    wanted = rates_of(lr_scheduler.LinearLR(optimizer, start_factor=1 / 5, total_iters=4), optimizer, 8)
    schedule = RateSchedule(warmup_steps=5)
    assert [schedule(step) for step in range(8)] == pytest.approx(wanted)


def test_warm_up_plateau_and_decay_follow_the_reference_code() -> None:
    """DLRM counts steps from 1: n / warm-up, then 1, then ((end - n) / length of the decay)^2."""
    warmup, start, length = 4, 6, 5
    schedule = RateSchedule(decay="polynomial", warmup_steps=warmup, decay_start=start, decay_end=start + length)
    for number in range(1, start + length + 1):
        if number <= warmup:
            wanted = number / warmup
        elif number <= start:
            wanted = 1.0
        else:
            # The reference's first step of the decay, number start + 1, is where our rate is still 1.
            wanted = ((start + length - (number - 1)) / length) ** 2
        assert schedule(number - 1) == pytest.approx(wanted), number


def test_a_floor_is_kept() -> None:
    schedule = RateSchedule(decay="linear", decay_end=10, floor=0.35)
    assert [schedule(step) for step in (0, 6, 7, 9, 10, 99)] == [1.0, 0.4, 0.35, 0.35, 0.35, 0.35]


@pytest.mark.parametrize(
    ("field", "value"),
    [("decay", "cosine"), ("warmup_steps", -1), ("decay_start", 2), ("decay_end", 3), ("power", 0.0), ("floor", 1.5)],
)
def test_schedules_out_of_range_are_refused(field: str, value: object) -> None:
    good = {"decay": "linear", "warmup_steps": 3, "decay_end": 9}
    with pytest.raises(ConfigError, match=f"{field.replace('_', ' ')} {value!r}; allowed"):
        RateSchedule(**(good | {field: value}))  # type: ignore[arg-type]
