# SPDX-License-Identifier: Apache-2.0
"""Planes and private libraries for the tests of the root ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.testbed.topology import Impairment, Planes
from sennit.transport import tracepoints
from tests.testbed.trace_runs import command_prefix


@pytest.fixture(scope="module")
def planes() -> Iterator[Planes]:
    """Two hosts and two planes. Each packet has its own dice."""
    with Planes(hosts=2, planes=2, per_packet=True) as made:
        yield made


@pytest.fixture
def clear_planes(planes: Planes) -> Iterator[Planes]:
    """The planes of the module. The impairment is removed after each test."""
    try:
        yield planes
    finally:
        planes.impair(Impairment())


@pytest.fixture
def own_core(tmp_path: Path) -> Path:
    """A copy of the core. Only what runs behind `apart` uses it."""
    return tmp_path / tracepoints.LIBRARY


@pytest.fixture
def apart(own_core: Path) -> list[str]:
    """The prefix of a command whose core other processes do not use."""
    return command_prefix(tracepoints.library(), own_core)
