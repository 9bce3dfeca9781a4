# SPDX-License-Identifier: Apache-2.0
"""BPF maps: entries by key, per-CPU values, and arrays as NumPy views that programs write."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sennit.ebpf.library import BpfError, clear_log, library, refusal

# uapi/linux/bpf.h: map types with one value per CPU, and the flag of maps that can be mapped.
PER_CPU_TYPES: Final = frozenset({5, 6, 10, 21})
BPF_F_MMAPABLE: Final = 1 << 10
_INDEX_BYTES: Final = 4


class MapOptions(ctypes.Structure):
    """`struct bpf_map_create_opts` (bpf/bpf.h, libbpf 1.0)."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("btf_fd", ctypes.c_uint32),
        ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
        ("btf_vmlinux_value_type_id", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("map_extra", ctypes.c_uint64),
        ("numa_node", ctypes.c_uint32),
        ("map_ifindex", ctypes.c_uint32),
    )


class BpfMap:
    """A map. Keys are integers, or bytes if the map's keys are not 32 bits wide."""

    def __init__(
        self,
        *,
        name: str,
        kind: int,
        entries: int,
        key_bytes: int,
        value_bytes: int,
        flags: int,
        descriptor: int,
        dtype: np.dtype[Any] | None,
    ) -> None:
        self.name, self.type, self.entries, self.flags = name, kind, entries, flags
        self.key_bytes, self.value_bytes = key_bytes, value_bytes
        self.descriptor = descriptor
        self.dtype = dtype
        """The dtype of a value, if the object's BTF has it."""
        # The kernel rounds each CPU's value up to 8 bytes.
        self._stride = (self.value_bytes + 7) // 8 * 8
        self._cpus = int(library().libbpf_num_possible_cpus()) if self.type in PER_CPU_TYPES else 0

    @classmethod
    def of_object(cls, pointer: int, dtype: np.dtype[Any] | None) -> BpfMap:
        """A map of a loaded object, by libbpf's pointer."""
        loaded = library()
        return cls(
            name=loaded.bpf_map__name(pointer).decode(),
            kind=int(loaded.bpf_map__type(pointer)),
            entries=int(loaded.bpf_map__max_entries(pointer)),
            key_bytes=int(loaded.bpf_map__key_size(pointer)),
            value_bytes=int(loaded.bpf_map__value_size(pointer)),
            flags=int(loaded.bpf_map__map_flags(pointer)),
            descriptor=int(loaded.bpf_map__fd(pointer)),
            dtype=dtype,
        )

    def read(self, key: int | bytes) -> bytes:
        """The value; for a per-CPU map all values, each padded to a multiple of 8 bytes."""
        value = ctypes.create_string_buffer(self._stride * self._cpus or self.value_bytes)
        self._check(library().bpf_map_lookup_elem(self.descriptor, self._key(key), value), key)
        return value.raw

    def write(self, key: int | bytes, value: bytes) -> None:
        expected = self._stride * self._cpus or self.value_bytes
        if len(value) != expected:
            raise BpfError(errno.EINVAL, f"map {self.name}: a value of {len(value)} bytes; allowed: {expected}")
        self._check(library().bpf_map_update_elem(self.descriptor, self._key(key), value, 0), key)

    def delete(self, key: int | bytes) -> None:
        self._check(library().bpf_map_delete_elem(self.descriptor, self._key(key)), key)

    def each_key(self) -> Iterator[bytes]:
        """All keys as bytes. Entries added or removed meanwhile may be missing."""
        key, following = None, ctypes.create_string_buffer(self.key_bytes)
        while library().bpf_map_get_next_key(self.descriptor, key, following) == 0:
            yield following.raw
            key = ctypes.create_string_buffer(following.raw, self.key_bytes)

    def values(self, key: int | bytes) -> NDArray[Any]:
        """The value with its fields, as an array of length 1; for a per-CPU map one element per CPU. A copy."""
        if self.dtype is None:
            raise BpfError(errno.EINVAL, f"map {self.name}: the object's BTF does not say what its values are")
        raw = np.frombuffer(self.read(key), dtype=np.uint8).reshape(max(1, self._cpus), -1)
        return np.ascontiguousarray(raw[:, : self.value_bytes]).view(self.dtype)[:, 0]

    def view(self) -> NDArray[Any]:
        """All values of an array made with BPF_F_MMAPABLE, live: programs and Python write the same memory."""
        if not self.flags & BPF_F_MMAPABLE:
            raise BpfError(errno.EINVAL, f"map {self.name} cannot be mapped: it was made without BPF_F_MMAPABLE")
        try:
            mapped = mmap.mmap(self.descriptor, self._stride * self.entries)
        except OSError as error:
            raise BpfError(error.errno or 0, f"map {self.name}: mmap of {self._stride * self.entries} bytes") from error
        raw = np.frombuffer(mapped, dtype=np.uint8).reshape(self.entries, self._stride)
        return raw if self.dtype is None else raw[:, : self.value_bytes].view(self.dtype)[:, 0]

    def pin(self, path: str | os.PathLike[str]) -> None:
        """Pins the map on a mounted bpffs, for bpftool and other processes. `pins` handles the rest."""
        clear_log()
        result = library().bpf_obj_pin(self.descriptor, os.fsencode(path))
        if result != 0:
            raise refusal(-result, f"map {self.name}: cannot be pinned at {os.fspath(path)}")

    def _key(self, key: int | bytes) -> bytes:
        raw = key.to_bytes(_INDEX_BYTES, "little") if isinstance(key, int) else key
        if len(raw) != self.key_bytes:
            raise BpfError(errno.EINVAL, f"map {self.name}: a key of {len(raw)} bytes; allowed: {self.key_bytes}")
        return raw

    def _check(self, result: int, key: int | bytes) -> None:
        if result != 0:
            code = ctypes.get_errno()
            shown = key if isinstance(key, int) else key.hex()
            raise BpfError(code, f"map {self.name}, entry {shown} of {self.entries}: {os.strerror(code)}")
