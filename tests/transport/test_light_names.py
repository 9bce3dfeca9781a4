# SPDX-License-Identifier: Apache-2.0
"""Names that are texts: as those of `enum.StrEnum`, but for what it costs to make the class."""

from __future__ import annotations

import copy
import json
import pickle
from enum import StrEnum
from typing import Any

import pytest

from sennit.transport.config import Algorithm, TransportKind
from sennit.transport.light_names import LightNames


class Light(LightNames):
    """Two names."""

    LEFT = "left"
    """Where the heart is."""
    FAR_RIGHT = "far right"


class Plain(StrEnum):
    LEFT = "left"
    FAR_RIGHT = "far right"


@pytest.mark.parametrize(
    "use",
    [
        list,
        len,
        lambda kind: [member.name for member in kind],
        lambda kind: [member.value for member in kind],
        lambda kind: [type(member.value) for member in kind],
        lambda kind: [str(member) for member in kind],
        lambda kind: [f"{member:>12}|{member}" for member in kind],
        lambda kind: [repr(member).partition(".")[2] for member in kind],
        lambda kind: kind("left") is kind.LEFT,
        lambda kind: kind(kind.LEFT) is kind.LEFT,
        lambda kind: ("left" in tuple(kind), kind.LEFT in kind, "up" in tuple(kind)),
        lambda kind: json.dumps({"where": kind.FAR_RIGHT}),
        lambda kind: {kind.LEFT: 1}["left"],
        lambda kind: pickle.loads(pickle.dumps(kind.LEFT)) is kind.LEFT,
        lambda kind: copy.deepcopy([kind.LEFT])[0] is copy.copy(kind.LEFT) is kind.LEFT,
        lambda kind: (isinstance(kind.LEFT, kind), isinstance(kind.LEFT, str), isinstance("left", kind)),
        lambda kind: sorted([kind.LEFT, kind.FAR_RIGHT]),
    ],
)
def test_names_are_used_as_those_of_an_enum(use: Any) -> None:
    assert use(Light) == use(Plain)


@pytest.mark.parametrize("text", ["LEFT", "", "up", None, 3, ["left"]])
def test_other_texts_are_refused_as_by_an_enum(text: Any) -> None:
    messages = []
    for kind in (Light, Plain):
        with pytest.raises(ValueError, match="is not a valid") as refused:
            kind(text)
        messages.append(str(refused.value).rpartition(" ")[0])
    assert messages[0] == messages[1]


def test_classes_do_not_mix() -> None:
    assert TransportKind.UDP in tuple(TransportKind)
    assert all(type(member) is Algorithm for member in Algorithm)
    with pytest.raises(ValueError, match="'udp' is not a valid Algorithm"):
        Algorithm(TransportKind.UDP.value)
    match Algorithm("ring"):
        case Algorithm.RING:
            pass
        case _:
            pytest.fail("no match")
