# SPDX-License-Identifier: Apache-2.0
"""Host tensors in place of an accelerator's, for machines without one (runtime/backend/csrc/stand_in.hpp)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sennit.runtime.backend.process_group import load_extension


@contextmanager
def on_device(active: bool = True) -> Iterator[None]:
    """Makes this thread's calls on host tensors take the way of device tensors, if `active`."""
    stand_in = load_extension().stand_in
    before = stand_in.set_active(active)
    try:
        yield
    finally:
        stand_in.set_active(before)


@contextmanager
def delayed_copies(seed: int, max_us: int) -> Iterator[None]:
    """Lets every second copy between "device" and host, drawn from `seed`, first sleep up to `max_us`."""
    stand_in = load_extension().stand_in
    stand_in.delay_copies(seed, max_us)
    try:
        yield
    finally:
        stand_in.delay_copies(0, 0)
