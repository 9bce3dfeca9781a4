# SPDX-License-Identifier: Apache-2.0
"""The scenario of a rack without running it: its settings, the rates of its links, and their picture."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios import measures, plots
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.model import Rack, Scenario, Topology
from sennit.testbed.scenarios.rack import Seen, rates_of
from sennit.testbed.scenarios.results import Case, Status
from sennit.testbed.scenarios.stage import Observations

EVENTS = [("killed aggregator", "aggregator", 11.0), ("all start again", "", 12.5)]


def test_rates_are_differences_of_two_looks() -> None:
    looks = [
        (10.0, {"p0h0": (0, 0), "p0h1": (7, 0)}),
        (11.0, {"p0h0": (100, 10), "p0h1": (7, 40)}),
        (13.0, {"p0h0": (100, 50), "p0h1": (27, 40)}),
    ]
    found = rates_of(looks, 10.0, ["rank 0", "aggregator"], EVENTS)
    assert found == {
        "times_s": [1.0, 3.0],
        "links": {
            "rank 0": {"sent": [100.0, 0.0], "received": [10.0, 20.0]},
            "aggregator": {"sent": [0.0, 10.0], "received": [40.0, 0.0]},
        },
        "events": [["killed aggregator", "aggregator", 1.0], ["all start again", "", 2.5]],
    }
    case = Case(
        name="rack",
        title="a rack",
        status=Status.PASSED,
        command="",
        impairer="bpf",
        scenario=SCENARIOS["rack"].as_json(),
    )
    assert plots.links_figure(case) is None
    case.series = found
    assert plots.timeline_figure(case) is None
    figure = plots.links_figure(case)
    assert figure is not None
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["rank 0", "aggregator"]
    # What happened to one host is written there, and what happened to all at the top.
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        ["all start again"],
        ["killed aggregator"],
    ]
    assert ">killed aggregator</text>" in plots.as_svg(figure, "rack")


def test_measures_of_a_rack_have_meanings() -> None:
    seen = Observations(scenario=SCENARIOS["rack"], seed=1)
    seen.rack = Seen(digests=["ab", "ab"], measures={"trainings": 2, "rack.kills": 3, "distinct_digests": 1})
    found = measures.measure(seen)
    assert found == seen.rack.measures
    assert {measures.family(goal.measure) for goal in SCENARIOS["rack"].goals} <= set(measures.MEANINGS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kill_steps": (9, 5, 30)}, r"kill_steps \(9, 5, 30\) of 400 steps"),
        ({"kill_steps": (5, 9, 500)}, "allowed: ascending, within the run"),
        ({"checkpoint_every": 290}, "and a checkpoint before the last"),
        ({"rate_mbit": 0}, "rate 0; allowed: 1 or more"),
        ({"victim": 2}, "4 hosts, of which rank 2 is killed"),
    ],
)
def test_racks_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(name="s", title="", topology=Topology(hosts=4, planes=1), job=Rack(**given))
