# SPDX-License-Identifier: Apache-2.0
"""A lookup that another thread makes, while this one does what needs no vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor


class Running(Protocol):
    """A call in another thread."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> Any:
        """Waits for its result. Raises its error."""


class Done:
    """A call that was made at once."""

    is_done = True

    def __init__(self, found: Any) -> None:
        self._found = found

    def result(self) -> Any:
        return self._found


RunBeside = Callable[[str, Callable[[], Any]], Running]
"""(name, function) -> the call of the function, in a thread that makes all calls in order."""


class Pending(Mapping[str, Tensor]):
    """Results of a lookup, by feature. The first use waits for them."""

    def __init__(self, wait: Callable[[], dict[str, Tensor]]) -> None:
        self._wait = wait
        self._found: dict[str, Tensor] | None = None

    def wait(self) -> dict[str, Tensor]:
        """The results. The backward pass of what was computed before this call follows that of the lookup."""
        if self._found is None:
            self._found = self._wait()
        return self._found

    def __getitem__(self, name: str) -> Tensor:
        return self.wait()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())
