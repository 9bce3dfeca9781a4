# SPDX-License-Identifier: Apache-2.0
"""Attaches programs: XDP, tcx, uprobes. Closing a link detaches it."""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sennit.closing import Closing
from sennit.ebpf.library import BpfError, clear_log, library, refusal

if TYPE_CHECKING:
    from sennit.ebpf.loader import Program

# uapi/linux/bpf.h, enum bpf_attach_type. Headers and libbpf may be older than tcx (Linux 6.6).
BPF_XDP: Final = 37
_BPF_TCX_INGRESS: Final = 46
_BPF_TCX_EGRESS: Final = 47
EVERY_PROCESS: Final = -1
# uapi/linux/bpf.h: the place of the name in struct bpf_prog_info (Linux 4.15), and type, number, program and interface
# in struct bpf_link_info of an XDP link (Linux 5.9).
_PROGRAM_NAME_AT: Final = 64
_LINK: Final = struct.Struct("=3I4xI")
_LINK_TYPE_XDP: Final = 6
_INFORMATION_BYTES: Final = 80
# The program that libxdp puts in front of several others (xdp-tools, lib/libxdp/protocol.org).
_LIBXDP_DISPATCHER: Final = "xdp_dispatcher"

# linux/sockios.h
_SIOCGIFMTU: Final = 0x8921
# IEEE 802.3: no driver refuses a program for packets of this size.
ETHERNET_MTU: Final = 1500


class XdpMode(enum.IntEnum):
    """Who runs the program; uapi/linux/if_link.h, XDP_FLAGS_*."""

    ANY = 0  # the driver where it can, or else the stack
    GENERIC = 1 << 1  # the stack, after it has made an skb
    NATIVE = 1 << 2  # the driver, before there is an skb


class _LinkOptions(ctypes.Structure):
    """The first fields of `struct bpf_link_create_opts` (bpf/bpf.h)."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("iter_info", ctypes.c_void_p),
        ("iter_info_len", ctypes.c_uint32),
        ("target_btf_id", ctypes.c_uint32),
    )


class Link(Closing):
    """An attachment. Closing it, or the end of the process, detaches the program."""

    def __init__(self, *, descriptor: int | None = None, pointer: int | None = None) -> None:
        self._descriptor, self._pointer = descriptor, pointer

    @property
    def is_attached(self) -> bool:
        """Whether an XDP link is at an interface. It is not once that has gone, or somebody has detached the link."""
        lines = Path(f"/proc/self/fdinfo/{self._descriptor}").read_text(encoding="utf-8").splitlines()
        return dict(line.split(":", 1) for line in lines).get("ifindex", "0").strip() != "0"

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        pointer, self._pointer = self._pointer, None
        if descriptor is not None:
            os.close(descriptor)
        if pointer is not None:
            library().bpf_link__destroy(pointer)


def attach_xdp(program: Program, interface_index: int, mode: XdpMode = XdpMode.ANY) -> Link:
    """Attaches to an interface of the caller's network namespace. An interface takes one program."""
    what = f"XDP ({mode.name.lower()})"
    try:
        return create_link(program.descriptor, program.name, interface_index, BPF_XDP, what, mode)
    except BpfError as error:
        # EEXIST: the program there runs in another mode than the one asked for.
        if error.errno in (errno.EBUSY, errno.EEXIST):
            hint = occupant(interface_index) or "it had another XDP program a moment ago: try again"
        else:
            hint = _mtu_hint(interface_index)
        if not hint or error.errno == errno.EPERM:
            raise
        raise BpfError(error.errno, f"{error.strerror}; {hint}") from None


def _mtu_hint(interface_index: int) -> str:
    """What may be wrong where a driver refuses a program; empty if it is not the MTU.

    Each has a limit of its own, and its own error: ERANGE of veth, EINVAL or EOPNOTSUPP of hardware.
    """
    try:
        interface = socket.if_indextoname(interface_index)
        mtu = interface_mtu(interface)
    except OSError:  # it has gone
        return ""
    if mtu <= ETHERNET_MTU:
        return ""
    return (
        f"the MTU of {interface} is {mtu}, which may be more than its driver runs this program for: lower it (`ip link "
        f"set dev {interface} mtu {ETHERNET_MTU}`), or do without XDP there (cpu://)"
    )


def interface_mtu(name: str) -> int:
    """Bytes of the longest IP packet of an interface of this thread's network namespace. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("16s24x", name.encode()[:15]))
    (mtu,) = struct.unpack_from("i", request, 16)
    return int(mtu)


def occupant(interface_index: int) -> str:
    """Which XDP program an interface has, and how to detach it; empty if it has none."""
    interface, number = socket.if_indextoname(interface_index), ctypes.c_uint32()
    if library().bpf_xdp_query_id(interface_index, 0, ctypes.byref(number)) != 0 or not number.value:
        return ""
    information = _information(library().bpf_prog_get_fd_by_id(number))
    name = information[_PROGRAM_NAME_AT:].partition(b"\0")[0].decode(errors="replace")
    if not name:  # without CAP_SYS_ADMIN, programs of others cannot be looked up
        return f"{interface} has an XDP program already (`ip link show {interface}`)"
    detach = f"ip link set dev {interface} xdp off"
    if link := _link_of(number.value, interface_index):
        detach = f"bpftool link detach id {link}"
    elif name == _LIBXDP_DISPATCHER:
        detach = f"xdp-loader unload {interface} --all"
    return (
        f"{interface} has the XDP program {name!r} (id {number.value}) already, and takes one: end the process that "
        f"attached it, or run `{detach}`"
    )


def _link_of(program: int, interface_index: int) -> int:
    """The link that holds the XDP program at the interface; 0 if it was attached without one, as by iproute2."""
    number = ctypes.c_uint32()
    while library().bpf_link_get_next_id(number, ctypes.byref(number)) == 0:
        information = _information(library().bpf_link_get_fd_by_id(number))
        if _LINK.unpack_from(information) == (_LINK_TYPE_XDP, number.value, program, interface_index):
            return number.value
    return 0


def _information(descriptor: int) -> bytes:
    """What the kernel says of a program or link; zeros if it is gone. Takes ownership of the descriptor."""
    information = ctypes.create_string_buffer(_INFORMATION_BYTES)
    if descriptor >= 0:
        size = ctypes.c_uint32(len(information))
        library().bpf_obj_get_info_by_fd(descriptor, information, ctypes.byref(size))
        os.close(descriptor)
    return information.raw


def attach_tcx(program: Program, interface_index: int, *, egress: bool = False) -> Link:
    """Attaches behind the tcx programs that are already there (Linux 6.6)."""
    kind = _BPF_TCX_EGRESS if egress else _BPF_TCX_INGRESS
    what = "tcx egress" if egress else "tcx ingress"
    return create_link(program.descriptor, program.name, interface_index, kind, what)


def create_link(descriptor: int, name: str, interface_index: int, kind: int, what: str, flags: int = 0) -> Link:
    """Attaches a program by its descriptor to an interface."""
    options = _LinkOptions(sz=ctypes.sizeof(_LinkOptions), flags=flags)
    clear_log()
    link = library().bpf_link_create(descriptor, interface_index, kind, ctypes.byref(options))
    if link < 0:
        raise refusal(-link, f"program {name}: cannot be attached to interface {interface_index} as {what}")
    return Link(descriptor=link)


def attach_uprobe_at(program: Program, binary: Path, offset: int, *, process: int = EVERY_PROCESS) -> Link:
    """Attaches to the instruction at this file offset in bytes of an executable or shared library."""
    clear_log()
    made = library().bpf_program__attach_uprobe(program.pointer, False, process, os.fsencode(binary), offset)
    if not made:
        raise refusal(ctypes.get_errno(), f"program {program.name}: cannot be attached to {binary} at {offset:#x}")
    return Link(pointer=made)
