# SPDX-License-Identifier: Apache-2.0
"""`sennit aggregate` behind real sockets: what ranks send and get (docs/reference/aggregation.md)."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sennit.transport.aggregator import MEMORY_MIN_BYTES, Aggregator
from sennit.transport.errors import ArgumentError, DeviceError
from tests.aggregation_wire import (
    I32,
    JOINED,
    LEAF,
    LEAVE,
    RESULT,
    UNKNOWN_JOB,
    WAITING,
    Packet,
    conversation,
    join,
    tree_sum,
    unpack,
)

KEY = 0x0123456789ABCDEF
ENDS_IN_S = 10.0
VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "aggregation.json"


class Rank:
    """A socket that sends to the aggregator and gets its answers."""

    def __init__(self, address: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        # Answers must come from where the packets went, or a connected socket does not take them.
        self._socket.connect((address, port))
        self._socket.settimeout(ENDS_IN_S)

    def send_bytes(self, content: bytes) -> None:
        self._socket.send(content)

    def send(self, packet: Packet) -> None:
        self.send_bytes(packet.pack())

    def receive_bytes(self) -> bytes:
        return self._socket.recv(2048)

    def receive(self) -> Packet:
        return unpack(self.receive_bytes())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def aggregator() -> Aggregator:
    return Aggregator(port=0, memory_bytes=MEMORY_MIN_BYTES)


@pytest.fixture
def ranks(aggregator: Aggregator) -> Iterator[list[Rank]]:
    """Of both families, and at several addresses."""
    found = [Rank(address, aggregator.port) for address in ("127.0.0.1", "127.0.0.2", "::1")]
    yield found
    for rank in found:
        rank.close()


def joined(aggregator: Aggregator, ranks: list[Rank]) -> int:
    for number, rank in enumerate(ranks):
        rank.send(join(KEY, number, len(ranks), 8))
    aggregator.run(0.05)
    answers = [rank.receive() for rank in ranks]
    assert {answer.kind for answer in answers} == {JOINED}
    return answers[0].job


def test_the_conversation_of_the_vectors(aggregator: Aggregator) -> None:
    steps = json.loads(VECTORS.read_text())["steps"]
    assert steps == conversation()
    ranks = [Rank("::1", aggregator.port) for _ in range(2)]
    for step in steps:
        ranks[step["rank"]].send_bytes(bytes.fromhex(step["sent"]))
        aggregator.run(0.02)
        for number, answer in step["answers"]:
            assert ranks[number].receive_bytes().hex() == answer
    for rank in ranks:
        rank.close()
    assert aggregator.counters()["answers"] == sum(len(step["answers"]) for step in steps)


def test_each_rank_gets_every_sum(aggregator: Aggregator, ranks: list[Rank]) -> None:
    random = np.random.default_rng(1)
    job = joined(aggregator, ranks)
    blocks = [[random.standard_normal(8 * 44, dtype=np.float32) for _ in ranks] for _ in range(8)]
    for number, rank in enumerate(ranks):
        for block, leaves in enumerate(blocks):
            content = leaves[number].tobytes()
            rank.send(Packet(kind=LEAF, job=job, key=KEY, block=block, mark=3, leaf=number, stripes=content))
    while aggregator.counters()["completed"] < len(blocks):
        aggregator.run(0.05)
    for rank in ranks:
        got = {(answer.kind, answer.block): answer.stripes for answer in (rank.receive() for _ in blocks)}
        assert got == {(RESULT, block): tree_sum(list(leaves)).tobytes() for block, leaves in enumerate(blocks)}
    assert aggregator.counters()["answers"] == len(ranks) * (1 + len(blocks))


def test_a_repeated_leaf_is_answered_to_its_rank_alone(aggregator: Aggregator, ranks: list[Rank]) -> None:
    job = joined(aggregator, ranks)
    packets = [
        Packet(kind=LEAF, job=job, key=KEY, leaf=number, arithmetic=I32, stripes=np.full(8, number, "<i4").tobytes())
        for number in range(len(ranks))
    ]
    for _ in range(2):
        ranks[2].send(packets[2])
    aggregator.run(0.05)
    assert ranks[2].receive().kind == WAITING
    for number in (0, 1):
        ranks[number].send(packets[number])
    aggregator.run(0.05)
    ranks[0].send(packets[0])
    aggregator.run(0.05)
    sums = np.full(8, 3, "<i4").tobytes()
    for rank in (*ranks, ranks[0]):
        assert (answer := rank.receive()).kind == RESULT
        assert answer.stripes == sums
    assert aggregator.counters()["answers"] == 3 + 1 + 3 + 1


def test_a_job_ends_with_its_ranks(aggregator: Aggregator, ranks: list[Rank]) -> None:
    job = joined(aggregator, ranks)
    assert [(found.number, found.leaves, found.window) for found in aggregator.jobs()] == [(job, 3, 8)]
    for number, rank in enumerate(ranks):
        rank.send(Packet(kind=LEAVE, job=job, key=KEY, leaf=number))
    aggregator.run(0.05)
    assert aggregator.jobs() == []
    ranks[0].send(Packet(kind=LEAF, job=job, key=KEY, stripes=bytes(32)))
    aggregator.run(0.05)
    assert ranks[0].receive().stripes[:2] == UNKNOWN_JOB.to_bytes(2, "big")


def test_junk_is_counted_and_not_answered(aggregator: Aggregator, ranks: list[Rank]) -> None:
    good = join(KEY, 0, 3, 8).pack()
    for content in (b"", good[:-1], bytes(100), good[:50] + b"\1" + good[51:]):
        ranks[0].send_bytes(content)
    aggregator.run(0.05)
    found = aggregator.counters()
    assert (found["truncated"], found["foreign"], found["corrupt"], found["answers"]) == (2, 1, 1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65_536}, "port 65536; allowed: 0 to 65535"),
        ({"memory_bytes": 1}, "memory of 1 bytes; allowed: 4194304 to 4294967296"),
        ({"addresses": ["localhost"], "port": 0}, '"localhost" is not an IPv4 or IPv6 address'),
    ],
)
def test_what_is_not_allowed_is_said(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Aggregator(**options)  # type: ignore[arg-type]


def test_a_taken_port_is_named(aggregator: Aggregator) -> None:
    with pytest.raises(DeviceError, match=f"port {aggregator.port} is taken by another process"):
        Aggregator(port=aggregator.port, memory_bytes=MEMORY_MIN_BYTES)


def test_the_command_says_when_it_is_ready_and_what_it_has_done() -> None:
    command = [sys.executable, "-m", "sennit", "aggregate", "--native", "--bind", "127.0.0.1", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["mode"], ready["addresses"]) == ("native", ["127.0.0.1"])
        rank = Rank("127.0.0.1", ready["port"])
        rank.send(join(KEY, 0, 2, 8))
        assert rank.receive().kind == JOINED
        process.send_signal(signal.SIGUSR1)
        assert json.loads(process.stdout.readline())["counters"]["joined"] == 1
        process.terminate()
        assert len(json.loads(process.stdout.readline())["jobs"]) == 1
        assert process.wait(ENDS_IN_S) == 0
        rank.close()
