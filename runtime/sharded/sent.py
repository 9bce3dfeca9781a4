# SPDX-License-Identifier: Apache-2.0
"""A batch whose ids are with the owners of their rows, before it is looked up; and what there is in place of one."""

from __future__ import annotations

from sennit.runtime.sharded.pending import Running
from sennit.transport.errors import ArgumentError


class InputEnded(ArgumentError):
    """A rank has no further batch. All ranks raise it in place of sending."""


class Refused:
    """What a rank sends in place of a batch: why it has none. All ranks then raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Sent:
    """What `send` of a module of sharded tables returns, for one call of the module, or for `drop`."""

    def __init__(self, sender: object, step: object) -> None:
        """`sender`: what only this module has, and only as long as its shards stay where they are."""
        self._sender, self._step = sender, step
        self._fate: str | None = None
        self.lookup: Running | None = None
        """A lookup of this batch that has begun in another thread, ahead of the call."""

    @property
    def step(self) -> object:
        """The batch, as the module knows it."""
        return self._step

    def take(self, sender: object, fate: str) -> object:
        """The batch, for `sender` to do with it what `fate` says. Raises `ArgumentError` if that may not be."""
        if sender is not self._sender:
            what = "a batch that another module sent, or this one before its shards moved"
            raise ArgumentError(f"{what}; allowed: one of this module")
        if self._fate is not None:
            raise ArgumentError(
                f"a sent batch is to be {fate}, but it was {self._fate} before; allowed: one of them, once"
            )
        self._fate = fate
        return self._step
