# SPDX-License-Identifier: Apache-2.0
"""Files of `sennit trace packets`: frames as on the wire, with times and directions."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")

from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import RawPcapNgReader

from sennit.runtime.trace import pcapng
from sennit.runtime.trace.super_packets import wire_packets

ROCE_PORT = 4791
SEGMENT_BYTES = 1_000


def framed(is_ipv4: bool, payload: bytes, number: int = 0) -> bytes:
    """A frame as a device sends it."""
    ip = IP(src="10.0.0.1", dst="10.0.0.2", id=0xFFFF + number & 0xFFFF, flags="DF") if is_ipv4 else IPv6()
    return bytes(Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / ip / UDP(dport=ROCE_PORT) / Raw(payload))


@pytest.mark.parametrize("is_ipv4", [True, False])
def test_super_packets_are_cut_as_a_device_cuts_them(is_ipv4: bool) -> None:
    payload = bytes(range(256)) * 10
    pieces = [payload[begin : begin + SEGMENT_BYTES] for begin in range(0, len(payload), SEGMENT_BYTES)]
    whole = framed(is_ipv4, payload)
    assert list(wire_packets(whole, SEGMENT_BYTES)) == [
        framed(is_ipv4, piece, number) for number, piece in enumerate(pieces)
    ]
    assert list(wire_packets(whole, 0)) == [whole]
    assert list(wire_packets(whole, len(payload))) == [whole]


@pytest.mark.parametrize("is_ipv4", [True, False])
def test_checksums_that_the_stack_leaves_to_the_device_are_filled_in(is_ipv4: bool) -> None:
    frame = framed(is_ipv4, b"some payload")
    addresses = frame[26:34] if is_ipv4 else frame[22:54]
    udp_at = 34 if is_ipv4 else 54
    words = struct.unpack(f"!{len(addresses) // 2}H", addresses)
    total = sum(words) + 17 + (len(frame) - udp_at)
    total = (total & 0xFFFF) + (total >> 16)
    partial = frame[: udp_at + 6] + struct.pack("!H", total) + frame[udp_at + 8 :]
    assert list(wire_packets(partial, 0)) == [frame]
    broken = frame[: udp_at + 6] + b"\x12\x34" + frame[udp_at + 8 :]
    assert list(wire_packets(broken, 0)) == [broken]


def test_a_file_says_time_direction_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "written.pcapng"
    frame = framed(False, b"odd")
    with pcapng.Writer(path, "some0", "a test") as writer:
        writer.packet(1_700_000_000_123_456_789, frame, pcapng.INBOUND)
        writer.packet(1_700_000_000_123_456_790, frame, pcapng.OUTBOUND)
        writer.statistics(1_700_000_001_000_000_000, received=5, dropped=3)
    with RawPcapNgReader(str(path)) as reader:
        read: list[tuple[bytes, Any]] = list(reader)
    assert [data for data, _ in read] == [frame, frame]
    assert [meta.tsresol for _, meta in read] == [10**9] * 2
    assert [(meta.tshigh << 32) + meta.tslow for _, meta in read] == [
        1_700_000_000_123_456_789,
        1_700_000_000_123_456_790,
    ]
    capinfos = shutil.which("capinfos")
    if capinfos is not None:
        done = subprocess.run([capinfos, str(path)], capture_output=True, text=True, timeout=60, check=True)
        assert "Name = some0" in done.stdout
        assert "Number of stat entries = 1" in done.stdout


def test_a_frame_without_whole_headers_stays_as_it_is() -> None:
    for ip_type in (b"\x08\x00", b"\x86\xdd"):
        whole = bytes(12) + ip_type + b"\x45" + bytes(60)
        for size in range(42 if ip_type[0] == 8 else 62):
            assert list(wire_packets(whole[:size], 10)) == [whole[:size]]
    for words in range(5):  # IPv4 has a header of five words at least
        broken = bytes(12) + b"\x08\x00" + bytes([0x40 | words]) + bytes(60)
        assert list(wire_packets(broken, 10)) == [broken]
