# SPDX-License-Identifier: Apache-2.0
"""Host tensors in the part of an accelerator's, where there is none (runtime/backend/csrc/stand_in.hpp)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sennit.runtime.backend.process_group import _load_extension


@contextmanager
def on_device(active: bool = True) -> Iterator[None]:
    """Calls of this thread on host tensors go the way of calls on device tensors, as long as `active` says so."""
    stand_in = _load_extension().stand_in
    before = stand_in.set_active(active)
    try:
        yield
    finally:
        stand_in.set_active(before)


@contextmanager
def delayed_copies(seed: int, max_yields: int) -> Iterator[None]:
    """Each copy between "device" and host first yields the processor up to `max_yields` times, drawn from `seed`."""
    stand_in = _load_extension().stand_in
    stand_in.delay_copies(seed, max_yields)
    try:
        yield
    finally:
        stand_in.delay_copies(0, 0)
