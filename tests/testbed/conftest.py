# SPDX-License-Identifier: Apache-2.0
"""Planes for the tests of the root ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sennit.testbed.topology import Impairment, Planes


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
