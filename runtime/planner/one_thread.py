# SPDX-License-Identifier: Apache-2.0
"""Work on one thread of torch, as each rank does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: times then say what a rank takes, and sums depend on no thread count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
