# SPDX-License-Identifier: Apache-2.0
"""Other decoders read the golden packets: scapy's contrib.roce (BTH, ICRC) and Wireshark (all fields)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "packets.json").read_text())


def frame(vector: dict[str, Any]) -> Any:
    """Returns the Ethernet frame that carries a golden packet, as scapy builds it."""
    pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")
    from scapy.layers.inet import IP, UDP
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import Ether
    from scapy.packet import Raw

    ends = {"src": vector["source"], "dst": vector["destination"]}
    ip = IPv6(**ends) if ":" in vector["source"] else IP(**ends, id=vector["identification"], flags="DF")
    udp = UDP(sport=vector["source_port"], dport=vector["destination_port"])
    link = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    return link / ip / udp / Raw(bytes.fromhex(vector["datagram"]))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_scapy_reads_bth_and_computes_the_same_icrc(vector: dict[str, Any]) -> None:
    pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import UDP

    datagram = bytes.fromhex(vector["datagram"])
    packet = frame(vector)
    packet[UDP].remove_payload()
    transport = BTH(datagram)
    assert transport.opcode == vector["opcode"]
    assert transport.dqpn == int(vector["qpn"], 16)
    assert transport.psn == int(vector["psn"], 16)
    assert transport.padcount == -len(bytes.fromhex(vector["payload"])) % 4
    assert (transport.version, transport.pkey) == (0, 0xFFFF)
    transport.icrc = None  # scapy must compute it from the whole packet
    assert bytes(packet / transport)[-4:] == datagram[-4:]


def test_wireshark_reads_every_field(tmp_path: Path) -> None:
    tshark = shutil.which("tshark")
    if tshark is None:
        pytest.skip("tshark is not installed (apt install tshark)")
    pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")
    from scapy.utils import wrpcap

    capture = tmp_path / "packets.pcap"
    wrpcap(str(capture), [frame(vector) for vector in VECTORS])
    names = ["opcode", "destqp", "psn", "padcnt", "tver", "p_key"]
    fields = [f"infiniband.bth.{name}" for name in names]
    fields += ["infiniband.reth.va", "infiniband.reth.r_key", "infiniband.reth.dmalen", "infiniband.immdt"]
    fields += ["infiniband.invariant.crc"]
    command = [tshark, "-r", str(capture), "-d", "udp.port==51791,infiniband", "-T", "fields", "-E", "occurrence=f"]
    for field in fields:
        command += ["-e", field]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    rows = output.rstrip("\n").split("\n")
    assert len(rows) == len(VECTORS)
    for vector, row in zip(VECTORS, rows, strict=True):
        opcode, qpn, psn, pad, version, partition, address, rkey, length, immediate, icrc = row.split("\t")
        size_bytes = len(bytes.fromhex(vector["payload"]))
        assert (int(opcode, 0), int(qpn, 0), int(psn, 0)) == (
            vector["opcode"],
            int(vector["qpn"], 16),
            int(vector["psn"], 16),
        )
        assert (int(pad, 0), int(version, 0), int(partition, 0)) == (-size_bytes % 4, 0, 0xFFFF)
        assert int(icrc, 16) == int.from_bytes(bytes.fromhex(vector["datagram"])[-4:], "big")
        if vector["opcode"] == 0x2B:
            assert int(address, 0) == int(vector["remote_address"], 16)
            assert int(rkey, 0) == int(vector["rkey"], 16)
            assert int(length, 0) == size_bytes
            assert int(immediate, 16) == int(vector["immediate"], 16)
