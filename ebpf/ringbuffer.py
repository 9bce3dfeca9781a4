# SPDX-License-Identifier: Apache-2.0
"""Reads a ring buffer (BPF_MAP_TYPE_RINGBUF). Samples come as bytes, in commit order."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.ebpf.library import SAMPLE_CALLBACK, BpfError, clear_log, library, refusal
from sennit.ebpf.maps import BpfMap


class RingBuffer(Closing):
    """The reading end of one ring buffer map."""

    def __init__(self, source: BpfMap) -> None:
        self._name = source.name
        self._samples: list[bytes] = []

        def keep(_: int, data: int, size: int) -> int:
            self._samples.append(ctypes.string_at(data, size))
            return 0

        # libbpf keeps the pointer, so Python must keep the object.
        self._callback = SAMPLE_CALLBACK(keep)
        clear_log()
        self._pointer: int | None = library().ring_buffer__new(source.descriptor, self._callback, None, None)
        if not self._pointer:
            raise refusal(ctypes.get_errno(), f"ring buffer {source.name}")

    def read(self, timeout_s: float) -> list[bytes]:
        """The samples that are there. If there are none, waits for the first one until the timeout."""
        if self._pointer is None:
            raise BpfError(0, f"ring buffer {self._name} is closed")
        clear_log()
        result = library().ring_buffer__poll(self._pointer, max(0, round(timeout_s * 1000)))
        if result < 0:
            raise refusal(-result, f"ring buffer {self._name}")
        samples, self._samples[:] = list(self._samples), []
        return samples

    def records(self, dtype: np.dtype[Any], timeout_s: float) -> NDArray[Any]:
        """Reads samples as structs, with the dtype from the object's BTF."""
        return np.frombuffer(b"".join(sample[: dtype.itemsize] for sample in self.read(timeout_s)), dtype)

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            library().ring_buffer__free(pointer)
