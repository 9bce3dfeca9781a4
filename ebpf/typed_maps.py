# SPDX-License-Identifier: Apache-2.0
"""Hash maps created without an object file, with BTF from NumPy dtypes. bpftool shows their fields by name."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sennit.closing import Closing
from sennit.ebpf.library import BpfError, clear_log, library, refusal
from sennit.ebpf.maps import BpfMap, MapOptions

NAME_MAX_CHARS: Final = 15
"""Characters of a map's name. The kernel's BPF_OBJ_NAME_LEN includes the NUL."""
# uapi/linux/bpf.h
_HASH: Final = 1
_NO_PREALLOC: Final = 1
# dtype -> its name in the kernel's headers, and whether it is signed (uapi/linux/btf.h).
_INTEGERS: Final = {"<u4": ("__u32", 0), "<i4": ("__s32", 1), "<u8": ("__u64", 0), "<i8": ("__s64", 1)}


class TypedHash(Closing):
    """A hash map of this process. It ends with the process and its pins."""

    def __init__(self, name: str, *, key: np.dtype[Any], value: np.dtype[Any], entries: int) -> None:
        """Key and value: structs of 4-byte and 8-byte integers, laid out as in the dtype.

        Raises BpfError without CAP_BPF, or if a field's name is not a C identifier.
        """
        self.key, self.value = key, value
        with _types({f"{name}_key": key, f"{name}_value": value}) as (btf, (key_type, value_type)):
            options = MapOptions(
                sz=ctypes.sizeof(MapOptions),
                btf_fd=btf,
                btf_key_type_id=key_type,
                btf_value_type_id=value_type,
                map_flags=_NO_PREALLOC,
            )
            found = library().bpf_map_create(
                _HASH, name[:NAME_MAX_CHARS].encode(), key.itemsize, value.itemsize, entries, ctypes.byref(options)
            )
        if found < 0:
            raise BpfError(-found, f"map {name}: {os.strerror(-found)}")
        self.map = BpfMap(
            name=name,
            kind=_HASH,
            entries=entries,
            key_bytes=key.itemsize,
            value_bytes=value.itemsize,
            flags=_NO_PREALLOC,
            descriptor=found,
            dtype=value,
        )

    def __setitem__(self, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        self.map.write(np.array(key, self.key).tobytes(), np.array(value, self.value).tobytes())

    def __delitem__(self, key: tuple[int, ...]) -> None:
        self.map.delete(np.array(key, self.key).tobytes())

    def close(self) -> None:
        descriptor, self.map.descriptor = self.map.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def _types(structs: dict[str, np.dtype[Any]]) -> Iterator[tuple[int, list[int]]]:
    """The descriptor of BTF with these structs, and their type numbers."""
    loaded = library()
    clear_log()
    btf = loaded.btf__new_empty()
    if not btf:
        raise refusal(ctypes.get_errno(), "BTF")
    try:
        integers = {
            kind: _checked(loaded.btf__add_int(btf, name.encode(), int(kind[2:]), is_signed), name)
            for kind, (name, is_signed) in _INTEGERS.items()
        }
        numbers = []
        for name, dtype in structs.items():
            numbers.append(_checked(loaded.btf__add_struct(btf, name.encode(), dtype.itemsize), name))
            for field, (kind, offset, *_) in (dtype.fields or {}).items():
                _checked(loaded.btf__add_field(btf, field.encode(), integers[kind.str], 8 * offset, 0), field)
        _checked(loaded.btf__load_into_kernel(btf), f"BTF of {', '.join(structs)}")
        yield loaded.btf__fd(btf), numbers
    finally:
        loaded.btf__free(btf)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise refusal(-result, what)
    return result
