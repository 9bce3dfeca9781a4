# SPDX-License-Identifier: Apache-2.0
"""Packets fit the path MTU, even when it shrinks. None is cut into fragments."""

from __future__ import annotations

import errno
import socket
import subprocess

import numpy as np
import pytest

from sennit.offload.ingest.protocol import VERSION, Terms
from sennit.offload.ingest.record_socket import RecordSocket
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.schema import Ids, Schema
from sennit.testbed.topology import Planes

pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf")]
COUNT, UDP_IP_BYTES = 2000, 48
DEADLINE_S = 10.0


def received(receiver: socket.socket, rows: int) -> list[int]:
    """Receives packets until they hold `rows` rows. Returns their sizes."""
    sizes = []
    while rows > 0:
        packet = receiver.recv(1 << 16)
        sizes.append(len(packet))
        rows -= int.from_bytes(packet[20:22], "big")
    assert rows == 0
    return sizes


def test_packets_follow_the_mtu_of_the_path() -> None:
    schema = Schema(ids=(Ids(name="sample"),))
    columns = Columns(
        labels=np.zeros(COUNT, np.float32),
        dense=np.zeros((COUNT, 0), np.float32),
        ids=(IdColumn(values=np.arange(COUNT)),),
    )
    store = RecordStore.encode(schema, columns)
    part = np.arange(COUNT)
    with Planes(hosts=2, planes=1, mtu=1500) as planes:
        address = planes.addresses(1)[0]
        receiver = planes.within(1, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        with receiver:
            receiver.bind((address, 0))
            receiver.settimeout(DEADLINE_S)
            port = receiver.getsockname()[1]
            terms = Terms(
                version=VERSION,
                session=1,
                rank=0,
                world_size=1,
                endpoints=[[address, port]],
                packet_bytes=8192,
                window_packets=100,
                order={},
            )
            records = planes.within(0, lambda: RecordSocket((address, port), terms))
            assert records.send(store, part, 0, 0, 100) == (COUNT, 8, 0)
            sizes = received(receiver, COUNT)
            assert 1500 - UDP_IP_BYTES - 5 < max(sizes) <= 1500 - UDP_IP_BYTES

            interface = planes.interfaces(0)[0]
            planes.within(
                0,
                lambda: subprocess.run(["ip", "link", "set", interface, "mtu", "1300"], check=True, timeout=DEADLINE_S),
            )
            assert records.send(store, part, 1, 0, 100) == (0, 0, errno.EAGAIN)
            row, packets, failure = records.send(store, part, 1, 0, 100)
            assert (row, failure) == (COUNT, 0)
            sizes = received(receiver, COUNT)
            assert len(sizes) == packets
            assert 1300 - UDP_IP_BYTES - 5 < max(sizes) <= 1300 - UDP_IP_BYTES
            records.close()
    store.close()
