# SPDX-License-Identifier: Apache-2.0
"""A rank written only from docs/reference/wire.md, in Python over pyverbs, talks with the native engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.testbed.vm import links
from sennit.transport import errors
from sennit.transport.algorithms import alltoall, point_to_point
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.rails import Rail
from sennit.transport.meeting.store import FileStore
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.signature import Kind, signature

pytestmark = pytest.mark.rdma

Bytes = npt.NDArray[np.uint8]
Netem = Callable[[int, str], None]
NATIVE, PEER = 0, 1  # ranks and their devices
PATHS = 3
TIMEOUT_S = 60.0
PAYLOAD_MAX = 4_096
EAGER_MAX = PAYLOAD_MAX - 32
MANY_PACKETS = 200  # more than may be in flight, in either direction
# Nothing, one packet, the largest eager message, the smallest bulk message, some packets, and many.
SIZES = (0, 1, EAGER_MAX, EAGER_MAX + 1, 10_000, MANY_PACKETS * PAYLOAD_MAX + 77)
EAGER_SLOTS = 64
# docs/reference/wire.md, "Messages"
P2P_KEY = 1 << 63
SLOT_BITS = 20


class Pair:
    """The native rank and the Python rank in one process. The native rank has its own thread."""

    def __init__(self, package: ModuleType, peer: Any, folder: Path) -> None:
        self.controls = package.controls
        self.make_header = package.messages.Header
        self.peer = peer
        store = FileStore(folder)
        made: list[Communicator] = []

        def config(*interfaces: str) -> Config:
            return Config(transport=TransportKind.VERBS, paths=PATHS, timeout_s=TIMEOUT_S, interfaces=interfaces)

        def make() -> None:
            made.append(
                Communicator(rank=NATIVE, world=2, store=store, config=config(links.netdev(NATIVE)), name="peer")
            )

        thread = threading.Thread(target=make)
        thread.start()
        rails = [Rail(interface=links.netdev(PEER), address=links.address(PEER, 6))]
        rendezvous.connect(
            lambda _: peer, config=config(), store=store, rank=PEER, world=2, rails=lambda: rails, name="peer"
        )
        thread.join(TIMEOUT_S)
        (self.native,) = made

    def close(self) -> None:
        """Ends both: each rank sends and receives a goodbye."""
        self.peer.close()
        self.native.shutdown()
        self.peer.until(lambda: self.peer.is_peer_closed, "goodbye")

    def native_sends(self, data: Bytes, tag: int) -> Any:
        return self._post(point_to_point.send, data, tag)

    def native_receives(self, data: Bytes, tag: int) -> Any:
        return self._post(point_to_point.recv, data, tag)

    def _post(self, algorithm: Any, data: Bytes, tag: int) -> Any:
        def compile_plan() -> Any:
            return algorithm(world=2, rank=NATIVE, peer=PEER, item_bytes=1)

        return self.native.post(algorithm.__name__, compile_plan, [data], tag=tag, background=True, counts=[data.size])

    def header(self, size_bytes: int, tag: int) -> Any:
        return self.make_header(P2P_KEY | tag, signature(Kind.P2P), size_bytes)

    def counted(self, name: str) -> int:
        return self.native.counters()[name]


@pytest.fixture
def connect(peer: ModuleType, tmp_path: Path) -> Iterator[Callable[[], Pair]]:
    """Makes pairs for tests that may break them."""
    with peer.rank.Peer(rank=PEER, paths=PATHS) as made:
        pairs: list[Pair] = []

        def make() -> Pair:
            pairs.append(Pair(peer, made, tmp_path))
            return pairs[0]

        yield make
        for pair in pairs:
            pair.native.shutdown(0.0)


@pytest.fixture(scope="module")
def pair(peer: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair that tests share if they leave it intact."""
    with peer.rank.Peer(rank=PEER, paths=PATHS) as made:
        pair = Pair(peer, made, tmp_path_factory.mktemp("pair"))
        yield pair
        pair.close()


def exchange(pair: Pair, rng: np.random.Generator, sizes: Sequence[int]) -> None:
    """Sends messages of these sizes in both directions, all at once."""
    out, back = ([rng.integers(0, 256, size, np.uint8) for size in sizes] for _ in range(2))
    landed = [np.zeros(size, np.uint8) for size in sizes]
    operations = [pair.native_sends(data, tag) for tag, data in enumerate(out)]
    operations += [pair.native_receives(data, tag) for tag, data in enumerate(landed)]
    incoming = [pair.peer.receive(pair.header(size, tag), is_requested=True) for tag, size in enumerate(sizes)]
    for tag, data in enumerate(back):
        pair.peer.send(pair.header(data.size, tag), data.tobytes(), is_requested=True)
    pair.peer.until(lambda: all(one.is_done for one in incoming), "messages from the native rank")
    pair.peer.until(lambda: all(operation.done() for operation in operations), "the native rank")
    for operation in operations:
        operation.wait()
    for one, data in zip(incoming, out, strict=True):
        assert one.data == data.tobytes()
    for data, sent in zip(landed, back, strict=True):
        np.testing.assert_array_equal(data, sent)


def test_messages_of_all_sizes_cross_both_ways_over_all_paths(pair: Pair, rng: np.random.Generator) -> None:
    exchange(pair, rng, SIZES)
    assert pair.peer.paths_heard == pair.peer.paths_echoed == set(range(PATHS))
    assert pair.counted("data_packets_received") > MANY_PACKETS
    assert pair.counted("bad_control") == 0


@pytest.mark.parametrize("rows", [PAYLOAD_MAX, MANY_PACKETS * PAYLOAD_MAX // 2 + 5])
def test_memory_is_advertised_for_a_collective_without_being_asked_for(
    pair: Pair, rng: np.random.Generator, rows: int
) -> None:
    sent, answer = (rng.integers(0, 256, (2, rows), np.uint8) for _ in range(2))
    landed = np.zeros((2, rows), np.uint8)
    key = pair.native.sequence + 1 << SLOT_BITS
    header = pair.make_header(key, signature(Kind.ALLTOALL, type_code=Dtype.U8), rows)

    def compile_plan() -> Any:
        return alltoall(world=2, rank=NATIVE, item_bytes=1)

    operation = pair.native.post("alltoall", compile_plan, [sent, landed], background=True, counts=[rows] * 4)
    incoming = pair.peer.receive(header, is_requested=False)
    pair.peer.send(header, answer[NATIVE].tobytes(), is_requested=False)
    pair.peer.until(lambda: incoming.is_done and operation.done(), "the AlltoAll")
    operation.wait()
    assert incoming.data == sent[PEER].tobytes()
    np.testing.assert_array_equal(landed, np.stack([sent[NATIVE], answer[NATIVE]]))


def test_messages_survive_loss(pair: Pair, rng: np.random.Generator, netem: Netem) -> None:
    for device in (NATIVE, PEER):
        netem(device, "loss 1%")
    sent_again = [pair.counted("retransmitted_packets"), pair.peer.sending.resent]
    for _ in range(20):  # some 400 packets each
        exchange(pair, rng, SIZES)
        if pair.counted("retransmitted_packets") > sent_again[0] and pair.peer.sending.resent > sent_again[1]:
            return
    pytest.fail("8,000 packets without a loss")


def test_a_sender_keeps_to_what_it_was_granted(connect: Callable[[], Pair], rng: np.random.Generator) -> None:
    pair = connect()
    pair.peer.receiving.grant_packets = 8
    exchange(pair, rng, [MANY_PACKETS * PAYLOAD_MAX])  # the peer refuses packets beyond its grant
    assert pair.counted("credit_stalls") > 0


def test_what_cannot_be_is_counted_and_changes_nothing(pair: Pair, rng: np.random.Generator) -> None:
    controls, queues = pair.controls, pair.peer.queues
    send, eager, write = queues.send, queues.send_with_immediate, queues.write_with_immediate
    exchange(pair, rng, [1, 10_000])  # numbers are beyond their start
    state = pair.peer.receiving.state(0.0, PAYLOAD_MAX)
    state["adverts"] = ()

    def control(**changes: Any) -> bytes:
        fields = {**state, "credits_seen": pair.peer.sending.credits_seen, **changes}
        packed: bytes = controls.Control(**fields).pack()
        return packed

    beyond = 1 << 20  # above every number that was sent
    bad_controls = [
        controls.Control().pack(version=controls.VERSION + 1),
        control()[:-1],
        control() + b"\0",
        control(eager_received=state["eager_received"] + beyond),
        control(eager_consumed=state["eager_consumed"] + 1),
        control(completed_below=state["completed_below"] + 1),
        control(credits_seen=pair.peer.sending.credits_seen + 1),
        control(sacks=[controls.Sack(credit=state["completed_below"], first_missing=1, bitmap=1)]),
        control(reason="x" * 513),
    ]
    before = pair.native.counters()

    def refused(name: str, count: int) -> None:
        pair.peer.until(lambda: pair.counted(name) >= before[name] + count, f"{count} {name}")

    for payload in bad_controls:
        send(0, payload)
    refused("bad_control", len(bad_controls))
    next_eager = pair.peer.sending.eager_sent
    # A credit that is not open. Without payload the device does not check the key.
    write(1, b"", (1 + state["completed_below"] + 7) << SLOT_BITS, 0, 0)
    # Eager packets: one with a credit's slot, one beyond the eager window, one with an incomplete header.
    eager(2, bytes(32), 5 << SLOT_BITS)
    eager(0, bytes(32), next_eager + EAGER_SLOTS)
    eager(1, bytes(31), next_eager)
    refused("bad_slot", 3)
    refused("bad_range", 1)
    # A key that the device never issued.
    write(1, b"abcd", 1 << SLOT_BITS, 4_096, 12_345)
    refused("remote_access_errors", 1)
    exchange(pair, rng, SIZES)
    after = pair.native.counters()
    counted = {name: after[name] - before[name] for name in ("bad_control", "bad_slot", "bad_range", "bad_key")}
    assert counted == {"bad_control": len(bad_controls), "bad_slot": 3, "bad_range": 1, "bad_key": 0}


def test_memory_for_a_message_that_nobody_sends_stands_in_nobodys_way(
    connect: Callable[[], Pair], rng: np.random.Generator
) -> None:
    pair = connect()
    unwanted = pair.peer.receive(pair.make_header(7 << SLOT_BITS, 1, 9_000), is_requested=False)
    exchange(pair, rng, [1, 10_000])
    assert not unwanted.is_done


def test_an_eager_packet_that_is_no_message_ends_the_group(connect: Callable[[], Pair]) -> None:
    pair = connect()
    operation = pair.native_receives(np.zeros(5, np.uint8), 1)
    pair.peer.queues.send_with_immediate(0, bytes(28) + b"\x01" + bytes(3), 0)
    with pytest.raises(errors.PeerError, match="rank 1 sent a malformed eager message"):
        operation.wait()


def test_what_an_abort_says_is_what_the_others_raise(connect: Callable[[], Pair]) -> None:
    pair = connect()
    operation = pair.native_receives(np.zeros(5, np.uint8), 1)
    abort = pair.controls.Control(flags=pair.controls.Flag.ABORT, reason="the dog ate it")
    pair.peer.queues.send(0, abort.pack())
    with pytest.raises(errors.PeerError, match="the dog ate it"):
        operation.wait()
