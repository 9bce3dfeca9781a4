# SPDX-License-Identifier: Apache-2.0
"""Floods UDP ports with random and mutated RoCEv2 packets: `python FILE SEED ADDRESS/PORT...`.

Ends with its stdin. Then it writes how many packets it sent, and in how many seconds. One call sends a batch of
different packets by UDP segmentation, because one call per packet could not reach a million packets a second.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import time

from sennit.doctor.capabilities import UDP_SEGMENT
from sennit.transport.oracle import roce

BATCH_PACKETS = 64  # linux/udp.h before Linux 6.9: UDP_MAX_SEGMENTS
BATCHES = 256
PACKET_BYTES = 64
HEADER_BYTES = 36  # BTH, RETH, immediate, ICRC


def packet(rng: random.Random) -> bytes:
    """Makes random bytes, or a well-formed packet of no connection, whole or with changed bytes (so a wrong ICRC)."""
    if rng.random() < 0.25:
        return rng.randbytes(PACKET_BYTES)
    # Low bits as a receiver would choose them, so that packets pass the first check and meet the later ones.
    made = roce.Packet.data(
        qpn=rng.getrandbits(rng.choice([4, 24])),
        psn=rng.getrandbits(24),
        remote_address=rng.getrandbits(47) & ~63,
        rkey=rng.getrandbits(32),
        immediate=rng.getrandbits(rng.choice([4, 21, 32])),
        payload=rng.randbytes(PACKET_BYTES - HEADER_BYTES),
    )
    data = bytearray(roce.seal(made, ("127.0.0.1", 50_000), ("127.0.0.1", 4_791)))
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    batches = [b"".join(packet(rng) for _ in range(BATCH_PACKETS)) for _ in range(BATCHES)]
    sockets = []
    for target in sys.argv[2:]:
        address, port = target.rsplit("/", 1)
        out = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        out.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PACKET_BYTES)
        out.connect((address, int(port)))
        sockets.append(out)
    sent = 0
    started_s = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        for batch in batches:
            for out in sockets:
                # The target has ended, or the path is full.
                with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                    out.send(batch)
                    sent += BATCH_PACKETS
    print(sent, time.monotonic() - started_s)


if __name__ == "__main__":
    main()
