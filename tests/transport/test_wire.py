# SPDX-License-Identifier: Apache-2.0
"""transport/oracle/roce.py against the golden packets, and against invalid packets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sennit.transport.oracle import roce

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "packets.json").read_text())
SEED = 20_260


def build(vector: dict[str, Any]) -> roce.Packet:
    fields = {name: int(vector[name], 16) for name in ("qpn", "psn", "remote_address", "rkey", "immediate")}
    payload = bytes.fromhex(vector["payload"])
    if vector["opcode"] == roce.Opcode.UC_SEND_ONLY:
        return roce.Packet.control(qpn=fields["qpn"], psn=fields["psn"], payload=payload)
    return roce.Packet.data(payload=payload, **fields)


def pull(data: bytes) -> tuple[str, roce.Packet | None]:
    try:
        return "", roce.Packet.pull(data)
    except roce.WireError as refused:
        return refused.reason, None


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_packet_both_ways(vector: dict[str, Any]) -> None:
    source = (vector["source"], vector["source_port"])
    destination = (vector["destination"], vector["destination_port"])
    datagram = bytes.fromhex(vector["datagram"])
    assert roce.seal(build(vector), source, destination, identification=vector["identification"]) == datagram
    pulled = roce.Packet.pull(datagram)
    assert pulled.push() == datagram[:-4]
    assert pulled.payload.hex() == vector["payload"]
    assert pulled.icrc == roce.icrc(datagram[:-4], source, destination, identification=vector["identification"])


@pytest.mark.parametrize("vector", VECTORS[:18], ids=lambda vector: vector["name"])
def test_every_truncation_is_refused_by_name(vector: dict[str, Any]) -> None:
    datagram = bytes.fromhex(vector["datagram"])
    is_data = vector["opcode"] == roce.Opcode.UC_WRITE_ONLY_IMMEDIATE
    for size_bytes in range(len(datagram)):
        reason, shorter = pull(datagram[:size_bytes])
        if shorter is None:
            assert reason in {"truncated", "bad_pad", "bad_length"}
        else:
            # A SEND carries no length. Cut by a multiple of four bytes it is another packet, which only the ICRC shows.
            assert not is_data
            assert len(shorter.payload) < len(datagram)


def test_random_bytes_are_a_packet_or_a_named_refusal() -> None:
    random_source = random.Random(SEED)
    for _ in range(20_000):
        noise = bytearray(random_source.randbytes(random_source.randrange(80)))
        if noise and random_source.random() < 0.9:
            noise[0] = random_source.choice([0x24, 0x2B])
            noise[1:4] = b"\x40\xff\xff"[: len(noise[1:4])]
        reason, packet = pull(bytes(noise))
        assert packet is not None or reason.isidentifier()


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, 0x2A, "bad_opcode"),
        (1, 0x41, "bad_version"),
        (2, 0x00, "bad_partition"),
        (1, 0x70, "bad_length"),
        (24, 0xFF, "bad_length"),
    ],
)
def test_a_wrong_field_is_named(offset: int, value: int, reason: str) -> None:
    packet = roce.Packet.data(qpn=1, psn=2, remote_address=3, rkey=4, immediate=5, payload=bytes(8))
    datagram = bytearray(roce.seal(packet, ("::1", 50_000), ("::1", 4_791)))
    datagram[offset] = value
    with pytest.raises(roce.WireError, match=reason):
        roce.Packet.pull(bytes(datagram))


def test_icrc_ignores_what_routers_change_and_nothing_else() -> None:
    packet = roce.Packet.control(qpn=7, psn=8, payload=b"abcd")
    body = packet.push()
    ends = ("::1", 50_000), ("::2", 4_791)
    marked = body[:4] + b"\xc0" + body[5:]  # A switch set FECN and BECN.
    assert roce.icrc(marked, *ends) == roce.icrc(body, *ends)
    for offset in set(range(len(body))) - {4}:
        damaged = body[:offset] + bytes([body[offset] ^ 1]) + body[offset + 1 :]
        assert roce.icrc(damaged, *ends) != roce.icrc(body, *ends)
    assert roce.icrc(body, ("::3", 50_000), ends[1]) != roce.icrc(body, *ends)
