# SPDX-License-Identifier: Apache-2.0
"""Writes packets.json, the golden packets that the C++ and the Python tests read.

Run by hand after a change of the format: `python tests/vectors/make_packets.py`. Random numbers come from a fixed
seed, so the file is a function of docs/reference/wire.md.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from sennit.transport.oracle import roce

SEED = 4791
ADDRESSES = {
    "ipv6": (("2001:db8::1", 0xC123), ("2001:db8:0:1::2", roce.ROCE_UDP_PORT)),
    "ipv4": (("192.0.2.1", 0xFEDC), ("198.51.100.2", 51_791)),
}
PAYLOAD_SIZES_BYTES = (0, 1, 2, 3, 4, 61, 62, 63, 64, 1_024, 4_095, 4_096)


def main() -> None:
    random_source = random.Random(SEED)
    vectors = []
    for family, (source, destination) in ADDRESSES.items():
        for size_bytes in PAYLOAD_SIZES_BYTES:
            for kind in ("data", "control"):
                identification = random_source.randrange(64) if family == "ipv4" else 0
                fields = {
                    "qpn": random_source.getrandbits(24),
                    "psn": random_source.getrandbits(24),
                    "remote_address": random_source.getrandbits(64) if kind == "data" else 0,
                    "rkey": random_source.getrandbits(32) if kind == "data" else 0,
                    "immediate": random_source.getrandbits(32) if kind == "data" else 0,
                }
                payload = random_source.randbytes(size_bytes)
                if kind == "data":
                    packet = roce.Packet.data(payload=payload, **fields)
                else:
                    packet = roce.Packet.control(payload=payload, qpn=fields["qpn"], psn=fields["psn"])
                datagram = roce.seal(packet, source, destination, identification=identification)
                vectors.append(
                    {
                        "name": f"{family} {kind} {size_bytes}",
                        "source": source[0],
                        "source_port": source[1],
                        "destination": destination[0],
                        "destination_port": destination[1],
                        "identification": identification,
                        "opcode": int(packet.bth.opcode),
                        # As text, because a JSON reader that keeps numbers as doubles would round 64-bit numbers.
                        **{name: f"{value:#x}" for name, value in fields.items()},
                        "payload": payload.hex(),
                        "datagram": datagram.hex(),
                    }
                )
    text = "[\n" + ",\n".join(json.dumps(vector) for vector in vectors) + "\n]\n"
    (Path(__file__).parent / "packets.json").write_text(text)


if __name__ == "__main__":
    main()
