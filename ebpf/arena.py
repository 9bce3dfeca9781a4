# SPDX-License-Identifier: Apache-2.0
"""An arena: memory that BPF programs address by plain pointers and a process maps (BPF_MAP_TYPE_ARENA, Linux 6.9).

The kernel keeps the lower 32 bits of arena addresses equal on both sides. The mapping starts at a multiple of 4 GiB,
so a program's pointer is the offset from the start, and programs hold no address.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.closing import Closing
from sennit.ebpf.library import BpfError

BPF_MAP_TYPE_ARENA: Final = 33
ALIGNMENT_BYTES: Final = 1 << 32
MAX_BYTES: Final = 1 << 32
# uapi/asm-generic/mman-common.h
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def pages(size_bytes: int) -> int:
    """The number of entries (pages) of an arena map of this size."""
    if not 0 < size_bytes <= MAX_BYTES:
        raise BpfError(errno.EINVAL, f"an arena of {size_bytes} bytes; allowed: 1 to {MAX_BYTES}")
    return -(-size_bytes // mmap.PAGESIZE)


class Arena(Closing):
    """The memory of an arena. It has its address before the kernel's map is made, because the verifier needs that.

    All pages exist from the start, so a program never misses one.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name, self.size_bytes = name, size_bytes
        self.address = _reserved(pages(size_bytes) * mmap.PAGESIZE)
        """A multiple of 4 GiB. Nothing else of this process is placed there."""

        self.memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        """The whole arena as bytes, once it is mapped. Views end with the arena: touching one after `close` is a
        segmentation fault.
        """

        self._is_open = True

    def map(self, descriptor: int) -> None:
        """Maps the kernel's map of this size and address."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        mapped = _libc.mmap(self.address, self.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if mapped != self.address:
            code = ctypes.get_errno()
            raise BpfError(code, f"arena {self.name}: cannot map {self.size_bytes} bytes: {os.strerror(code)}")
        mapping = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        self.memory = np.ctypeslib.as_array(mapping)
        # A fault of this process allocates the page. A fault of the program would read zeros and lose writes.
        self.memory[:: mmap.PAGESIZE] = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array in the arena, without a copy."""
        size = int(np.prod(shape)) * dtype.itemsize
        if offset < 0 or offset + size > self.size_bytes:
            raise BpfError(
                errno.EINVAL, f"arena {self.name}: bytes {offset} to {offset + size}; allowed: 0 to {self.size_bytes}"
            )
        found: NDArray[Any] = self.memory[offset : offset + size].view(dtype)
        return found.reshape(shape)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.memory = np.empty(0, np.uint8)
            _libc.munmap(self.address, self.size_bytes)


def _reserved(size_bytes: int) -> int:
    """Reserves address space, from a multiple of 4 GiB on."""
    span = size_bytes + ALIGNMENT_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = _libc.mmap(None, span, 0, flags, -1, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise BpfError(code, f"{span} bytes of address space for an arena: {os.strerror(code)}")
    address = -(-found // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    for begin, end in ((found, address), (address + size_bytes, found + span)):
        if begin < end:
            _libc.munmap(begin, end - begin)
    return int(address)
