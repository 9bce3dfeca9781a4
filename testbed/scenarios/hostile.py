# SPDX-License-Identifier: Apache-2.0
"""A stranger that sends junk at a rank's RoCE ports until it is told to stop.

    python -m sennit.testbed.scenarios.hostile OWN_ADDRESSES TARGET_ADDRESSES PACKETS_PER_S SEED

Writes a line when it begins. At the end it writes a line of JSON: packets of each kind, and the seconds it took.
One call sends a batch of different packets by UDP segmentation. One call per packet would be slower than the ranks,
and could not reach a million packets a second.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import time
from typing import Final

from sennit.doctor.capabilities import UDP_SEGMENT
from sennit.transport.oracle import roce

# linux/udp.h before Linux 6.9: UDP_MAX_SEGMENTS
BATCH_PACKETS: Final = 64
VARIETIES: Final = 16
PACKET_BYTES: Final = 64
TRUNCATED_BYTES: Final = 9
TICK_S: Final = 0.001
SOURCE_PORT: Final = 50_000


def _random(rng: random.Random, source: tuple[str, int], target: tuple[str, int]) -> bytes:
    return rng.randbytes(PACKET_BYTES)


def _truncated(rng: random.Random, source: tuple[str, int], target: tuple[str, int]) -> bytes:
    return _unknown_data(rng, source, target)[:TRUNCATED_BYTES]


def _unknown_data(rng: random.Random, source: tuple[str, int], target: tuple[str, int]) -> bytes:
    """Makes a packet that is valid, ICRC included, except for its queue pair and key: no rank gave them out."""
    payload_bytes = PACKET_BYTES - 36
    packet = roce.Packet.data(
        qpn=rng.getrandbits(24),
        psn=rng.getrandbits(24),
        remote_address=rng.getrandbits(64),
        rkey=rng.getrandbits(32),
        immediate=rng.getrandbits(32),
        payload=rng.randbytes(payload_bytes),
    )
    return roce.seal(packet, source, target)


def _mutated(rng: random.Random, source: tuple[str, int], target: tuple[str, int]) -> bytes:
    """Makes a valid packet with one to four bytes changed: its ICRC is wrong, or a field before the ICRC."""
    packet = bytearray(_unknown_data(rng, source, target))
    for _ in range(rng.randint(1, 4)):
        packet[rng.randrange(len(packet))] ^= rng.randint(1, 255)
    return bytes(packet)


def _unknown_control(rng: random.Random, source: tuple[str, int], target: tuple[str, int]) -> bytes:
    payload = rng.randbytes(PACKET_BYTES - 16)
    packet = roce.Packet.control(qpn=rng.getrandbits(24), psn=rng.getrandbits(24), payload=payload)
    return roce.seal(packet, source, target)


KINDS: Final = {
    "random": _random,
    "truncated": _truncated,
    "unknown_data": _unknown_data,
    "mutated": _mutated,
    "unknown_control": _unknown_control,
}


class Attack:
    """A socket connected to one port of the target, with batches made in advance."""

    def __init__(self, source: str, target: str, seed: int) -> None:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((source, SOURCE_PORT))
        self._socket.connect((target, roce.ROCE_UDP_PORT))
        rng = random.Random(seed)
        ends = (source, SOURCE_PORT), (target, roce.ROCE_UDP_PORT)
        self._batches = {
            kind: [b"".join(make(rng, *ends) for _ in range(BATCH_PACKETS)) for _ in range(VARIETIES)]
            for kind, make in KINDS.items()
        }

    def send(self, kind: str, number: int) -> bool:
        """Sends a batch. Returns False if the target's port is closed or the path is full."""
        batch = self._batches[kind][number % VARIETIES]
        self._socket.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(batch) // BATCH_PACKETS)
        try:
            self._socket.send(batch)
        except (ConnectionRefusedError, BlockingIOError):
            return False
        return True


def main() -> None:
    sources, targets, packets_per_s, seed = sys.argv[1:]
    attacks = [
        Attack(source, target, int(seed) + index)
        for index, (source, target) in enumerate(zip(sources.split(","), targets.split(","), strict=True))
    ]
    sent = dict.fromkeys(KINDS, 0)
    kinds = list(KINDS)
    batches = 0
    print("sending", flush=True)
    started_s = time.monotonic()
    # Ends with stdin: the conductor closed it, or has ended.
    while not select.select([sys.stdin], [], [], TICK_S)[0]:
        due = int((time.monotonic() - started_s) * int(packets_per_s)) // BATCH_PACKETS
        # Packets that a busy machine could not send are not sent later in one burst.
        batches = max(batches, due - int(packets_per_s) // BATCH_PACKETS // 100 - 1)
        while batches < due:
            kind = kinds[batches % len(kinds)]
            if attacks[batches // len(kinds) % len(attacks)].send(kind, batches):
                sent[kind] += BATCH_PACKETS
            batches += 1
    print(json.dumps({"sent": sent, "seconds": time.monotonic() - started_s}))


if __name__ == "__main__":
    main()
