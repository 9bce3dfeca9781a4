# SPDX-License-Identifier: Apache-2.0
"""A small binding of libbpf by ctypes: load an object, read and write its maps. Whoever wants the program attached
takes its descriptor. Nothing is pinned, so all is gone when the process is, and no bpffs is needed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

LIBRARY: Final = "libbpf.so.1"
LOG_MAX_BYTES: Final = 1 << 20

_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class BpfError(OSError):
    """The kernel or libbpf refused; the message has the verifier's log where there is one."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise BpfError(errno.ENOENT, f"{error}: install libbpf 1.0 or later (Debian: libbpf1)") from None
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("bpf_object__open_mem", pointer, (pointer, ctypes.c_size_t, pointer)),
        ("bpf_object__load", number, (pointer,)),
        ("bpf_object__close", None, (pointer,)),
        ("bpf_object__find_program_by_name", pointer, (pointer, text)),
        ("bpf_program__fd", number, (pointer,)),
        ("bpf_object__find_map_by_name", pointer, (pointer, text)),
        ("bpf_map__set_max_entries", number, (pointer, ctypes.c_uint32)),
        ("bpf_map__max_entries", ctypes.c_uint32, (pointer,)),
        ("bpf_map__fd", number, (pointer,)),
        ("bpf_map__value_size", ctypes.c_uint32, (pointer,)),
        ("bpf_map_lookup_elem", number, (number, pointer, pointer)),
        ("bpf_map_update_elem", number, (number, pointer, pointer, ctypes.c_uint64)),
        ("libbpf_set_print", pointer, (_PRINT,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.libbpf_set_print(_log_callback)
    return library


_log = bytearray()
_vsnprintf = ctypes.CDLL(None).vsnprintf


def _keep_log(level: int, template: bytes, arguments: int) -> int:
    """What libbpf says goes into the error that follows, instead of to stderr."""
    if level <= 1:  # LIBBPF_INFO
        line = ctypes.create_string_buffer(LOG_MAX_BYTES)
        _vsnprintf(line, ctypes.c_size_t(LOG_MAX_BYTES), ctypes.c_char_p(template), ctypes.c_void_p(arguments))
        _log.extend(line.value)
    return 0


# libbpf keeps the pointer, so Python must keep the object.
_log_callback = _PRINT(_keep_log)


class BpfMap:
    """A map whose keys are 32-bit indices (arrays), with values as plain bytes."""

    def __init__(self, pointer: int, name: str) -> None:
        library = _library()
        self.name = name
        self.entries = int(library.bpf_map__max_entries(pointer))
        self.value_bytes = int(library.bpf_map__value_size(pointer))
        self._descriptor = int(library.bpf_map__fd(pointer))

    def read(self, index: int) -> bytes:
        value = ctypes.create_string_buffer(self.value_bytes)
        key = ctypes.c_uint32(index)
        self._check(_library().bpf_map_lookup_elem(self._descriptor, ctypes.byref(key), value), index)
        return value.raw

    def write(self, index: int, value: bytes) -> None:
        if len(value) != self.value_bytes:
            raise BpfError(errno.EINVAL, f"map {self.name}: a value of {len(value)} bytes; allowed: {self.value_bytes}")
        key = ctypes.c_uint32(index)
        self._check(_library().bpf_map_update_elem(self._descriptor, ctypes.byref(key), value, 0), index)

    def _check(self, result: int, index: int) -> None:
        if result != 0:
            code = ctypes.get_errno()
            raise BpfError(code, f"map {self.name}, entry {index} of {self.entries}: {os.strerror(code)}")


class BpfObject:
    """A loaded object file: its programs and maps live as long as this, and as what they are attached to."""

    def __init__(self, image: bytes, *, max_entries: Mapping[str, int] | None = None) -> None:
        """`max_entries`: map -> number of entries, instead of what the source says."""
        library = _library()
        _log.clear()
        self._maps: dict[str, BpfMap] = {}
        self._pointer: int | None = library.bpf_object__open_mem(image, len(image), None)
        if self._pointer is None:
            raise self._error(ctypes.get_errno(), "cannot be opened")
        try:
            for name, entries in (max_entries or {}).items():
                result = library.bpf_map__set_max_entries(self._find_map(name), entries)
                if result != 0:
                    raise self._error(-result, f"map {name} with {entries} entries")
            result = library.bpf_object__load(self._pointer)
            if result != 0:
                raise self._error(-result, "the kernel refused it")
        except BaseException:
            self.close()
            raise

    def program_descriptor(self, name: str) -> int:
        program = _library().bpf_object__find_program_by_name(self._open(), name.encode())
        if not program:
            raise BpfError(errno.ENOENT, f"the BPF object has no program {name!r}")
        return int(_library().bpf_program__fd(program))

    def map(self, name: str) -> BpfMap:
        if name not in self._maps:
            self._maps[name] = BpfMap(self._find_map(name), name)
        return self._maps[name]

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            _library().bpf_object__close(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        if self._pointer is None:
            raise BpfError(errno.EBADF, "the BPF object is closed")
        return self._pointer

    def _find_map(self, name: str) -> Any:
        found = _library().bpf_object__find_map_by_name(self._open(), name.encode())
        if not found:
            raise BpfError(errno.ENOENT, f"the BPF object has no map {name!r}")
        return found

    @staticmethod
    def _error(code: int, what: str) -> BpfError:
        log = _log.decode(errors="replace").strip()
        # The verifier's verdict is at the end.
        return BpfError(code, f"BPF object: {what}: {os.strerror(code)}\n{log[-4000:]}")
