# SPDX-License-Identifier: Apache-2.0
"""Planes and private libraries for the tests of the root ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sennit.transport import tracepoints
from tests.testbed.trace_runs import command_prefix

if TYPE_CHECKING:
    from sennit.testbed.topology import Planes


@pytest.fixture(scope="module")
def planes() -> Iterator[Planes]:
    """Two hosts and two planes. Each packet has its own dice."""
    from sennit.testbed.topology import Planes  # needs pyroute2, which a GPU machine may lack

    with Planes(hosts=2, planes=2, per_packet=True) as made:
        yield made


@pytest.fixture
def clear_planes(planes: Planes) -> Iterator[Planes]:
    """The planes of the module. The impairment is removed after each test."""
    from sennit.testbed.topology import Impairment

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
