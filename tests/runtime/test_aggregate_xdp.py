# SPDX-License-Identifier: Apache-2.0
"""The XDP program of `sennit aggregate` against the native store: the same packets, the same answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sennit.offload.framing import LOOPBACK, Ends, frame
from sennit.runtime.aggregate.xdp import XdpPrograms
from sennit.testbed.topology import Impairment, Planes
from sennit.testbed.topology.fabric import mac_address
from sennit.transport.aggregator import MEMORY_MIN_BYTES, Aggregator
from tests.aggregation_flood import COUNTED, Flood
from tests.aggregation_wire import (
    BF16,
    F32,
    I32,
    JOINED,
    LEAF,
    REFUSED,
    RESULT,
    WAITING,
    Packet,
    join,
    tree_sum,
    unpack,
)

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena", "clang")]
KEY, PORT, RANKS = 0x0123456789ABCDEF, 4793, 3
XDP_DROP, XDP_PASS, XDP_TX = 1, 2, 3
DEADLINE_S = 20.0
REPEATS_IN_S = 0.05
# Of the aggregator's interface, beside the address that planes give it.
SECOND_IPV4 = "10.94.0.200"
GROUP_ENDS_IN_S = 100.0
# What the daemon needs for a datagram of loopback, which is there when it is asked.
ANSWERS_IN_S = 0.002
IPV4 = Ends(source=bytes([127, 0, 0, 1]), address=bytes([127, 0, 0, 1]))
UDP_BYTES = {4: 14 + 20 + 8, 16: 14 + 40 + 8}


class Both:
    """Ranks that send each packet to the programs and to a native aggregator, and compare the answers."""

    def __init__(self, *, is_native: bool, ends: Ends = LOOPBACK, tags: Sequence[tuple[int, int]] = ()) -> None:
        self.ends, self.is_native, self.tags = ends, is_native, tags
        self.programs = XdpPrograms(port=PORT, memory_bytes=MEMORY_MIN_BYTES)
        family, self.host = (socket.AF_INET, "127.0.0.1") if len(ends.address) == 4 else (socket.AF_INET6, "::1")
        self.programs.take_packets_for(ends.hardware, [self.host], is_native=is_native)
        self.daemon = Aggregator([self.host], port=0, memory_bytes=MEMORY_MIN_BYTES, arena=self.programs.address)
        self.native = Aggregator([self.host], port=0, memory_bytes=MEMORY_MIN_BYTES)
        self.ranks = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(RANKS)]
        for rank in self.ranks:
            rank.bind((self.host, 0))
            rank.setblocking(False)

    def send(self, number: int, content: bytes) -> tuple[int, list[tuple[int, bytes]]]:
        """What the program did, and (rank, packet) of the answers, which are those of the native aggregator."""
        rank = self.ranks[number]
        port = rank.getsockname()[1]
        framed = frame(content, PORT, self.ends, source_port=port, vlan_tags=self.tags)
        trial = self.programs.program.test_run(framed)
        answers = []
        if trial.verdict == XDP_TX:
            answers.append((number, self.checked(trial.packet, framed)))
        if trial.verdict == XDP_PASS:
            rank.sendto(content, (self.host, self.daemon.port))
            self.daemon.run(ANSWERS_IN_S)
            answers += self.answers(self.daemon)
        rank.sendto(content, (self.host, self.native.port))
        self.native.run(ANSWERS_IN_S)
        assert sorted(answers) == sorted(self.answers(self.native))
        return trial.verdict, answers

    def answers(self, aggregator: Aggregator) -> list[tuple[int, bytes]]:
        found = []
        for number, rank in enumerate(self.ranks):
            while True:
                try:
                    content, source = rank.recvfrom(2048)
                except BlockingIOError:
                    break
                assert source[1] == aggregator.port
                found.append((number, content))
        return found

    def checked(self, packet: bytes, sent: bytes) -> bytes:
        """The payload of a frame that goes back, whose ends are exchanged and whose checksum is right."""
        at = UDP_BYTES[len(self.ends.address)] + 4 * len(self.tags)
        back = replace(
            self.ends,
            source_hardware=self.ends.hardware,
            hardware=self.ends.source_hardware,
            source=self.ends.address,
            address=self.ends.source,
        )
        port = int.from_bytes(sent[at - 8 : at - 6], "big")
        has_checksum = len(self.ends.address) == 16
        assert packet == frame(
            packet[at:], port, back, with_checksum=has_checksum, source_port=PORT, vlan_tags=self.tags
        )
        return packet[at:]

    def join(self, window: int = 4) -> int:
        for number in range(RANKS):
            _, ((_, answer),) = self.send(number, join(KEY, number, RANKS, window).pack())
            assert unpack(answer).kind == JOINED
        return unpack(answer).job

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.programs.close()


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """A parameter chooses another way than the driver's, with IPv6."""
    how = getattr(request, "param", "native")
    tags = [(0x88A8, 7), (0x8100, 0x6002)] if how == "tagged" else []
    found = Both(is_native=how != "generic", ends=IPV4 if how == "ipv4" else LOOPBACK, tags=tags)
    yield found
    found.close()


def elements(random: np.random.Generator, arithmetic: int, stripes: int) -> bytes:
    """Of all sizes, subnormal and infinite ones, too. No NaN: which one comes out is unspecified."""
    if arithmetic == I32:
        return random.integers(-(2**31), 2**31, 8 * stripes, dtype=np.int32).tobytes()
    numbers = random.standard_normal(8 * stripes).astype(np.float32)
    numbers *= np.float32(2.0) ** random.integers(-149, 120, numbers.size).astype(np.float32)
    numbers[random.integers(0, numbers.size)] = random.choice([np.inf, -0.0, 0.0, 1e-45])
    if arithmetic == BF16:
        return np.repeat((numbers.view(np.uint32) >> 16).astype(np.uint16), 2).tobytes()
    return numbers.tobytes()


def leaves_of(random: np.random.Generator, job: int, block: int) -> list[bytes]:
    arithmetic, stripes = int(random.integers(0, 3)), int(random.choice([1, 2, 43, 44]))
    return [
        Packet(
            kind=LEAF,
            job=job,
            key=KEY,
            block=block,
            mark=block * 3,
            leaf=number,
            arithmetic=arithmetic,
            stripes=elements(random, arithmetic, stripes),
        ).pack()
        for number in range(RANKS)
    ]


@pytest.mark.parametrize("both", ["native", "generic", "ipv4", "tagged"], indirect=True)
def test_random_packets_get_the_answers_of_the_native_store(both: Both, rng: np.random.Generator) -> None:
    """Lost, repeated and late leaves, of blocks that share slots."""
    job = both.join()
    blocks = [leaves_of(rng, job, block) for block in range(24)]
    kinds = set()
    for step in range(240):
        # Around a place that moves on, so that slots are taken again while some ranks are late.
        block = min(max(step // 10 + int(rng.integers(-9, 3)), 0), len(blocks) - 1)
        number = int(rng.integers(0, RANKS))
        _, answers = both.send(number, blocks[block][number])
        kinds |= {unpack(answer).kind for _, answer in answers}
    assert kinds == {RESULT, WAITING}
    counted, at_daemon, native = both.programs.counters(), both.daemon.counters(), both.native.counters()
    together = {name: counted[name] + at_daemon[name] for name in counted}
    assert together == {name: native[name] for name in together}
    assert min(counted["stored"], at_daemon["completed"], counted["stale"], at_daemon["repeated"]) > 0
    assert (counted["repeated_late"] > 0) == both.is_native


def test_what_is_refused_is_refused_by_the_daemon(both: Both) -> None:
    job = both.join()
    leaf = Packet(kind=LEAF, job=job, key=KEY, mark=1, stripes=bytes(64))
    assert both.send(0, leaf.pack()) == (XDP_DROP, [])
    others = [replace(leaf, leaf=1, mark=2), replace(leaf, leaf=1, arithmetic=I32), replace(leaf, stripes=bytes(32))]
    for other in [*others, replace(leaf, job=job + 64), replace(leaf, key=1)]:
        action, ((_, answer),) = both.send(1, other.pack())
        assert (action, unpack(answer).kind) == (XDP_PASS, REFUSED)


def test_junk_is_dropped_in_the_kernel(both: Both, rng: np.random.Generator) -> None:
    job = both.join()
    good = Packet(kind=LEAF, job=job, key=KEY, arithmetic=F32, stripes=bytes(96)).pack()
    sent = [good[:size] for size in range(0, len(good) - 1, 7)] + [good + b"x", good + bytes(100)]
    for at in range(len(good)):
        broken = bytearray(good)
        broken[at] ^= 1 << int(rng.integers(0, 8))
        sent.append(bytes(broken))
    answer = Packet(kind=RESULT, job=job, key=KEY, stripes=bytes(96))
    sent += [answer.pack(), replace(answer, kind=LEAF, leaf=RANKS).pack(), replace(answer, kind=7).pack()]
    sent.append(replace(answer, kind=LEAF, stripes=b"").pack())
    for content in sent:
        action, answers = both.send(0, content)
        # A changed kind may be that of a packet for the daemon, which sees the checksum.
        assert (action, answers) == (XDP_DROP, []) or content[3] in (3, 6)
    counted, at_daemon, native = both.programs.counters(), both.daemon.counters(), both.native.counters()
    names = ("truncated", "foreign", "wrong_version", "malformed", "corrupt", "unexpected")
    assert {name: counted[name] + at_daemon[name] for name in names} == {name: native[name] for name in names}
    assert min(native[name] for name in names) > 0
    assert both.send(0, good) == (XDP_DROP, [])
    assert both.programs.counters()["stored"] == 1


def test_packets_of_others_go_on(both: Both) -> None:
    content = join(KEY, 0, RANKS, 4).pack()
    framed = frame(content, PORT, both.ends)
    stranger = bytes([9]) * len(both.ends.address)
    for other in (
        frame(content, PORT + 1, both.ends),
        frame(content, PORT, replace(both.ends, hardware=bytes([2, 0, 0, 0, 0, 1]))),
        frame(content, PORT, replace(both.ends, address=stranger)),
        framed[:30],
    ):
        trial = both.programs.program.test_run(other)
        assert (trial.verdict, trial.packet) == (XDP_PASS, other)


def test_two_processors_may_have_leaves_of_one_block(both: Both, rng: np.random.Generator) -> None:
    """A leaf that finds its slot taken is dropped. When all have come, the sums are right."""
    job = both.join(window=64)
    blocks = [leaves_of(rng, job, block) for block in range(60)]
    framed = [[frame(leaf, PORT, both.ends, source_port=9) for leaf in leaves] for leaves in blocks]
    program = both.programs.program

    def send(order: list[int]) -> None:
        for leaves in framed:
            for number in order:
                program.test_run(leaves[number])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(send, [[0, 2, 1], [1, 2, 0]]))
    send([0, 1, 2])
    for leaves, frames in zip(blocks, framed, strict=True):
        for number, leaf in enumerate(leaves):
            both.ranks[number].sendto(leaf, (both.host, both.native.port))
        both.native.run(ANSWERS_IN_S)
        expected = {content for _, content in both.answers(both.native)}
        # One of four repeats goes on to the daemon.
        sent_back = [trial.packet for _ in range(2) if (trial := program.test_run(frames[2])).verdict == XDP_TX]
        assert {both.checked(packet, frames[2]) for packet in sent_back} == expected


class Rack:
    """Hosts of a plane: ranks, and behind them the command on a host of its own."""

    def __init__(self, planes: Planes) -> None:
        self.planes, self.host = planes, planes.hosts - 1
        (interface,) = planes.interfaces(self.host)
        self.call(self.host, "ip", "address", "add", f"{SECOND_IPV4}/24", "dev", interface)
        for rank in range(self.host):
            place = ("lladdr", mac_address(self.host, 0), "dev", interface)
            self.call(rank, "ip", "neighbour", "add", SECOND_IPV4, *place)
        command = [sys.executable, "-m", "sennit", "aggregate", interface, "--port", str(PORT), "--json"]
        self.process = planes.popen(self.host, [*command, "--memory", "4MiB"], stdout=subprocess.PIPE, text=True)
        self.mode = self.line()["mode"]
        self.job = 0

    def call(self, host: int, *command: str) -> None:
        assert self.planes.popen(host, list(command)).wait(DEADLINE_S) == 0

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ranks(self, *, is_ipv4: bool) -> list[socket.socket]:
        return [self.socket_of(number, is_ipv4=is_ipv4) for number in range(RANKS)]

    def socket_of(self, number: int, *, is_ipv4: bool) -> socket.socket:
        address = SECOND_IPV4 if is_ipv4 else self.planes.addresses(self.host)[0]
        family = socket.AF_INET if is_ipv4 else socket.AF_INET6
        found = self.planes.within(number, lambda: socket.socket(family, socket.SOCK_DGRAM))
        # Takes packets from there alone.
        self.planes.within(number, found.connect, (address, PORT))
        found.settimeout(DEADLINE_S)
        return found

    def join(self, ranks: list[socket.socket]) -> int:
        for number, rank in enumerate(ranks):
            rank.send(join(KEY, number, RANKS, 4).pack())
            answer = unpack(rank.recv(2048))
            assert answer.kind == JOINED
        return answer.job

    def counters(self, kind: str) -> dict[str, int]:
        self.process.send_signal(signal.SIGUSR1)
        found: dict[str, int] = self.line()[kind]
        return found


@pytest.mark.needs("native-xdp", "tc-bpf")
@pytest.mark.parametrize("is_ipv4", [False, True], ids=["ipv6", "ipv4"])
def test_all_ranks_get_sums_over_links_from_the_kernel(is_ipv4: bool, rng: np.random.Generator) -> None:
    with Planes(hosts=RANKS + 1, planes=1, mtu=1500, per_packet=True) as planes:
        rack = Rack(planes)
        assert rack.mode == "xdp"
        ranks = rack.ranks(is_ipv4=is_ipv4)
        job = rack.join(ranks)
        blocks = 12
        for block in range(blocks):
            content = [elements(rng, F32, 44) for _ in ranks]
            for number, rank in enumerate(ranks):
                leaf = Packet(kind=LEAF, job=job, key=KEY, block=block, leaf=number, stripes=content[number])
                rank.send(leaf.pack())
            expected = tree_sum([np.frombuffer(leaf, np.float32) for leaf in content]).tobytes()
            for rank in ranks:
                answer = unpack(rank.recv(2048))
                assert (answer.kind, answer.block, answer.stripes) == (RESULT, block, expected)
        counted = rack.counters("in_kernel")
        assert (counted["stored"], counted["completed"]) == ((RANKS - 1) * blocks, blocks)
        assert (counted["answers"], counted["unanswered"]) == (RANKS * blocks, 0)
        packet_bytes = 40 + 44 * 32
        assert counted["sent_bytes"] == RANKS * blocks * packet_bytes == counted["received_bytes"]
        stranger = rack.socket_of(0, is_ipv4=is_ipv4)
        with Flood(stranger, job, least=1_000) as flood:
            for block in range(blocks, 2 * blocks):
                for number, rank in enumerate(ranks):
                    rank.settimeout(REPEATS_IN_S)
                    leaf = Packet(kind=LEAF, job=job, key=KEY, block=block, leaf=number, stripes=content[number])
                    rank.send(leaf.pack())
                for number, rank in enumerate(ranks):
                    leaf = Packet(kind=LEAF, job=job, key=KEY, block=block, leaf=number, stripes=content[number])
                    assert sum_of(rank, leaf) == expected
        stranger.close()
        counted, in_kernel = rack.counters("counters"), rack.counters("in_kernel")
        assert flood.sent >= 1_000
        assert min(counted[name] for name in COUNTED) > 100
        # A job is looked up by the daemon, which alone makes them. The rest ends in the kernel.
        assert all(in_kernel[name] == counted[name] for name in COUNTED if name != "unknown_job")
        # Once more: it goes back from the interface itself, or from the daemon.
        ranks[0].send(Packet(kind=LEAF, job=job, key=KEY, block=2 * blocks - 1, stripes=bytes(44 * 32)).pack())
        for rank in ranks:
            rank.close()
        rack.process.kill()
        rack.process.wait(DEADLINE_S)
        assert planes.within(rack.host, attached, *planes.interfaces(rack.host)) == ""


def sum_of(rank: socket.socket, leaf: Packet) -> bytes:
    """Repeats the leaf until its sum comes, as a rank does."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        with contextlib.suppress(TimeoutError):
            while True:
                answer = unpack(rank.recv(2048))
                if (answer.kind, answer.block) == (RESULT, leaf.block):
                    return answer.stripes
        rank.send(leaf.pack())
    raise AssertionError(f"no sum of block {leaf.block} within {DEADLINE_S:g} s")


GROUP = """
import sys
import torch, torch.distributed as dist
import sennit
dist.init_process_group("sennit")
for elements in (1_000, 100_000, 300_000):
    own = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()))
    found, leaves = own.clone(), [torch.empty(elements) for _ in range(dist.get_world_size())]
    dist.all_reduce(found)
    dist.all_gather(leaves, own)
    assert torch.equal(found, leaves[0] + leaves[1] + leaves[2])
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.needs("native-xdp", "tc-bpf", "backend")
def test_a_group_gets_its_bits_from_the_kernel_over_a_network_that_loses() -> None:
    with Planes(hosts=RANKS + 1, planes=1, mtu=1500, per_packet=True) as planes:
        rack = Rack(planes)
        planes.impair(Impairment(loss_fraction=0.02, duplicate_fraction=0.02, reorder_fraction=0.05, reorder_depth=9))
        variables = {
            "MASTER_ADDR": planes.addresses(0)[0],
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(RANKS),
            "SENNIT_AGGREGATOR": f"[{planes.addresses(rack.host)[0]}]:{PORT}",
            "SENNIT_ALGORITHM": "aggregate",
        }
        ranks = [
            planes.popen(
                number,
                [sys.executable, "-c", GROUP],
                env={**os.environ, **planes.environment(number), **variables, "RANK": str(number)},
            )
            for number in range(RANKS)
        ]
        assert [rank.wait(GROUP_ENDS_IN_S) for rank in ranks] == [0] * RANKS
        counted, in_kernel = rack.counters("counters"), rack.counters("in_kernel")
        # 100,000 and 300,000 elements are 285 and 853 blocks. Each was summed once, nearly all without the daemon.
        assert counted["stored"] == (RANKS - 1) * counted["completed"]
        assert counted["completed"] >= 285 + 853
        assert in_kernel["completed"] > 1000


def attached(interface: str) -> str:
    """What `ip link` says of programs at an interface."""
    found = subprocess.run(["ip", "link", "show", interface], check=True, capture_output=True, text=True).stdout
    return next((line for line in found.splitlines() if "prog/xdp" in line), "")
