# SPDX-License-Identifier: Apache-2.0
"""Streams and events for `device_double`, whose copies come as late as they may.

A copy in a stream of its own is made when another stream waits for an event behind it. Whoever reads the tensor before
finds NaN, or zeros in place of whole numbers. What makes the host wait is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

from tests.runtime.device_double import DEVICE, OnDevice


class Pinned(Tensor):
    """A copy in pinned memory."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        assert non_blocking, "a copy that the host waits for"
        assert device == DEVICE
        stream, host = _current.stream, self.as_subclass(Tensor)
        # Numbers may be lengths and ids, which kernels trust.
        there = torch.full_like(host, torch.nan if host.is_floating_point() else 0)
        stream.work.append(lambda: there.copy_(host))
        stream.log.append(f"{stream.name}: copy")
        made: Tensor = OnDevice(there)
        return made


class Stream:
    """A stream that works as late as it may."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.work: list[Callable[[], object]] = []

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name}: waits for {event.stream_name}")
        event.reach()

    def synchronize(self) -> NoReturn:
        raise AssertionError("the host waits for a stream")


class Event:
    """A point in a stream."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] | None = None
        self.stream_name = "nothing"

    def record(self, stream: Stream) -> None:
        stream.log.append(f"{stream.name}: record")
        self.stream_name = stream.name
        self._work, stream.work = stream.work, []

    def reach(self) -> None:
        assert self._work is not None, "an event that was not recorded"
        for one in self._work:
            one()

    def synchronize(self) -> NoReturn:
        raise AssertionError("the host waits for an event")


class _Current(threading.local):
    stream: Any = None


_current = _Current()


@contextlib.contextmanager
def _entered(stream: Stream) -> Iterator[None]:
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


def _refused(*_: Any) -> NoReturn:
    raise AssertionError("the host waits for the device")


@contextlib.contextmanager
def streams() -> Iterator[list[str]]:
    """Inside, torch has these streams. Yields what happens, in turn."""
    log: list[str] = []
    main, numbers = Stream(log, "step"), itertools.count(1)

    def pinned(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().as_subclass(Pinned)

    def kept(tensor: Tensor, stream: Stream) -> None:
        log.append(f"{stream.name}: keeps a tensor")

    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.cuda.Stream": lambda _: Stream(log, f"copies {next(numbers)}"),
            "torch.cuda.Event": Event,
            "torch.cuda.stream": _entered,
            "torch.cuda.current_stream": lambda _: _current.stream or main,
            "torch.cuda.synchronize": _refused,
            "torch.Tensor.pin_memory": pinned,
            "torch.Tensor.record_stream": kept,
        }.items():
            stack.enter_context(mock.patch(name, value))
        yield log
