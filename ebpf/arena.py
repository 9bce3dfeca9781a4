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

from sennit.ebpf.library import BpfError

BPF_MAP_TYPE_ARENA: Final = 33
ALIGNMENT_BYTES: Final = 1 << 32
MAX_BYTES: Final = 1 << 32
# uapi/asm-generic/mman-common.h
_MAP_FIXED_NOREPLACE: Final = 0x100000
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


def free_address() -> int:
    """A multiple of 4 GiB with that much unused address space behind it."""
    span = 2 * ALIGNMENT_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = _libc.mmap(None, span, 0, flags, -1, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise BpfError(code, f"{span} bytes of address space for an arena: {os.strerror(code)}")
    _libc.munmap(found, span)
    return int(-(-found // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


class Arena:
    """The mapping of an arena. All pages exist from the start, so a program never misses one."""

    def __init__(self, descriptor: int, address: int, size_bytes: int, name: str) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE
        mapped = _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if mapped != address:
            code = ctypes.get_errno()
            if mapped != _MAP_FAILED:  # a kernel that treats the address as a hint
                _libc.munmap(mapped, size_bytes)
                code = errno.EEXIST
            raise BpfError(code, f"arena {name}: cannot map {size_bytes} bytes at {address:#x}: {os.strerror(code)}")
        self.name = name
        self.size_bytes = size_bytes
        self._address: int | None = address
        # A fault of this process allocates the page. A fault of the program would read zeros and lose writes.
        mapping = (ctypes.c_uint8 * size_bytes).from_address(address)
        self.memory: NDArray[np.uint8] = np.ctypeslib.as_array(mapping)
        """The whole arena as bytes. Views end with the arena: touching one after `close` is a segmentation fault."""
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
        address, self._address = self._address, None
        if address is not None:
            self.memory = np.empty(0, np.uint8)
            _libc.munmap(address, self.size_bytes)
