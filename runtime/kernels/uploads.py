# SPDX-License-Identifier: Apache-2.0
"""Copies to a GPU of what the next steps need, while it computes.

They come from pinned memory, and have a stream of their own. The step's stream waits for an event behind them, on the
GPU: no thread of the host waits (NVIDIA, CUDA C++ Programming Guide, "Asynchronous Concurrent Execution").
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Uploads:
    """The copies to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, tensors: Sequence[Tensor]) -> Upload:
        """Begins to copy `tensors`, which are in host memory.

        They may be overwritten when this returns, but for those that are in pinned memory themselves.
        """
        with torch.cuda.stream(self._stream):
            # Torch gives pinned memory out again when the copies from it are done, and not before.
            there = [one.pin_memory().to(self._device, non_blocking=True) for one in tensors]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Upload(self._device, tensors, there, done)


class Upload:
    """Tensors on their way to a GPU."""

    def __init__(
        self, device: torch.device, given: Sequence[Tensor], there: Sequence[Tensor], done: torch.cuda.Event
    ) -> None:
        self._device, self._given, self._there, self._done = device, tuple(given), tuple(there), done

    def is_of(self, given: Sequence[Tensor], device: torch.device) -> bool:
        """Whether these very tensors were copied to this device."""
        same = len(given) == len(self._given) and all(map(operator.is_, given, self._given))
        return same and device == self._device

    def take(self) -> tuple[Tensor, ...]:
        """The tensors on the GPU, for what this thread's stream does from now on. It may be called again."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        for tensor in self._there:
            # Their memory is the other stream's, which would use it again while this one still reads.
            tensor.record_stream(stream)
        return self._there


class Kept:
    """Small tensors of integers that are copied to a device once, without a wait, and used from any stream later."""

    def __init__(self, parts: Sequence[npt.NDArray[np.int64]], device: torch.device) -> None:
        """`parts` travel together."""
        self._device = device
        numbers = np.concatenate([part.ravel() for part in parts])
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = numbers
            self._whole = pinned.to(device, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        else:
            self._whole = torch.from_numpy(numbers)
        flat = torch.split(self._whole, [part.size for part in parts])
        self._parts = tuple(
            one if part.ndim == 1 else one.view(part.shape) for one, part in zip(flat, parts, strict=True)
        )

    def take(self) -> tuple[Tensor, ...]:
        """Int64 tensors like `parts`, for what the current stream does from now on."""
        if self._device.type != "cuda":
            return self._parts
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            # A stream that is captured may not wait for what came before; torch waits where a capture begins.
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_event(self._done)
            # Else the memory would be used again on its own stream, once this is dropped, while others still read.
            self._whole.record_stream(stream)
        return self._parts
