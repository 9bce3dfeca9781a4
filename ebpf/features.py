# SPDX-License-Identifier: Apache-2.0
"""Which BPF features this kernel, process and machine have, and which are missing, by name.

Each probe tries the feature itself. Versions say little, because distributions remove and backport features.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.ebpf.arena import BPF_MAP_TYPE_ARENA, free_address
from sennit.ebpf.compiler import ARENA_CLANG_VERSION, ToolMissing, find_clang
from sennit.ebpf.library import BpfError, library
from sennit.ebpf.links import BPF_XDP, XdpMode, create_link
from sennit.ebpf.maps import BPF_F_MMAPABLE, MapOptions

# uapi/linux/capability.h. CAP_SYS_ADMIN includes the others.
CAP_SYS_ADMIN: Final = 21
CAPABILITIES: Final = {"CAP_BPF": 39, "CAP_NET_ADMIN": 12, "CAP_PERFMON": 38}
# uapi/linux/bpf.h
_BPF_MAP_TYPE_ARRAY: Final = 2
_BPF_PROG_TYPE_XDP: Final = 6
_BPF_PROG_TYPE_TRACING: Final = 26
_BPF_TRACE_RAW_TP: Final = 23
_BPF_TRACE_FENTRY: Final = 24
# r0 = 0; exit
_RETURN_0: Final = bytes.fromhex("b7000000000000009500000000000000")
# A function and a tracepoint of every kernel with networking.
_TRACED_FUNCTION: Final = "udp_rcv"
_TRACED_POINT: Final = "netif_receive_skb"
TOOL_TIMEOUT_S: Final = 10.0
# arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18: works only from the kernel's own call in place of a nop.
_UPROBE_SYSCALL: Final = 336
_PMU_FOLDER: Final = Path("/sys/bus/event_source/devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """The result of one probe."""

    name: str
    absent_because: str = ""
    """Empty if the feature is there."""

    remedy: str = ""

    @property
    def available(self) -> bool:
        return not self.absent_because


class _ProgramOptions(ctypes.Structure):
    """The first fields of `struct bpf_prog_load_opts` (bpf/bpf.h, libbpf 1.0)."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("attempts", ctypes.c_int),
        ("expected_attach_type", ctypes.c_int),
        ("prog_btf_fd", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_ifindex", ctypes.c_uint32),
        ("kern_version", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
        ("attach_prog_fd", ctypes.c_uint32),
        ("attach_btf_obj_fd", ctypes.c_uint32),
    )


def missing_privileges(effective: int | None = None) -> list[str]:
    """Capabilities that loading and attaching need and this process lacks."""
    held = effective_capabilities() if effective is None else effective
    if held >> CAP_SYS_ADMIN & 1 and held >> CAPABILITIES["CAP_NET_ADMIN"] & 1:
        return []
    return [name for name, number in CAPABILITIES.items() if not held >> number & 1]


def effective_capabilities() -> int:
    """The effective capabilities of this process, one bit each."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _privileges() -> Feature:
    absent = missing_privileges()
    remedy = "run as root, or give the process these capabilities"
    return Feature(name="privileges", absent_because=f"no {', '.join(absent)}" if absent else "", remedy=remedy)


def _libbpf() -> Feature:
    library()
    return Feature(name="libbpf")


def _map(name: str, kind: int, entries: int, flags: int, extra: int, remedy: str) -> Feature:
    options = MapOptions(sz=ctypes.sizeof(MapOptions), map_flags=flags, map_extra=extra)
    is_array = kind == _BPF_MAP_TYPE_ARRAY
    descriptor = library().bpf_map_create(kind, b"probe", 4 * is_array, 4 * is_array, entries, ctypes.byref(options))
    if descriptor < 0:
        return Feature(name=name, absent_because=_why(-descriptor), remedy=remedy)
    os.close(descriptor)
    return Feature(name=name)


def _arena() -> Feature:
    return _map(
        "arena", BPF_MAP_TYPE_ARENA, 1, BPF_F_MMAPABLE, free_address(), "Linux 6.9 or later on a 64-bit machine"
    )


def _clang() -> Feature:
    try:
        find_clang(ARENA_CLANG_VERSION)
    except ToolMissing as error:
        return Feature(name="clang-arena", absent_because=str(error), remedy="install clang 19 or later")
    return Feature(name="clang-arena")


def _load(name: str, kind: int, attach_type: int = 0, attach_btf_id: int = 0) -> int:
    """A descriptor, or a negative error number."""
    options = _ProgramOptions(
        sz=ctypes.sizeof(_ProgramOptions), expected_attach_type=attach_type, attach_btf_id=attach_btf_id
    )
    return int(
        library().bpf_prog_load(
            kind, name.replace("-", "_").encode(), b"GPL", _RETURN_0, len(_RETURN_0) // 8, ctypes.byref(options)
        )
    )


def _xdp() -> Feature:
    descriptor = _load("xdp", _BPF_PROG_TYPE_XDP)
    if descriptor < 0:
        return Feature(
            name="xdp", absent_because=_why(-descriptor), remedy="run as root; a kernel with CONFIG_BPF_SYSCALL"
        )
    os.close(descriptor)
    return Feature(name="xdp")


def _tracing(name: str, attach_type: int, target: str, remedy: str) -> Feature:
    """Loads and attaches, because some kernels refuse only the attachment."""
    identifier = library().libbpf_find_vmlinux_btf_id(target.encode(), attach_type)
    if identifier < 0:
        return Feature(name=name, absent_because=f"BTF of the kernel: {_why(-identifier)}", remedy=remedy)
    descriptor = _load(name, _BPF_PROG_TYPE_TRACING, attach_type, identifier)
    if descriptor < 0:
        return Feature(name=name, absent_because=f"load: {_why(-descriptor)}", remedy=remedy)
    link = library().bpf_raw_tracepoint_open(None, descriptor)
    os.close(descriptor)
    if link < 0:
        return Feature(name=name, absent_because=f"attach to {target}: {_why(-link)}", remedy=remedy)
    os.close(link)
    return Feature(name=name)


def _pmu(name: str) -> Feature:
    absent = "" if (_PMU_FOLDER / name).is_dir() else f"no {_PMU_FOLDER / name}"
    return Feature(name=name, absent_because=absent, remedy=f"a kernel with CONFIG_{name.upper()}_EVENTS")


def _uprobe_call() -> Feature:
    remedy = "Linux 6.18 on x86-64; a hit of a tracepoint takes a trap elsewhere, a third longer"
    if platform.machine() != "x86_64":
        return Feature(name="uprobe-call", absent_because=f"the machine is {platform.machine()}", remedy=remedy)
    ctypes.set_errno(0)
    ctypes.CDLL(None, use_errno=True).syscall(_UPROBE_SYSCALL)
    code = ctypes.get_errno()
    absent = "" if code == errno.ENXIO else f"system call {_UPROBE_SYSCALL}: {os.strerror(code)}"
    return Feature(name="uprobe-call", absent_because=absent, remedy=remedy)


def try_native_xdp(near: str, far: str) -> None:
    """Makes a pair of virtual interfaces and attaches a program to one. Raises what the kernel refuses.

    Run it in a network namespace of its own, which removes the pair at its end.
    """
    subprocess.run(["ip", "link", "add", near, "type", "veth", "peer", "name", far], check=True, timeout=TOOL_TIMEOUT_S)
    descriptor = _load("xdp", _BPF_PROG_TYPE_XDP)
    if descriptor < 0:
        raise BpfError(-descriptor, f"XDP program: {_why(-descriptor)}")
    create_link(descriptor, "xdp", socket.if_nametoindex(near), BPF_XDP, "XDP (native)", XdpMode.NATIVE).close()


def _why(code: int) -> str:
    reason = os.strerror(code)
    if code in (errno.EPERM, errno.EACCES):
        absent = missing_privileges()
        reason += (
            f" (no {', '.join(absent)})" if absent else " (with all capabilities: the kernel was built or locked so)"
        )
    return reason


PROBES: Final[dict[str, Callable[[], Feature]]] = {
    "privileges": _privileges,
    "libbpf": _libbpf,
    "map": lambda: _map("map", _BPF_MAP_TYPE_ARRAY, 1, 0, 0, "run as root; a kernel with CONFIG_BPF_SYSCALL"),
    "clang-arena": _clang,
    "arena": _arena,
    "xdp": _xdp,
    "tp_btf": lambda: _tracing("tp_btf", _BPF_TRACE_RAW_TP, _TRACED_POINT, "a kernel with CONFIG_DEBUG_INFO_BTF"),
    "fentry": lambda: _tracing(
        "fentry", _BPF_TRACE_FENTRY, _TRACED_FUNCTION, "a kernel with CONFIG_FUNCTION_TRACER and BPF trampolines"
    ),
    "kprobe": lambda: _pmu("kprobe"),
    "uprobe": lambda: _pmu("uprobe"),
    "uprobe-call": _uprobe_call,
}


@functools.cache
def probe(name: str) -> Feature:
    """Probes one feature, at most once per process."""
    try:
        return PROBES[name]()
    except BpfError as error:  # no libbpf
        return Feature(name=name, absent_because=str(error), remedy="install libbpf 1.0 or later (libbpf1)")


def absent() -> list[Feature]:
    """All features that are missing."""
    return [found for name in PROBES if not (found := probe(name)).available]
