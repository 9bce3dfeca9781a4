# SPDX-License-Identifier: Apache-2.0
"""What a benchmark measures now, in a line on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Update(Protocol):
    """Says what is measured, and how much of it is done."""

    def __call__(self, what: str, done: int | None = None, total: int | None = None, /) -> None: ...


@contextlib.contextmanager
def progress() -> Iterator[Update]:
    """The line. It goes when the measuring ends."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done=None, total=None: bar.update(task, description=what, completed=done, total=total)
