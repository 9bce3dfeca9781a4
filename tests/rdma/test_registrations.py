# SPDX-License-Identifier: Apache-2.0
"""Memory that serves several operations is registered once, and stays registered while they run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sennit.testbed.vm import links
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind
from sennit.transport.meeting.store import FileStore

pytestmark = pytest.mark.rdma

TIMEOUT_S = 60.0
OPERATIONS = 5


def test_registered_memory_is_registered_once(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    start = threading.Barrier(2)

    def run(rank: int) -> tuple[int, int]:
        """Returns the registrations of OPERATIONS without and with a registered buffer."""
        config = Config(
            transport=TransportKind.VERBS, interfaces=(links.netdev(rank),), host_id=f"{rank}", timeout_s=TIMEOUT_S
        )
        buffer = np.zeros(1 << 20, np.uint8)
        with Communicator(rank=rank, world=2, store=store, config=config) as group:

            def exchange() -> int:
                before = group.counters()["registrations"]
                for number in range(OPERATIONS):
                    start.wait(TIMEOUT_S)
                    if rank == 0:
                        buffer[:] = number + 1
                        group.send(buffer, 1, tag=number)
                    else:
                        group.recv(buffer, 0, tag=number)
                        assert (buffer == number + 1).all()
                return group.counters()["registrations"] - before

            each = exchange()
            with group.register(buffer):
                once = exchange()
            owned = bytearray(4096)
            with group.register(owned), pytest.raises(BufferError):
                owned.extend(b"more")
            owned.extend(b"more")
            return each, once

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(OPERATIONS, 1)] * 2
