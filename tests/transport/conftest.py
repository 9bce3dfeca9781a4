# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the transport's tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture
def little_locked_memory() -> Iterator[int]:
    """For the time of a test this process may lock so few bytes of memory."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    yield 65536
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
