# SPDX-License-Identifier: Apache-2.0
"""What a predicted step hides: threads beside the model, on idle cores and while the network is waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.problem import Fixed, Problem
from sennit.runtime.planner.schedule import AHEAD, GRADIENTS, PHASES, VECTORS, Schedule, Time
from sennit.runtime.planner.search import Found, rate
from sennit.runtime.planner.step_time import Rating
from sennit.runtime.planner.usage import uses
from sennit.runtime.sharded.tables import Table
from tests.extent import examples


def schedule(cores: float = 3.0, **changed: Any) -> Schedule:
    given: dict[str, Any] = {"ahead": False, "tables_beside": False, "looks_ahead": True, "switches": 0.0}
    given |= {"early": Time(0.5), "optimizer": Time(0.5)}
    return Schedule(cores=cores, **{**given, **changed})


def times(**changed: Time) -> dict[str, Time]:
    """A model of 4 s that waits 1 s for its AllReduce, and tables of 2 s of a processor and 3 s of waiting."""
    found = {phase: Time() for phase in PHASES}
    found |= {"dense": Time(4.0), "AllReduce": Time(0.0, 1.0, 1.0), "lookup": Time(1.0), "update": Time(1.0)}
    found |= {"pooled exchange": Time(0.0, 1.5, 1.5), "gradient exchange": Time(0.0, 1.5, 1.5)}
    return found | {name.replace("_", " "): time for name, time in changed.items()}


def step(given: Schedule, of: dict[str, Time]) -> float:
    return float(sum(given.exposed(of).values()))


def test_nothing_hides_in_a_serial_step() -> None:
    assert schedule().exposed(times()) == {phase: time.seconds for phase, time in times().items()}


def test_tables_hide_behind_what_needs_no_vectors_and_no_gradients() -> None:
    """Of the model's 4 s 0.5 are early, 0.5 the optimizer; with the AllReduce that is 2 s. Tables take 5."""
    found = schedule(tables_beside=True).exposed(times())
    assert found["dense"] == 4
    assert found["AllReduce"] == 1
    assert sum(found[phase] for phase in (*VECTORS, *GRADIENTS)) == pytest.approx(3)
    assert found["lookup"] / found["pooled exchange"] == pytest.approx(1 / 1.5)


def test_on_one_core_waiting_hides_and_work_does_not() -> None:
    nothing = {name: Time() for name in ("pooled_exchange", "gradient_exchange", "AllReduce")}
    of = times(lookup=Time(2.0), update=Time(2.0), **nothing)
    # 4 s of tables' work, 1 s of the model's early part and optimizer.
    assert step(schedule(1.0, tables_beside=True), of) == pytest.approx(3 + 5)
    assert step(schedule(2.0, tables_beside=True), of) == pytest.approx(3 + 4)
    of["AllReduce"] = Time(0.0, 5.0)
    assert step(schedule(1.0, tables_beside=True), of) == pytest.approx(3 + 6)


def test_two_transfers_cannot_use_a_link_at_once() -> None:
    of = times(AllReduce=Time(0.0, 4.0, 4.0), lookup=Time(), update=Time())
    assert step(schedule(tables_beside=True), of) == pytest.approx(3 + 4 + 3)


def test_rows_in_files_are_looked_up_in_their_own_step() -> None:
    """Then vectors hide behind the early part's forward pass alone."""
    ahead, own = (step(schedule(tables_beside=True, looks_ahead=looks), times()) for looks in (True, False))
    assert own == pytest.approx(3 + 2.5 + 2.5)
    assert ahead == pytest.approx(3 + 5)
    of = times(gradient_exchange=Time(), update=Time())
    assert step(schedule(tables_beside=True, looks_ahead=False), of) > step(schedule(tables_beside=True), of)


def test_a_thread_costs_switches_where_all_cores_are_in_use() -> None:
    found = [step(schedule(cores, ahead=True, switches=0.1), times()) / step(schedule(), times()) for cores in (1, 2)]
    assert found == pytest.approx([1.1, 1])


parts = st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1)).map(
    lambda three: Time(three[0], three[1], three[1] * three[2])
)


@examples(15)
@given(
    st.fixed_dictionaries(dict.fromkeys(PHASES, parts)),
    st.sampled_from([1.0, 1.5, 2.0, 8.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_step_takes_no_longer_than_all_of_it_and_no_less_than_its_longest_part(
    of: dict[str, Time], cores: float, ahead: bool, tables_beside: bool, looks_ahead: bool
) -> None:
    dense = of["dense"]
    early, optimizer = dense.times(0.3), dense.times(0.2)
    given = schedule(
        cores, ahead=ahead, tables_beside=tables_beside, looks_ahead=looks_ahead, early=early, optimizer=optimizer
    )
    found = given.exposed(of)
    total = sum(time.seconds for time in of.values())
    assert all(0 <= found[phase] <= of[phase].seconds + 1e-9 for phase in PHASES)
    took = sum(found.values())
    assert took <= total + 1e-9
    threads = [AHEAD, (*VECTORS, *GRADIENTS), [one for one in PHASES if one not in (*AHEAD, *VECTORS, *GRADIENTS)]]
    assert took >= max(sum(of[phase].seconds for phase in phases) for phases in threads) - 1e-9
    assert took >= sum(time.busy for time in of.values()) / min(cores, 3) - 1e-9
    assert took >= sum(time.link for time in of.values()) - 1e-9


def planned(*, tables_beside: bool, gbit: float, early_s: float = 0.0) -> Found:
    """Two hosts with a rank each, and cores to spare."""
    tables = tuple(Table(name=f"t{number}", rows=1_000, dim=256) for number in range(4))
    problem = Problem(
        tables=tables,
        uses=tuple(uses(tables, [5.0] * 4, None, 1.0)),
        cluster=Cluster(ranks=2, local_ranks=1, cores=4, gbit=gbit),
        constants=Constants(),
        batch=8_192,
        slices=2,
        fixed=Fixed(slice_s=0.1, early_s=early_s, update_s=1e-3, gradient_bytes=1 << 16),
        ahead=True,
        tables_beside=tables_beside,
    )
    return rate(Rating(problem), "", [np.full((1, 1), number % 2) for number in range(4)])


def test_a_planned_step_hides_exchanges_behind_the_part_of_the_model_that_is_early() -> None:
    serial, beside, early = (
        planned(tables_beside=False, gbit=1.0),
        planned(tables_beside=True, gbit=1.0),
        planned(tables_beside=True, gbit=1.0, early_s=0.05),
    )
    assert serial.phases["dense"] == beside.phases["dense"] == early.phases["dense"]
    hidden = serial.seconds - early.seconds
    assert hidden > serial.seconds - beside.seconds
    # All of the early part hides tables, which take longer.
    assert early.phases["pooled exchange"] > 0
    assert beside.seconds - early.seconds == pytest.approx(0.05, rel=0.01)
