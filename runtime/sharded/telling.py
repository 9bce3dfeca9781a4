# SPDX-License-Identifier: Apache-2.0
"""Calls of a user's function that hears of evicted rows. Other ranks are not there: what waits for them is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from sennit.runtime.backend.torch_versions import TorchDispatchMode
from sennit.runtime.sharded.shards import Evicted
from sennit.transport.errors import ArgumentError

NOTE: Final = "the function given to on_evicted has raised it"

_COLLECTIVE: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of torch's operators that wait for other ranks."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if func.namespace in _COLLECTIVE:
            raise ArgumentError(
                f"a collective ({func.name().rpartition('::')[2]}) in the function of on_evicted; allowed: none, since "
                "other ranks do not call it"
            )
        found: Tensor = func(*args, **(kwargs or {}))
        return found


class Telling:
    """`told`, of which at most one call is under way."""

    def __init__(self, told: Callable[[Evicted], object]) -> None:
        self._told = told
        self._thread: int | None = None

    def __call__(self, gone: Evicted) -> None:
        """Raises what the function raises, with `NOTE`."""
        self._thread = threading.get_ident()
        try:
            with _NoCollectives():  # type: ignore[no-untyped-call]
                self._told(gone)
        except Exception as error:
            error.add_note(NOTE)
            raise
        finally:
            self._thread = None

    def check(self) -> None:
        """Raises `ArgumentError` if the function itself calls the tables: they would wait for this very call."""
        if self._thread == threading.get_ident():
            raise ArgumentError(
                "a call of the tables in the function of on_evicted; allowed: none, since other ranks do not call them"
            )
