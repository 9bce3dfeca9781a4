# SPDX-License-Identifier: Apache-2.0
"""`SlicedReplicas` whose gradients are summed with a codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)

CASES = "replica_codec_cases.py"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_the_definition(kept_world: Callable[..., Any], world: int) -> None:
    kept_world(world).run(CASES, "as_defined")


@pytest.mark.parametrize("world", [1, 2])
def test_error_feedback_survives_a_restart(kept_world: Callable[..., Any], world: int) -> None:
    kept_world(world).run(CASES, "goes_on")


def test_codecs_that_cannot_be_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses")
