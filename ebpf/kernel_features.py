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

from sennit.ebpf.arena import ALIGNMENT_BYTES, BPF_MAP_TYPE_ARENA
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
# r0 = 0; exit
_RETURN_0: Final = bytes.fromhex("b7000000000000009500000000000000")
TOOL_TIMEOUT_S: Final = 30.0
# arch/x86/entry/syscalls/syscall_64.tbl, Linux 6.18: works only from the kernel's own call in place of a nop.
_UPROBE_SYSCALL: Final = 336
_UPROBE_PMU: Final = Path("/sys/bus/event_source/devices/uprobe")


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


def missing_privileges(effective: int | None = None) -> list[str]:
    """Capabilities that loading and attaching need and this process lacks."""
    held = effective_capabilities() if effective is None else effective
    if held >> CAP_SYS_ADMIN & 1 and held >> CAPABILITIES["CAP_NET_ADMIN"] & 1:
        return []
    return [name for name, number in CAPABILITIES.items() if not held >> number & 1]


def effective_capabilities() -> int:
    """The effective capabilities of this process, one bit each."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
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
    # Nothing is mapped there.
    place, remedy = ALIGNMENT_BYTES, "Linux 6.9 or later on a 64-bit machine"
    return _map("arena", BPF_MAP_TYPE_ARENA, 1, BPF_F_MMAPABLE, place, remedy)


def _clang() -> Feature:
    try:
        find_clang(ARENA_CLANG_VERSION)
    except ToolMissing as error:
        return Feature(name="clang-arena", absent_because=str(error), remedy="install clang 19 or later")
    return Feature(name="clang-arena")


def _load_xdp() -> int:
    """A descriptor, or a negative error number."""
    return int(library().bpf_prog_load(_BPF_PROG_TYPE_XDP, b"probe", b"GPL", _RETURN_0, len(_RETURN_0) // 8, None))


def _xdp() -> Feature:
    descriptor = _load_xdp()
    if descriptor < 0:
        return Feature(
            name="xdp", absent_because=_why(-descriptor), remedy="run as root; a kernel with CONFIG_BPF_SYSCALL"
        )
    os.close(descriptor)
    return Feature(name="xdp")


def _uprobe() -> Feature:
    absent = "" if _UPROBE_PMU.is_dir() else f"no {_UPROBE_PMU}"
    return Feature(name="uprobe", absent_because=absent, remedy="a kernel with CONFIG_UPROBE_EVENTS")


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
    descriptor = _load_xdp()
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
    "uprobe": _uprobe,
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
