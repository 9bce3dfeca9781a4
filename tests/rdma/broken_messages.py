# SPDX-License-Identifier: Apache-2.0
"""Counts the many-packet messages that an unreliable queue pair of rxe delivers under loss: `python FILE [MESSAGES]`.

    sennit testbed vm --netem 'loss 1%' -- python tests/rdma/broken_messages.py 200

Prints this number beside the expected one if a lost packet cost only its own message. See docs/upstream.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType

PACKETS = 64
PACKET_BYTES = 4_096
LOSS_FRACTION = 0.01
SIZE_BYTES = PACKETS * PACKET_BYTES
# No message is in flight for so long, because both ends are on one machine.
QUIET_S = 0.5


def load_endpoint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("endpoint", Path(__file__).with_name("endpoint.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    endpoint = load_endpoint()
    with (
        endpoint.Endpoint(0, qp_type="UC", ip_version=6, size_bytes=SIZE_BYTES) as near,
        endpoint.Endpoint(1, qp_type="UC", ip_version=6, size_bytes=SIZE_BYTES) as far,
    ):
        near.connect(far)
        far.connect(near)
        far.expect(endpoint.DEPTH)
        arrived: list[int] = []

        def take() -> int:
            done = far.poll()
            far.expect(len(done))
            arrived.extend(message.immediate for message in done)
            return len(done)

        for number in range(messages):
            near.write(far, SIZE_BYTES, number)
            near.completions(1)  # the packet is on the wire, lost or not
            take()
        quiet_since_s = time.monotonic()
        while time.monotonic() < quiet_since_s + QUIET_S:
            if take():
                quiet_since_s = time.monotonic()
            os.sched_yield()
    expected = messages * (1 - LOSS_FRACTION) ** PACKETS
    last = f"the last of them number {arrived[-1]}" if arrived else "none of them"
    print(
        f"Linux {platform.release()}: of {messages} messages of {PACKETS} packets {len(arrived)} arrived, {last}; "
        f"expected at {LOSS_FRACTION:.0%} loss: {expected:.0f}"
    )


if __name__ == "__main__":
    main()
