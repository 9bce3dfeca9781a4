# SPDX-License-Identifier: Apache-2.0
"""How much of a test `make test` runs. The long tests (`--long`) run all of it.

A test of random examples draws `examples(20)`, and ten times as many in the long tests. A test of many cases names
those that stand for the others: `briefly(product(TRANSPORTS, WORLDS), [("shm", 2), ("udp", 3)])`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

# Hypothesis would also draw numbers and texts that it finds in the files of all our modules that are imported by then.
# To read them takes seconds of each process, and what a seed draws would depend on what else was imported.
providers._get_local_constants = lambda: providers._local_constants

TIMES = 10
# conftest.py sets it before it imports a file of tests.
is_long = False


def number(count: int) -> int:
    return count * TIMES if is_long else count


def examples(count: int, **options: Any) -> hypothesis.settings:
    """Settings of a test that draws `count` examples, or ten times as many; `options`: further ones of hypothesis."""
    return hypothesis.settings(max_examples=number(count), **options)


def briefly(every: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test: `every` case, a value or a tuple of values. All but those `kept` are marked `long`."""
    cases = list(every)
    assert kept
    assert not [case for case in kept if case not in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in kept else [pytest.mark.long])
        for case in cases
    ]
