# SPDX-License-Identifier: Apache-2.0
"""libbpf by ctypes: its functions with types, its log, and the error that carries both.

libbpf 1.0 is enough. Newer features do without it: `arena` maps an arena's memory, and tcx links are made by number
(docs/decisions/0040-libbpf-of-the-distribution.md).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
from typing import Any, Final

from sennit.errors import SennitError

LIBRARY: Final = "libbpf.so.1"
# The end of libbpf's log for one object is kept, because the verifier's verdict is there.
LOG_LINE_MAX_BYTES: Final = 1 << 20
LOG_TAIL_CHARS: Final = 4000
LIBBPF_INFO: Final = 1

PRINT_CALLBACK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
SAMPLE_CALLBACK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_pointer, _text, _int, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64

# Name, result, arguments: bpf/libbpf.h and bpf/bpf.h of libbpf 1.0.
_FUNCTIONS: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("libbpf_set_print", _pointer, (PRINT_CALLBACK,)),
    ("bpf_enable_stats", _int, (_int,)),
    ("bpf_object__open_mem", _pointer, (_pointer, _size, _pointer)),
    ("bpf_object__load", _int, (_pointer,)),
    ("bpf_object__close", None, (_pointer,)),
    ("bpf_object__next_program", _pointer, (_pointer, _pointer)),
    ("bpf_object__next_map", _pointer, (_pointer, _pointer)),
    ("bpf_object__find_program_by_name", _pointer, (_pointer, _text)),
    ("bpf_object__find_map_by_name", _pointer, (_pointer, _text)),
    ("bpf_program__name", _text, (_pointer,)),
    ("bpf_program__fd", _int, (_pointer,)),
    ("bpf_program__set_flags", _int, (_pointer, _u32)),
    ("bpf_program__attach_uprobe", _pointer, (_pointer, ctypes.c_bool, _int, _text, _size)),
    ("bpf_link__destroy", _int, (_pointer,)),
    ("bpf_link_create", _int, (_int, _int, _int, _pointer)),
    ("bpf_map__name", _text, (_pointer,)),
    ("bpf_map__type", _int, (_pointer,)),
    ("bpf_map__fd", _int, (_pointer,)),
    ("bpf_map__key_size", _u32, (_pointer,)),
    ("bpf_map__value_size", _u32, (_pointer,)),
    ("bpf_map__max_entries", _u32, (_pointer,)),
    ("bpf_map__map_flags", _u32, (_pointer,)),
    ("bpf_map__set_max_entries", _int, (_pointer, _u32)),
    ("bpf_map__set_map_extra", _int, (_pointer, _u64)),
    ("bpf_map__initial_value", _pointer, (_pointer, ctypes.POINTER(_size))),
    ("bpf_xdp_query_id", _int, (_int, _int, ctypes.POINTER(_u32))),
    ("bpf_prog_get_fd_by_id", _int, (_u32,)),
    ("bpf_link_get_next_id", _int, (_u32, ctypes.POINTER(_u32))),
    ("bpf_link_get_fd_by_id", _int, (_u32,)),
    ("bpf_obj_get_info_by_fd", _int, (_int, _pointer, ctypes.POINTER(_u32))),
    ("bpf_obj_pin", _int, (_int, _text)),
    ("bpf_map__set_value_size", _int, (_pointer, _u32)),
    ("bpf_map_create", _int, (_int, _text, _u32, _u32, _u32, _pointer)),
    ("bpf_map_lookup_elem", _int, (_int, _pointer, _pointer)),
    ("bpf_map_update_elem", _int, (_int, _pointer, _pointer, _u64)),
    ("bpf_map_delete_elem", _int, (_int, _pointer)),
    ("bpf_map_get_next_key", _int, (_int, _pointer, _pointer)),
    ("bpf_prog_load", _int, (_int, _text, _text, _pointer, _size, _pointer)),
    ("bpf_prog_test_run_opts", _int, (_int, _pointer)),
    ("libbpf_num_possible_cpus", _int, ()),
    ("btf__new_empty", _pointer, ()),
    ("btf__add_int", _int, (_pointer, _text, _size, _int)),
    ("btf__add_struct", _int, (_pointer, _text, _u32)),
    ("btf__add_field", _int, (_pointer, _text, _int, _u32, _u32)),
    ("btf__load_into_kernel", _int, (_pointer,)),
    ("btf__fd", _int, (_pointer,)),
    ("btf__free", None, (_pointer,)),
    ("ring_buffer__new", _pointer, (_int, SAMPLE_CALLBACK, _pointer, _pointer)),
    ("ring_buffer__poll", _int, (_pointer, _int)),
    ("ring_buffer__free", None, (_pointer,)),
)


class _Log(threading.local):
    """What libbpf has said in this thread, in which it also calls back. Another one may load programs meanwhile."""

    def __init__(self) -> None:
        self.text = bytearray()


_log = _Log()
_vsnprintf = ctypes.CDLL(None).vsnprintf


class BpfError(OSError, SennitError):
    """The kernel or libbpf refused. The message names the program or map and ends with the verifier's log."""

    def __str__(self) -> str:
        return self.strerror or ""


def _keep_log(level: int, template: bytes, arguments: int) -> int:
    """libbpf's messages go into the next error instead of stderr."""
    if level <= LIBBPF_INFO:
        line = ctypes.create_string_buffer(LOG_LINE_MAX_BYTES)
        _vsnprintf(line, ctypes.c_size_t(LOG_LINE_MAX_BYTES), ctypes.c_char_p(template), ctypes.c_void_p(arguments))
        _log.text.extend(line.value)
    return 0


# libbpf keeps the pointer, so Python must keep the object.
_print_callback = PRINT_CALLBACK(_keep_log)


@functools.cache
def library() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise BpfError(errno.ENOENT, f"{error}: install libbpf 1.0 or later (Debian: libbpf1)") from None
    for name, result, arguments in _FUNCTIONS:
        function = getattr(loaded, name, None)
        if function is None:
            raise BpfError(errno.ENOSYS, f"{LIBRARY} has no {name}: install libbpf 1.0 or later (Debian: libbpf1)")
        function.restype, function.argtypes = result, arguments
    loaded.libbpf_set_print(_print_callback)
    return loaded


def clear_log() -> None:
    _log.text.clear()


def refusal(code: int, what: str) -> BpfError:
    """The error for `what`, with the end of libbpf's log since `clear_log`."""
    log = _log.text.decode(errors="replace").strip()
    text = f"{what}: {os.strerror(code)}"
    return BpfError(code, f"{text}\n{log[-LOG_TAIL_CHARS:]}" if log else text)
