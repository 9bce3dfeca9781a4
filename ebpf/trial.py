# SPDX-License-Identifier: Apache-2.0
"""Runs a loaded program on a packet without a device: bpf(BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from typing import Final

from sennit.ebpf.library import BpfError, clear_log, library, refusal

# An Ethernet header. The kernel refuses shorter packets.
PACKET_MIN_BYTES: Final = 14
# Room for what a program may add before and behind the packet.
PACKET_GROWTH_BYTES: Final = 512
# linux/bpf.h (Linux 5.18): real packets, which go where the program says.
_LIVE_FRAMES: Final = 1 << 1


class _Options(ctypes.Structure):
    """`struct bpf_test_run_opts` of bpf/bpf.h, libbpf 1.0."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_void_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a program did with a packet."""

    verdict: int
    """What it returned, such as XDP_DROP."""

    packet: bytes
    """The packet as the program left it after the last run."""

    duration_ns: int
    """Mean duration of a run."""


def run_program(descriptor: int, name: str, packet: bytes, *, repeat: int = 1) -> Trial:
    """Runs it `repeat` times on the same packet memory: the next run sees what a run changed."""
    if len(packet) < PACKET_MIN_BYTES:
        raise BpfError(
            errno.EINVAL, f"program {name}: a packet of {len(packet)} bytes; allowed: {PACKET_MIN_BYTES} or more"
        )
    source = ctypes.create_string_buffer(packet, len(packet))
    target = ctypes.create_string_buffer(len(packet) + PACKET_GROWTH_BYTES)
    options = _Options(
        sz=ctypes.sizeof(_Options),
        data_in=ctypes.addressof(source),
        data_size_in=len(packet),
        data_out=ctypes.addressof(target),
        data_size_out=len(target),
        repeat=repeat,
    )
    clear_log()
    result = library().bpf_prog_test_run_opts(descriptor, ctypes.byref(options))
    if result != 0:
        raise refusal(-result, f"program {name}: test run on {len(packet)} bytes")
    return Trial(
        verdict=int(options.retval),
        packet=target.raw[: options.data_size_out],
        duration_ns=int(options.duration),
    )


def send_frames(descriptor: int, name: str, packet: bytes, count: int) -> None:
    """Runs an XDP program on `count` copies of a packet as if they had arrived, and does what it returns.

    Redirection targets are interfaces of the thread's network namespace.
    """
    source = ctypes.create_string_buffer(packet, len(packet))
    options = _Options(
        sz=ctypes.sizeof(_Options),
        data_in=ctypes.addressof(source),
        data_size_in=len(packet),
        repeat=count,
        flags=_LIVE_FRAMES,
    )
    clear_log()
    result = library().bpf_prog_test_run_opts(descriptor, ctypes.byref(options))
    if result != 0:
        raise refusal(-result, f"program {name}: {count} live frames of {len(packet)} bytes")
