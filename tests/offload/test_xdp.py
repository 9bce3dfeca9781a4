# SPDX-License-Identifier: Apache-2.0
"""A plan's program in the kernel: its counters, the batches that torch sees, and packets over a real link."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sennit.ebpf import kernel_features
from sennit.ebpf.btf import Btf
from sennit.ebpf.compiler import compile_source
from sennit.ebpf.elf import Elf
from sennit.ebpf.library import BpfError
from sennit.ebpf.loader import BpfObject
from sennit.offload import plan_program
from sennit.offload.admission import FeedCounters, Verdict
from sennit.offload.batches import CURSORS_OFFSET, BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.framing import Ends, frame
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.ingest.protocol import session_numbers
from sennit.offload.operators import Cross, FirstX, SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.records import HEADER, encode_packets, encode_records, sealed
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.xdp import XdpReceiver
from tests.offload.agreement import assert_same_batch
from tests.offload.strategies import random_rows

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
SESSION, PORT, ROWS = 77, 4800, 16
XDP_DROP, XDP_PASS = 1, 2
PLAN = FeaturePlan(
    schema=Schema(dense=(Dense(name="age"),), ids=(Ids(name="user"), Ids(name="seen", length=9, is_list=True))),
    columns={
        "recent": FirstX(column="seen", count=3),
        "hashed": SigridHash(column="recent", salt=1, max_value=1000),
        "who": SigridHash(column="user", salt=2, max_value=1 << 20),
    },
    dense=("age",),
    sparse=(Sparse(column="hashed", rows=1000), Sparse(column="who", rows=1 << 20)),
)
LAYOUT = BatchLayout(plan=PLAN, batch_rows=ROWS, slots=2)


@pytest.fixture
def receiver() -> Iterator[XdpReceiver]:
    with XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT) as made:
        yield made


@pytest.fixture
def packets(rng: np.random.Generator) -> list[list[bytes]]:
    """Returns three batches, four packets each."""
    made = []
    for batch in range(3):
        records = encode_records(PLAN.schema, random_rows(PLAN.schema, ROWS, rng))
        found: list[bytes] = []
        for row in range(0, ROWS, 4):
            found += encode_packets(
                PLAN.schema, records[row : row + 4], session=SESSION, batch=batch, row=row, body_max_bytes=1400
            )
        made.append(found)
    return made


def with_field(packet: bytes, number: int, value: int) -> bytes:
    fields = list(HEADER.unpack_from(packet))
    fields[number] = value
    return sealed(HEADER.pack(*fields) + packet[HEADER.size :])


def test_every_datagram_is_counted_by_name(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    first, second, *_ = packets[0]
    wrong = {
        Verdict.FOREIGN: with_field(first, 0, 0x1234),
        Verdict.WRONG_VERSION: with_field(first, 1, 9),
        Verdict.WRONG_SCHEMA: with_field(first, 3, 9),
        Verdict.WRONG_SESSION: with_field(first, 4, 9),
        Verdict.TRUNCATED: first[:-1],
        Verdict.OVERSIZED: first + b"x",
        Verdict.CORRUPT: first[:-1] + bytes([first[-1] ^ 1]),
        Verdict.MALFORMED: with_field(first, 7, 3),
        Verdict.OUT_OF_SEQUENCE: second,
        Verdict.NO_CREDIT: packets[2][0],
    }
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for verdict, packet in wrong.items():
            receiver.deliver(packet)
            expected.deliver(packet)
            assert receiver.counters().datagrams[verdict] == 1, verdict.name
            assert receiver.counters() == expected.counters()
    receiver.deliver(first)
    receiver.deliver(first)
    counted = receiver.counters()
    assert counted.datagrams[Verdict.ACCEPTED] == counted.datagrams[Verdict.DUPLICATE] == 1
    assert (counted.records, receiver.rows_taken(0)) == (4, 4)


IPV4 = Ends(hardware=bytes(range(6)), source=bytes([192, 0, 2, 1]), address=bytes([192, 0, 2, 2]))
IPV6 = Ends(hardware=bytes(range(6)), address=bytes(15) + b"\x02")


@pytest.mark.parametrize("own", [IPV4, IPV6], ids=["IPv4", "IPv6"])
def test_packets_for_other_destinations_go_on(receiver: XdpReceiver, packets: list[list[bytes]], own: Ends) -> None:
    """What a promiscuous interface, a bridge or a router sees of others."""
    receiver.receive_at(own)
    first = packets[0][0]
    others = [replace(own, hardware=bytes(6)), IPV4 if own is IPV6 else IPV6]
    others += [
        replace(own, address=own.address[:n] + bytes([own.address[n] ^ 1]) + own.address[n + 1 :])
        for n in range(len(own.address))
    ]
    for other in others:
        assert receiver.program.test_run(frame(first, PORT, other)).verdict == XDP_PASS
    assert sum(receiver.counters().datagrams.values()) == 0
    assert receiver.program.test_run(frame(first, PORT, own)).verdict == XDP_DROP
    assert receiver.counters().datagrams[Verdict.ACCEPTED] == 1


def test_ipv4_packets_with_options_or_in_fragments_go_on(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    receiver.receive_at(IPV4)
    plain = bytearray(frame(packets[0][0], PORT, IPV4))
    for at, changed in ((14, 0x46), (20, 0x20), (21, 1), (23, 6)):  # options, more fragments, an offset, TCP
        other = bytearray(plain)
        other[at] = changed
        assert receiver.program.test_run(bytes(other)).verdict == XDP_PASS, at
    for size_bytes in range(14, 14 + 20 + 8):
        assert receiver.program.test_run(bytes(plain[:size_bytes])).verdict == XDP_PASS, size_bytes
    assert sum(receiver.counters().datagrams.values()) == 0


def test_ipv4_packets_make_the_reference_s_batch(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    receiver.receive_at(IPV4)
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for packet in (*packets[0], packets[0][1], packets[0][2][:-1]):
            for tags in ((), (VLAN,)):
                assert receiver.program.test_run(frame(packet, PORT, IPV4, vlan_tags=tags)).verdict == XDP_DROP
                expected.deliver(packet)
        assert_same_batch(receiver.batch(0), expected.batch(0))
        assert receiver.counters() == expected.counters()


def test_a_packet_with_any_bit_changed_changes_nothing(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    first = packets[0][0]
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for bit in range(8 * len(first)):
            broken = bytearray(first)
            broken[bit // 8] ^= 1 << bit % 8
            for target in (receiver, expected):
                target.deliver(bytes(broken))
        counted = receiver.counters()
        assert counted == expected.counters()
        # The others differ in magic, version, schema, session or size.
        assert counted.datagrams[Verdict.CORRUPT] == 8 * (len(first) - 13)
        assert (receiver.rows_taken(0), receiver.row_ahead(0)) == (0, 0)
        receiver.deliver(first)
        assert receiver.rows_taken(0) == 4


@pytest.mark.parametrize("own", [IPV4, IPV6], ids=["IPv4", "IPv6"])
def test_a_frame_with_any_bit_changed_is_no_other_rank_s(packets: list[list[bytes]], own: Ends) -> None:
    """XDP looks at no checksum of UDP or IP, so ports and addresses may be wrong. Ranks have sessions of their own."""
    first = packets[0][0]
    sessions, ports = session_numbers(2), (PORT, PORT + 1)
    own_packet, other_packet = (with_field(first, 4, session) for session in sessions)
    with (
        XdpReceiver(LAYOUT, session=sessions[0], udp_port=ports[0], sketch=None) as right,
        XdpReceiver(LAYOUT, session=sessions[1], udp_port=ports[1], sketch=None) as other,
    ):
        right.receive_at(own)
        other.receive_at(own)
        whole = frame(own_packet, ports[0], own, with_checksum=True)
        head_bytes = len(whole) - len(first)
        for bit in range(8 * len(whole)):
            broken = bytearray(whole)
            broken[bit // 8] ^= 1 << bit % 8
            other.program.test_run(bytes(broken))
            if bit >= 8 * head_bytes:
                right.program.test_run(bytes(broken))
        assert other.counters().datagrams[Verdict.WRONG_SESSION] >= 1, "one bit makes the one port the other"
        for receiver in (right, other):
            assert receiver.counters().datagrams[Verdict.ACCEPTED] == 0
            assert receiver.rows_taken(0) == receiver.row_ahead(0) == 0
        other.program.test_run(frame(other_packet, ports[1], own, with_checksum=True))
        assert other.rows_taken(0) == 4


def test_checksums_of_every_length_are_those_of_the_native_core(
    receiver: XdpReceiver, packets: list[list[bytes]]
) -> None:
    """A whole packet that has the wrong records is malformed, and would be corrupt with another checksum."""
    first = packets[0][0]
    for size_bytes in range(HEADER.size, HEADER.size + 100):
        receiver.deliver(with_field(first[:size_bytes].ljust(size_bytes, b"x"), 8, size_bytes - HEADER.size))
    assert receiver.counters().datagrams[Verdict.CORRUPT] == 0


VLAN, SERVICE_VLAN = (0x8100, 0x6005), (0x88A8, 7)


@pytest.mark.parametrize(
    "tags",
    [(), (VLAN,), (SERVICE_VLAN,), (SERVICE_VLAN, VLAN), (VLAN, VLAN)],
    ids=["none", "Q", "ad", "QinQ", "Q in Q"],
)
def test_frames_with_vlan_tags_are_taken_as_those_without(
    receiver: XdpReceiver, packets: list[list[bytes]], tags: tuple[tuple[int, int], ...]
) -> None:
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for packet in packets[0]:
            assert receiver.program.test_run(frame(packet, PORT, vlan_tags=tags)).verdict == XDP_DROP
            expected.deliver(packet)
        assert_same_batch(receiver.batch(0), expected.batch(0))
        assert receiver.counters() == expected.counters()


def test_frames_that_are_cut_inside_their_tags_or_have_three_go_to_the_host(
    receiver: XdpReceiver, packets: list[list[bytes]]
) -> None:
    before = receiver.counters()
    tagged = frame(packets[0][0], PORT, vlan_tags=(SERVICE_VLAN, VLAN))
    for size_bytes in range(14, 14 + 8 + 40 + 8):  # Ethernet, two tags, IPv6, UDP. The kernel takes no shorter frames.
        assert receiver.program.test_run(tagged[:size_bytes]).verdict == XDP_PASS, size_bytes
    assert (
        receiver.program.test_run(frame(packets[0][0], PORT, vlan_tags=(SERVICE_VLAN, VLAN, VLAN))).verdict == XDP_PASS
    )
    assert receiver.counters() == before


def test_a_gap_is_known_until_the_missing_packet_comes(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    first, second, third, fourth = packets[0]
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        # The second packet is lost, and after the second request the third.
        for packet, ahead in ((first, 0), (fourth, 12), (third, 12), (second, 0), (fourth, 12), (third, 0), (first, 0)):
            for target in (receiver, expected):
                target.deliver(packet)
                assert target.row_ahead(0) == ahead
        for target in (receiver, expected):
            assert target.row_ahead(2) == 0
            target.deliver(packets[1][3])
            target.release(1)
            assert target.row_ahead(3) == 0


def test_a_duplicate_that_comes_while_its_batch_is_released_is_no_row_of_the_next(
    receiver: XdpReceiver, packets: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for packet in packets[0]:
        receiver.deliver(packet)
    plain = BatchLayout.cursor_values

    def late(self: BatchLayout, memory: NDArray[np.uint8], slot: int) -> NDArray[np.uint64]:
        monkeypatch.undo()
        receiver.deliver(packets[0][0])
        return plain(self, memory, slot)

    monkeypatch.setattr(BatchLayout, "cursor_values", late)
    receiver.release(0)
    assert receiver.rows_taken(2) == 0
    assert receiver.counters().datagrams[Verdict.BUSY] == 1
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        expected.release(0)
        for packet in packets[2]:
            receiver.deliver(packet)
            expected.deliver(packet)
        assert_same_batch(receiver.batch(2), expected.batch(2))


def test_every_truncation_is_refused_and_leaves_no_trace(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    first = packets[0][0]
    for size in range(len(first)):
        receiver.deliver(first[:size])
        body = max(0, size - HEADER.size)
        receiver.deliver(with_field(first[:size], 8, body) if size >= HEADER.size else first[:size])
    assert receiver.counters().datagrams[Verdict.ACCEPTED] == 0
    assert receiver.rows_taken(0) == len(receiver.batch(0).labels) == 0
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for packet in packets[0]:
            receiver.deliver(packet)
            expected.deliver(packet)
        assert_same_batch(receiver.batch(0), expected.batch(0))


def test_other_packets_are_left_to_the_host(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    ours = frame(packets[0][0], PORT)
    assert receiver.program.test_run(ours).verdict == XDP_DROP
    for packet in (frame(packets[0][0], PORT + 1), bytes(14), ours[:60], b"\xff" * 100):
        assert receiver.program.test_run(packet).verdict == XDP_PASS
    assert sum(receiver.counters().datagrams.values()) == 1


def test_a_released_slot_takes_the_batch_after_the_next(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for target in (receiver, expected):
            for packet in (*packets[0], *packets[1], packets[2][0]):
                target.deliver(packet)
            target.release(0)
            for packet in (packets[0][0], *packets[2]):
                target.deliver(packet)
        assert receiver.counters() == expected.counters()
        assert receiver.counters().datagrams[Verdict.NO_CREDIT] == 1
        for batch in (1, 2):
            assert receiver.rows_taken(batch) == ROWS
            assert_same_batch(receiver.batch(batch), expected.batch(batch))


def test_a_plan_with_several_loops_over_one_list_passes_the_verifier(rng: np.random.Generator) -> None:
    """Four of them: one for each pair of ids in front."""
    schema = Schema(ids=(Ids(name="pair", length=2), Ids(name="seen", length=5, is_list=True)))
    plan = FeaturePlan(
        schema=schema,
        columns={
            "inner": Cross(left="pair", right="seen"),
            "hashed": SigridHash(column="pair", salt=1, max_value=348_137),
            "outer": Cross(left="hashed", right="inner"),
        },
        sparse=(Sparse(column="outer"),),
    )
    layout = BatchLayout(plan=plan, batch_rows=ROWS, slots=2)
    records = encode_records(schema, random_rows(schema, ROWS, rng))
    with (
        XdpReceiver(layout, session=SESSION, udp_port=PORT) as found,
        HostReceiver(layout, session=SESSION) as expected,
    ):
        for packet in encode_packets(schema, records, session=SESSION, batch=0, body_max_bytes=200):
            found.deliver(packet)
            expected.deliver(packet)
        assert_same_batch(found.batch(0), expected.batch(0))


def test_torch_sees_the_arena_itself(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    torch = pytest.importorskip("torch")
    for packet in packets[0]:
        receiver.deliver(packet)
    batch = receiver.batch(0)
    labels, dense, lengths, values = batch.tensors()
    tensors = (labels, dense, lengths, *values)
    arrays: tuple[NDArray[Any], ...] = (batch.labels, batch.dense, batch.lengths, *batch.values)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.data_ptr() == array.ctypes.data
    bags = torch.nn.functional.embedding_bag(values[0], torch.eye(1000), lengths[0].cumsum(0) - lengths[0], mode="sum")
    assert bags.sum(dim=1).tolist() == lengths[0].tolist()
    # What the kernel writes next appears in the existing tensor.
    before = labels.clone()
    receiver.release(0)
    for packet in packets[2]:
        receiver.deliver(packet)
    assert not torch.equal(before, labels)
    assert labels.tolist() == receiver.batch(2).labels.tolist()


def test_c_and_python_agree_on_the_layouts() -> None:
    """Compares clang's layouts. A global variable of each type puts the type into the object's BTF."""
    names = ("feed_slot", "feed_header", "feed_counters", "feed_settings")
    source = "".join(f"struct {name} a_{name};\n" for name in names)
    btf = Btf(Elf(compile_source("layouts", f'#include "feed_receiver.h"\n{source}')))
    assert btf.dtype("feed_slot").itemsize <= CURSORS_OFFSET
    header = btf.dtype("feed_header")
    assert header.itemsize == HEADER.size
    assert header.fields is not None
    assert [header.fields[name][1] for name in header.names or ()] == [0, 2, 3, 4, 8, 12, 16, 20, 22, 24]
    # One list in C makes these fields and the verdicts, in the same order.
    assert list(btf.dtype("feed_counters").names or ()) == list(FeedCounters().as_mapping())
    assert list(FeedCounters().as_mapping())[: len(Verdict)] == [verdict.name.lower() for verdict in Verdict]


@pytest.mark.needs("bpftool")
def test_bpftool_shows_the_counters_by_name(receiver: XdpReceiver, packets: list[list[bytes]]) -> None:
    for packet in (packets[0][0], packets[0][0], packets[0][1][:-1], packets[2][0]):
        receiver.deliver(packet)
    assert receiver.pins is not None
    assert receiver.pins.path.name == f"ingest-{SESSION:08x}"
    command = ["bpftool", "-j", "map", "dump", "pinned", str(receiver.pins.path / "counters")]
    (entry,) = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    cpus = [of_cpu["value"] for of_cpu in entry["formatted"]["values"]]
    total = {name: sum(of_cpu[name] for of_cpu in cpus) for name in cpus[0]}
    assert total == receiver.counters().as_mapping()
    assert (total["accepted"], total["duplicate"], total["truncated"], total["no_credit"]) == (1, 1, 1, 1)
    with XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT) as second:
        assert second.pins is not None
        assert second.pins.path.name == f"ingest-{SESSION:08x}-2"
    receiver.close()
    assert not receiver.pins.path.exists()


def test_without_privilege_it_says_what_is_missing_and_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> BpfObject:
        raise BpfError(errno.EPERM, "not permitted")

    monkeypatch.setattr(plan_program, "BpfObject", refuse)
    lacking = kernel_features.missing_privileges(effective=1 << 12)
    monkeypatch.setattr(plan_program, "missing_privileges", lambda: lacking)
    with pytest.raises(TargetUnavailable, match="lacks CAP_BPF, CAP_PERFMON; the target cpu needs none"):
        XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT)
