# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the transport's tests."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport.processes import Group, Scenario


@pytest.fixture
def little_locked_memory() -> Iterator[int]:
    """Limits the bytes of memory that this process may lock, for the time of a test. Yields the limit."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    yield 65536
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """`launch(scenario, hosts, **options)`: the processes of a scenario, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(scenario: Scenario, hosts: str, **options: Any) -> Group:
            return stack.enter_context(Group(scenario, hosts, tmp_path, **options))

        yield start
