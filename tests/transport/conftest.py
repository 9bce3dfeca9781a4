# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the transport's tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture
def little_locked_memory() -> Iterator[int]:
    """Limits the bytes of memory that this process may lock, for the time of a test. Yields the limit."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    yield 65536
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
