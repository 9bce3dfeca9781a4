# SPDX-License-Identifier: Apache-2.0
"""Tuples with named fields: as those of `typing.NamedTuple`, but for what it costs to make the class."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from sennit.transport.light_tuple import LightTuple


class Light(LightTuple):
    """Three fields, two of them with defaults."""

    low: int
    high: int = 9
    name: str = ""

    @property
    def size(self) -> int:
        return self.high - self.low


class Plain(NamedTuple):
    low: int
    high: int = 9
    name: str = ""


@pytest.mark.parametrize(
    ("given", "named"),
    [((1,), {}), ((1, 2, "a"), {}), ((), {"low": 3}), ((1,), {"name": "b"}), ((), {"name": "c", "high": 4, "low": 5})],
)
def test_it_holds_what_a_named_tuple_holds(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    light, plain = Light(*given, **named), Plain(*given, **named)
    assert light == tuple(plain)
    assert hash(light) == hash(plain)
    assert (light.low, light.high, light.name) == (plain.low, plain.high, plain.name)
    assert repr(light) == repr(plain).replace("Plain", "Light")
    assert light._asdict() == plain._asdict()
    assert light._replace(high=7) == tuple(plain._replace(high=7))
    assert type(light._replace(high=7)) is Light
    assert light.size == light.high - light.low


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ((), {}, "Light without low; allowed: a value for each field"),
        ((1, 2, "a", 4), {}, "Light of 4 values; allowed: at most 3"),
        ((1,), {"low": 2}, "Light with low; allowed: high, name"),
        ((1, 2, "a"), {"width": 3}, "Light with width; allowed: no more"),
    ],
)
def test_it_refuses_what_a_named_tuple_refuses(given: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError):
        Plain(*given, **named)
    with pytest.raises(TypeError, match=f"^{said}$"):
        Light(*given, **named)


def test_it_is_frozen_matched_copied_and_pickled() -> None:
    light = Light(1, name="a")
    for name in ("low", "other"):
        with pytest.raises(AttributeError):
            setattr(light, name, 2)
    match light:
        case Light(low, high, name):
            assert (low, high, name) == light
    for again in (copy.copy(light), copy.deepcopy(light), pickle.loads(pickle.dumps(light))):
        assert again == light
        assert type(again) is Light


# The modules that a rank imports for its group and its first AllReduce on one host, after what torch has imported. Text
# that is compiled in each process comes from dataclasses and named tuples.
_IMPORTS = """
import dataclasses, difflib, inspect, numpy, socket, sys
texts = []
sys.addaudithook(lambda event, about: texts.append(about) if event == "compile" and about[1] == "<string>" else None)
import sennit.transport.communicator, sennit.transport.choice.selection, sennit.transport.plans.plan_codec
import sennit.transport.algorithms.allreduce, sennit.transport.algorithms.allreduce_round_trip
print(len(texts))
"""


def test_few_texts_are_compiled_when_a_group_starts() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    # Those of `Config`, a dataclass, and one of a type variable. With named tuples they were 169.
    assert int(done.stdout) <= 8


class Heavier(Light):
    weight: float = 0.5


class Named(Light):
    """Another name for the same."""


def test_a_class_behind_another_has_its_fields() -> None:
    assert Named(1, 2) == Light(1, 2)
    assert (Named(1, high=3).high, Named(low=1).name) == (3, "")
    assert type(Named(1)._replace(low=4)) is Named
    assert Heavier(1, weight=2.0)._asdict() == {"low": 1, "high": 9, "name": "", "weight": 2.0}
    assert Heavier(1, 2, "a", 4.0).weight == 4.0
