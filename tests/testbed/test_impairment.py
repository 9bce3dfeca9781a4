# SPDX-License-Identifier: Apache-2.0
"""Each knob of an impairment, packet by packet: arrivals match the dice and the counters."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from sennit.testbed.topology import Draw, Impairment, Planes, dice
from tests.testbed.datagrams import NUMBER_BYTES, Account, open_socket, send_datagrams

pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf", "nsenter")]

COUNT = 5_000
ICMPV6_ECHO_REQUEST, ICMPV6_ECHO_REPLY = 128, 129  # RFC 4443, section 4
KNOBS = {
    "loss": {"loss_fraction": 0.02},
    "ecn": {"ecn_fraction": 0.05},
    "duplicate": {"duplicate_fraction": 0.02},
    "corrupt": {"corrupt_fraction": 0.02},
    "reorder 1": {"reorder_fraction": 0.05, "reorder_depth": 1},
    "reorder 64": {"reorder_fraction": 0.05, "reorder_depth": 64},
    "reorder 127": {"reorder_fraction": 0.5, "reorder_depth": 127},
    "all": {
        "loss_fraction": 0.02,
        "ecn_fraction": 0.05,
        "duplicate_fraction": 0.02,
        "corrupt_fraction": 0.02,
        "reorder_fraction": 0.05,
        "reorder_depth": 64,
    },
}


def impairment(knob: str, seed: int) -> Impairment:
    # Keeps the number at the start of a datagram readable.
    return Impairment(**KNOBS[knob], corrupt_skip_bytes=NUMBER_BYTES, seed=seed)  # type: ignore[arg-type]


class Prediction:
    """What fabric.bpf.c must do with packets 0, 1, 2, …, computed from the dice alone."""

    def __init__(self, wanted: Impairment, count: int) -> None:
        hits = {
            draw: {n for n, hit in zip(range(count), dice(wanted, 0, 0, draw), strict=False) if hit}
            for draw in (Draw.DROP, Draw.DUPLICATE, Draw.MARK, Draw.CORRUPT, Draw.HOLD)
        }
        self.dropped = hits[Draw.DROP]
        self.duplicated = hits[Draw.DUPLICATE] - self.dropped
        self.held = hits[Draw.HOLD] - self.dropped
        self.released = {n for n in self.held if n + wanted.reorder_depth < count}
        self.marked = hits[Draw.MARK] - self.dropped - self.held
        self.corrupted = hits[Draw.CORRUPT] - self.dropped - self.held
        self.order: list[int] = []
        for n in range(count):
            if n in self.duplicated:
                self.order.append(n)
            if n not in self.dropped and n not in self.held:
                self.order.append(n)
            if n - wanted.reorder_depth in self.released:
                self.order.append(n - wanted.reorder_depth)


@pytest.mark.parametrize("knob", KNOBS)
def test_every_packet_suffers_what_its_dice_say(knob: str, clear_planes: Planes, seed: int) -> None:
    wanted = impairment(knob, seed)
    clear_planes.impair(wanted)
    account = send_datagrams(clear_planes, COUNT, segments=10)
    expected = Prediction(wanted, COUNT)
    assert account.order == expected.order
    assert set(account.marked) == expected.marked
    assert set(account.damaged) == expected.corrupted
    assert len(account.damaged) == len(expected.corrupted)

    switch = account.switch
    assert switch.packets == COUNT
    assert switch.bytes == COUNT * (14 + 40 + 8 + 1_000)  # Ethernet, IPv6, UDP
    assert switch.dropped == len(expected.dropped)
    assert switch.marked == len(expected.marked)
    assert switch.duplicated == len(expected.duplicated) == len(account.repeated)
    assert switch.corrupted == len(expected.corrupted)
    assert switch.held == len(expected.held)
    assert switch.released == len(expected.released)
    assert (switch.unheld, switch.failed, switch.blackholed) == (0, 0, 0)
    # The same, from the receiver's side alone.
    assert len(account.missing) == switch.dropped + len(expected.held - expected.released - expected.duplicated)
    if knob in {"reorder 64", "reorder 127"}:  # at depth 1 two packets in a row keep their order
        assert len(account.late) == switch.released


def test_only_the_hosts_and_planes_named_are_impaired(clear_planes: Planes, seed: int) -> None:
    clear_planes.impair(Impairment(loss_fraction=0.5, seed=seed), hosts=[0], planes=[1])
    assert send_datagrams(clear_planes, 200, plane=0).missing == set()
    assert send_datagrams(clear_planes, 200, plane=1, source=1, target=0).missing == set()
    assert 50 < len(send_datagrams(clear_planes, 200, plane=1).missing) < 150


def test_the_same_seed_again_hits_the_same_packets(clear_planes: Planes, seed: int) -> None:
    wanted = impairment("all", seed)
    orders = []
    for _ in range(2):
        clear_planes.impair(wanted)
        orders.append(send_datagrams(clear_planes, COUNT, segments=10).order)
    assert orders[0] == orders[1]
    clear_planes.impair(impairment("all", seed ^ 1))
    assert send_datagrams(clear_planes, COUNT, segments=10).order != orders[0]


def test_super_packets_share_their_fate(seed: int) -> None:
    segments = 10
    wanted = Impairment(loss_fraction=0.1, ecn_fraction=0.1, duplicate_fraction=0.1, seed=seed)
    with Planes(hosts=2, planes=1, per_packet=False) as planes:
        planes.impair(wanted)
        account = send_datagrams(planes, COUNT, segments=segments)
        # A packet that cannot be held back passes.
        planes.impair(Impairment(reorder_fraction=1, reorder_depth=1, seed=seed))
        unheld = send_datagrams(planes, 100, segments=segments)
    expected = Prediction(wanted, COUNT // segments)
    for groups, packets in (
        (expected.dropped, account.missing),
        (expected.marked, set(account.marked)),
        (expected.duplicated, set(account.repeated)),
    ):
        assert packets == {group * segments + n for group in groups for n in range(segments)}
    switch = account.switch
    assert switch.packets == COUNT
    assert switch.dropped == len(account.missing)
    assert switch.marked == len(account.marked)
    assert switch.duplicated == len(account.repeated)
    assert unheld.missing == set()
    assert (unheld.switch.unheld, unheld.switch.held) == (100, 0)


def test_packets_held_back_under_an_old_impairment_never_come(clear_planes: Planes) -> None:
    clear_planes.impair(Impairment(reorder_fraction=1, reorder_depth=100))
    account = send_datagrams(clear_planes, 50)
    assert (account.switch.held, account.order) == (50, [])
    clear_planes.impair(Impairment())
    assert send_datagrams(clear_planes, 300).order == list(range(300))


def test_two_processors_lose_no_packet_between_them(clear_planes: Planes, seed: int) -> None:
    """Holding and releasing race when a host sends from several threads. The sums must still agree."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("missing capability cores: needs 2")
    clear_planes.impair(Impairment(reorder_fraction=0.5, reorder_depth=1, duplicate_fraction=0.1, seed=seed))
    before = clear_planes.counters(0, 0)
    source, target = clear_planes.addresses(0)[0], clear_planes.addresses(1)[0]
    with clear_planes.within(1, open_socket, target) as receiver:
        receiver.setblocking(False)

        def send(processor: int) -> None:
            os.sched_setaffinity(0, {processor})  # only this thread
            with clear_planes.within(0, open_socket, source) as sender:
                for number in range(2 * COUNT):
                    sender.sendto(struct.pack("!QQ", processor, number) + bytes(100), receiver.getsockname())

        threads = [threading.Thread(target=send, args=(processor,)) for processor in processors[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        switch = clear_planes.counters(0, 0) - before
        arrived: list[bytes] = []
        wanted = switch.packets - (switch.held - switch.released) + switch.duplicated
        deadline_s = time.monotonic() + 30
        while len(arrived) < wanted and time.monotonic() < deadline_s:
            try:
                arrived.append(receiver.recv(2_000))
            except BlockingIOError:
                os.sched_yield()
    assert switch.packets == 4 * COUNT
    assert len(arrived) == wanted
    assert len(arrived) - len(set(arrived)) >= switch.duplicated - (switch.held - switch.released)
    assert switch.failed == 0
    # At depth 1, no more than the last packet can still wait.
    assert 0 <= switch.held - switch.released <= 1
    assert switch.released > COUNT


def test_tcp_is_impaired_and_its_stream_stays_whole(clear_planes: Planes, seed: int) -> None:
    """The switch drops a corrupted TCP packet, because virtual interfaces do not check checksums."""
    clear_planes.impair(Impairment(loss_fraction=0.02, corrupt_fraction=0.02, duplicate_fraction=0.02, seed=seed))
    before = clear_planes.counters(0, 1)
    data = random.Random(seed).randbytes(8 << 20)
    received = bytearray()
    address = clear_planes.addresses(1)[1]

    def listen() -> socket.socket:
        return socket.create_server((address, 0), family=socket.AF_INET6)

    def open_sender() -> socket.socket:
        return socket.create_connection(listener.getsockname()[:2], timeout=60)

    def send_all() -> None:
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)

    with clear_planes.within(1, listen) as listener:
        listener.settimeout(60)
        with clear_planes.within(0, open_sender) as sender:
            receiver, _ = listener.accept()
            receiver.settimeout(60)
            thread = threading.Thread(target=send_all)
            thread.start()
            with receiver:
                while piece := receiver.recv(1 << 20):
                    received += piece
            thread.join()
    assert received == data
    switch = clear_planes.counters(0, 1) - before
    assert switch.packets > len(data) // 9_000
    assert switch.dropped > 0
    assert switch.corrupted > 0
    assert switch.failed == 0


def test_neighbours_and_ping_pass(clear_planes: Planes) -> None:
    clear_planes.impair(Impairment(loss_fraction=1))
    before = clear_planes.counters(0, 0)

    def open_ping() -> socket.socket:
        return socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.getprotobyname("ipv6-icmp"))

    with clear_planes.within(0, open_ping) as ping:
        ping.settimeout(30)
        # The kernel computes the checksum.
        ping.sendto(struct.pack("!BBHHH", ICMPV6_ECHO_REQUEST, 0, 0, 1, 1), (clear_planes.addresses(1)[0], 0))
        while ping.recv(1_000)[0] != ICMPV6_ECHO_REPLY:
            pass
    switch = clear_planes.counters(0, 0) - before
    assert (switch.packets, switch.dropped) == (0, 0)
    assert switch.other >= 1


def test_small_and_empty_payloads_are_left_alone_or_counted(clear_planes: Planes) -> None:
    """An empty payload does not count as corrupted. A frame too short to be held passes and is counted."""
    clear_planes.impair(Impairment(corrupt_fraction=1, corrupt_skip_bytes=NUMBER_BYTES))
    account: Account = send_datagrams(clear_planes, 100, size_bytes=NUMBER_BYTES)
    assert (account.switch.corrupted, account.missing) == (0, set())
    clear_planes.impair(Impairment(reorder_fraction=1, reorder_depth=1))
    account = send_datagrams(clear_planes, 100, size_bytes=NUMBER_BYTES)
    assert account.order == list(range(100))
    assert (account.switch.held, account.switch.unheld) == (0, 100)


def test_ipv4_is_impaired_too_and_fragments_pass(clear_planes: Planes) -> None:
    source, target = clear_planes.ipv4_addresses(0)[0], clear_planes.ipv4_addresses(1)[0]

    def open_ipv4(address: str) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((address, 0))
        made.settimeout(30)
        return made

    body = bytes(1_000)
    before = clear_planes.counters(0, 0)
    with (
        clear_planes.within(0, open_ipv4, source) as sender,
        clear_planes.within(1, open_ipv4, target) as receiver,
    ):
        clear_planes.impair(Impairment(corrupt_fraction=1, duplicate_fraction=1))
        sender.sendto(body, receiver.getsockname())
        clean, damaged = receiver.recv(2_000), receiver.recv(2_000)
        assert clean == body
        # one byte differs
        assert sorted(damaged)[:-1] == list(body[1:])
        assert max(damaged) > 0
        clear_planes.impair(Impairment(loss_fraction=1))
        sender.sendto(body, receiver.getsockname())
        # Longer than the MTU: two fragments. The switch cannot classify them without a whole header.
        sender.sendto(b"x" * 12_000, receiver.getsockname())
        assert receiver.recv(20_000) == b"x" * 12_000
    switch = clear_planes.counters(0, 0) - before
    assert (switch.packets, switch.corrupted, switch.duplicated, switch.dropped) == (2, 1, 1, 1)
    assert switch.other >= 2
