# SPDX-License-Identifier: Apache-2.0
"""A batch that was sent: its ids are with the owners of their rows, and another thread may look it up already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from sennit.runtime.sharded.exchange import Arrived
from sennit.transport.errors import ArgumentError


class Running(Protocol):
    """A call that another thread makes."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> Any:
        """Waits for the call. Returns its result, or raises its error."""


class Done:
    """A call that was made at once."""

    is_done = True

    def __init__(self, found: Any) -> None:
        self._found = found

    def result(self) -> Any:
        return self._found


RunBeside = Callable[[str, Callable[[], Any]], Running]
"""`run(name, function)` has another thread call `function`. That thread makes all calls in order."""


class Pending(Mapping[str, Tensor]):
    """The results of a lookup by feature, while another thread makes the lookup. The first use waits for them."""

    def __init__(self, wait: Callable[[], dict[str, Tensor]]) -> None:
        self._wait = wait
        self._found: dict[str, Tensor] | None = None

    def wait(self) -> dict[str, Tensor]:
        """The results. The backward pass visits the lookup before everything that was computed before this call."""
        if self._found is None:
            self._found = self._wait()
        return self._found

    def __getitem__(self, name: str) -> Tensor:
        return self.wait()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())


class InputEnded(ArgumentError):
    """A rank has no further batch. All ranks raise this error where they would send one."""


class Refused:
    """Stands for a batch that a rank does not have. Sending it raises `error` there, and errors on all other ranks."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Sent:
    """A batch that a module of sharded tables has sent. One call of the module takes it, or `drop` does."""

    def __init__(
        self,
        sender: object,
        arrived: Sequence[Sequence[Arrived]],
        *,
        lengths: Tensor,
        result_rows: Sequence[int],
        weights: Tensor | None,
    ) -> None:
        """`sender`: an object that this module alone has, until its shards move."""
        self._sender = sender
        self._fate: str | None = None
        self.arrived = arrived
        """The ids that came to this rank, for each exchange of each of its engines."""

        self.lengths = lengths
        """Int32 or int64 [F, B]: the ids of each sample in each feature, ignored ones among them."""

        self.result_rows = result_rows
        """The rows of the result of each feature."""

        self.weights = weights
        """The weights of this rank's ids, if they require gradients."""

        self.trained: frozenset[int] = frozenset()
        """The tables whose rows it will update, if it is looked up with gradients."""

        self.lookup: Running | None = None
        """The lookup of this batch, if another thread has begun it before the call."""

        self.versions = 0
        """`TableSteps.versions` when that lookup began."""

    def take(self, sender: object, fate: str) -> None:
        """Gives the batch to `sender`, once. `fate`: what becomes of it, for the error of a second call.

        Raises `ArgumentError` for another sender, and for a batch that was taken before.
        """
        if sender is not self._sender:
            what = "a batch that another module sent, or this one before its shards moved"
            raise ArgumentError(f"{what}; allowed: one of this module")
        if self._fate is not None:
            raise ArgumentError(
                f"a sent batch is to be {fate}, but it was {self._fate} before; allowed: one of them, once"
            )
        self._fate = fate
