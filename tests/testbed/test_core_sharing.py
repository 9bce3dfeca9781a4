# SPDX-License-Identifier: Apache-2.0
"""What steps of ranks that share cores say about the cores."""

from __future__ import annotations

import dataclasses

import pytest

from sennit.runtime.calibrate.core_sharing import MOST, Turn, found_in
from sennit.runtime.planner.constants import CONTENTION_MAX, Constants

# Two ranks a core, as the turns of one rank explain them.
FAIR = Turn(alone=1.0, some=1.0, all=2.0, serial=2.5, threaded=2.5)
DEFAULT = Constants().sharing


def turns(**changed: float) -> list[Turn]:
    """Fair turns, of which two in three are changed: the median is one of these."""
    odd = dataclasses.replace(FAIR, **changed)
    return [FAIR, odd, odd]


def test_fair_turns_cost_nothing() -> None:
    contention, sharing = found_in([FAIR], ranks=4, cores=2, contention=1.3)
    assert (contention, sharing.crowd, sharing.switches) == (1.0, 0.0, 0.0)


def test_each_cost_is_what_turns_do_not_explain() -> None:
    contention, sharing = found_in(turns(some=1.25, all=3.0, threaded=3.0), ranks=4, cores=2, contention=1.0)
    assert contention == pytest.approx(1.25)
    assert sharing.crowd == pytest.approx(3.0 / (2 * 1.25) - 1)
    assert sharing.switches == pytest.approx(3.0 / 2.5 - 1)


def test_few_more_ranks_than_cores_show_a_part_of_the_crowd() -> None:
    _, sharing = found_in(turns(all=1.8), ranks=3, cores=2, contention=1.0)
    assert sharing.crowd == pytest.approx((1.8 / 1.5 - 1) / 0.5)


def test_what_ranks_cannot_show_keeps_its_value() -> None:
    slow = turns(some=1.5, all=4.0, threaded=4.0)
    assert found_in(slow, ranks=1, cores=2, contention=1.2) == (1.2, DEFAULT)
    contention, sharing = found_in(slow, ranks=2, cores=2, contention=1.2)
    assert (contention, sharing.crowd) == (1.5, DEFAULT.crowd)
    # One core has nothing to share with another.
    assert found_in(slow, ranks=2, cores=1, contention=1.2)[0] == 1.2


def test_other_work_of_the_machine_is_cut_off() -> None:
    busy = turns(some=100.0, all=1_000.0, threaded=1_000.0)
    contention, sharing = found_in(busy, ranks=4, cores=2, contention=1.0)
    assert (contention, sharing.crowd, sharing.switches) == (CONTENTION_MAX, MOST, MOST)
