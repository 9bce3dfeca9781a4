# SPDX-License-Identifier: Apache-2.0
"""A plan's program at a link: packets of one piece and of several, and what it leaves to the host as a router."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sennit.ebpf.library import BpfError
from sennit.ebpf.links import XdpMode, attach_xdp
from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.framing import frame
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.ingest.facts import Facts, TableFacts
from sennit.offload.ingest.feeder import Feeder
from sennit.offload.ingest.protocol import VERSION, Terms
from sennit.offload.ingest.session import Session
from sennit.offload.ingest.target import HEADERS_BYTES, IngestTarget
from sennit.offload.interfaces import TargetError, interface_address, own_ends
from sennit.offload.operators import SigridHash
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.records import HEADER, encode_packets, encode_records, sealed
from sennit.offload.schema import Dense, Ids, Schema
from sennit.offload.xdp import XdpReceiver
from sennit.testbed.topology import Planes, cable
from tests.offload import ingest_world
from tests.offload.agreement import assert_same_batch
from tests.offload.strategies import random_rows
from tests.offload.whole_store import WholeStore

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
# The session is not that of the tests that may run at the same time: a session names the folder of pinned maps.
SESSION, PORT, ROWS = 80, 4800, 96
JUMBO, ETHERNET = 9000, 1500
XDP_DROP = 1
DEADLINE_S = 20.0
BRIDGE = "br0"
# On the link of the cable, and below the address of its far end.
EARLIER_ADDRESS = "fd5e:4e17:0:1::2"
# Lists of 0 to 100 ids: a jumbo frame has about twenty records.
PLAN = FeaturePlan(
    schema=Schema(dense=(Dense(name="age"),), ids=(Ids(name="user"), Ids(name="seen", length=100, is_list=True))),
    columns={"who": SigridHash(column="user", salt=2, max_value=1 << 20)},
    dense=("age",),
    sparse=(Sparse(column="who", rows=1 << 20), Sparse(column="seen")),
)
LAYOUT = BatchLayout(plan=PLAN, batch_rows=ROWS, slots=2)


@pytest.fixture
def receiver() -> Iterator[XdpReceiver]:
    """One that takes packets in several pieces."""
    with XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT, fragments=True) as made:
        yield made


def packets_of(batch: int, mtu: int, rng: np.random.Generator) -> list[bytes]:
    records = encode_records(PLAN.schema, random_rows(PLAN.schema, ROWS, rng))
    body_max_bytes = mtu - HEADERS_BYTES - HEADER.size
    return encode_packets(PLAN.schema, records, session=SESSION, batch=batch, body_max_bytes=body_max_bytes)


@pytest.mark.needs("native-xdp", "tc-bpf")
@pytest.mark.parametrize("mtu", [ETHERNET, JUMBO])
def test_records_arrive_over_a_link(mtu: int, rng: np.random.Generator) -> None:
    with (
        Planes(hosts=2, planes=1, mtu=mtu, per_packet=True) as planes,
        XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT, fragments=mtu == JUMBO) as made,
        HostReceiver(LAYOUT, session=SESSION) as expected,
    ):
        interface, address = planes.interfaces(1)[0], planes.addresses(1)[0]
        made.receive_at(planes.within(1, own_ends, interface))
        link = planes.within(1, lambda: attach_xdp(made.program, socket.if_nametoindex(interface), XdpMode.NATIVE))
        sender = planes.within(0, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        batches = [packets_of(batch, mtu, rng) for batch in range(3)]
        assert max(map(len, batches[0])) > mtu - HEADERS_BYTES - 500
        with link, sender:
            for packet in (*batches[0], batches[2][0], *batches[1], batches[0][1]):
                sender.sendto(packet, (address, PORT))
                expected.deliver(packet)
            deadline_s = time.monotonic() + DEADLINE_S
            while made.counters() != expected.counters() and time.monotonic() < deadline_s:
                time.sleep(0)
        assert made.counters() == expected.counters()
        for batch in (0, 1):
            assert_same_batch(made.batch(batch), expected.batch(batch))


def test_packets_in_several_pieces_are_taken_and_refused_as_the_reference_does(
    receiver: XdpReceiver, rng: np.random.Generator
) -> None:
    """Cut and lengthened at many places, with wrong counts of records and bytes, and with bits that changed."""
    first, second, *rest = packets_of(0, JUMBO, rng)
    sent = [first[:size] for size in (*range(0, 64), *range(64, len(first), 97), len(first) - 1)]
    sent += [first + b"x", first + bytes(4000), second]
    for at in range(0, len(first), 53):
        broken = bytearray(first)
        broken[at] ^= 1 << at % 8
        sent.append(bytes(broken))
    fields = HEADER.unpack_from(first)
    for records in range(ROWS):  # whole packets, of another number of records: most of them end inside one
        sent.append(sealed(HEADER.pack(*fields[:7], records, *fields[8:]) + first[HEADER.size :]))
    sent.remove(first)  # the right number is among them
    for size in range(HEADER.size, len(first), 411):  # a record reaches behind the end, into what others left there
        body = HEADER.pack(*fields[:8], size - HEADER.size, fields[9])
        sent.append(sealed(body + first[HEADER.size : size]))
    sent += [first, first, second, *rest, bytes(60)]
    with HostReceiver(LAYOUT, session=SESSION) as expected:
        for packet in sent:
            receiver.deliver(packet)
            expected.deliver(packet)
            assert receiver.counters() == expected.counters()
        assert expected.counters().datagrams[Verdict.MALFORMED] > ROWS
        assert receiver.rows_taken(0) == ROWS
        assert_same_batch(receiver.batch(0), expected.batch(0))


@pytest.fixture(scope="module")
def jumbo() -> Iterator[Planes]:
    with Planes(hosts=2, planes=1, mtu=JUMBO) as planes:
        yield planes


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_ranks_share_an_interface_of_jumbo_frames(
    receiver: XdpReceiver, jumbo: Planes, rng: np.random.Generator
) -> None:
    (packet, *_) = packets_of(0, JUMBO, rng)
    with Dispatcher(first_port=PORT, receivers=1, fragments=True) as dispatcher:
        dispatcher.add(0, receiver.program.descriptor)
        jumbo.within(1, dispatcher.attach, jumbo.interfaces(1)[0])
        assert dispatcher.program.test_run(frame(packet, PORT)).verdict == XDP_DROP
        assert receiver.counters().datagrams[Verdict.ACCEPTED] == 1
    with Dispatcher(first_port=PORT, receivers=1) as dispatcher, pytest.raises(BpfError) as refused:
        dispatcher.add(0, receiver.program.descriptor)
    assert refused.value.errno == errno.EINVAL


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_a_run_at_an_interface_of_jumbo_frames_takes_them(jumbo: Planes) -> None:
    """And a program for whole packets is refused there by name."""
    target = IngestTarget.parse(f"xdp://{jumbo.interfaces(1)[0]}:{PORT}")

    def attempt() -> None:
        assert target.packet_bytes(0) == JUMBO - HEADERS_BYTES
        target.receiver(
            LAYOUT, 0, address=target.address(0), mates={0: ""}, reception=None, session=SESSION, timeout_s=DEADLINE_S
        ).close()
        with (
            XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT) as whole,
            pytest.raises(BpfError, match=r"the MTU of plane0 is 9000, which may be more than its driver"),
        ):
            whole.attach(jumbo.interfaces(1)[0])

    jumbo.within(1, attempt)


@pytest.mark.needs("native-xdp", "tc-bpf", "ip")
@pytest.mark.parametrize("version", [6, 4])
def test_a_router_s_program_leaves_forwarded_datagrams_to_the_host(version: int, rng: np.random.Generator) -> None:
    """Host 1 routes what host 0 sends to an address behind host 2, at the very port that its receiver has."""
    family, far, prefix = (
        (socket.AF_INET6, "fd5e:ffff::1", 128) if version == 6 else (socket.AF_INET, "198.51.100.1", 32)
    )
    with (
        Planes(hosts=3, planes=1, mtu=ETHERNET) as planes,
        XdpReceiver(LAYOUT, session=SESSION, udp_port=PORT) as receiver,
    ):
        (plane,) = planes.interfaces(0)
        near = [(planes.addresses if version == 6 else planes.ipv4_addresses)(host)[0] for host in range(3)]

        def ip(host: int, *words: str) -> None:
            command = ["ip", f"-{version}", *words]
            planes.within(host, lambda: subprocess.run(command, check=True, timeout=DEADLINE_S))

        ip(2, "address", "add", f"{far}/{prefix}", "dev", "lo")
        ip(0, "route", "add", far, "via", near[1], "dev", plane)
        ip(1, "route", "add", far, "via", near[2], "dev", plane)
        switch = Path(f"/proc/sys/net/ipv{version}") / ("conf/all/forwarding" if version == 6 else "ip_forward")
        planes.within(1, switch.write_text, "1")
        (packet, *_) = packets_of(0, ETHERNET, rng)
        planes.within(1, receiver.attach, plane)
        if version == 4:  # `attach` takes the address of IPv6 where there is one
            ends = planes.within(1, own_ends, plane)
            packed = socket.inet_pton(family, near[1])
            receiver.receive_at(type(ends)(hardware=ends.hardware, source=packed, address=packed))
        with (
            planes.within(2, lambda: socket.socket(family, socket.SOCK_DGRAM)) as behind,
            planes.within(0, lambda: socket.socket(family, socket.SOCK_DGRAM)) as sender,
        ):
            behind.settimeout(DEADLINE_S)
            behind.bind((far, PORT))
            # The router's own comes first, so that it has been seen when the other one is through.
            sender.sendto(packet, (near[1], PORT))
            sender.sendto(packet, (far, PORT))
            assert behind.recv(JUMBO) == packet
        counted = receiver.counters()
        assert counted.datagrams[Verdict.ACCEPTED] == sum(counted.datagrams.values()) == 1


@pytest.mark.needs("tc-bpf", "ip", "bridge")
@pytest.mark.parametrize("mtu", [ETHERNET, JUMBO])
def test_rows_come_over_a_bridge(mtu: int) -> None:
    """As of a feeder in a container. The program sees messages of several packets there before they are segmented."""
    sizes = [4_000, 4_000, 3_500]
    rows = Columns(
        labels=np.zeros(sum(sizes), np.float32),
        dense=np.zeros((sum(sizes), 0), np.float32),
        ids=(IdColumn(values=np.arange(sum(sizes))),),
    )
    layout = BatchLayout(plan=ingest_world.PLAN, batch_rows=max(sizes), slots=2)
    target = IngestTarget.parse(f"xdp://{BRIDGE}:{PORT}")
    facts = Facts(
        name="numbers", fingerprint="1", sample_count=sum(sizes), numbering={}, dense_names=(), plan=ingest_world.PLAN,
        tables=(TableFacts(name="sample", rows=1 << 32, mean_length=1.0),),
    )  # fmt: skip
    part = lambda terms, batch: np.array(ingest_world.expected(sizes, batch), np.int64)  # noqa: E731
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(cable.Cable(mtu_bytes=mtu))
        link.within(cable.FAR, bridge)
        listener = stack.enter_context(link.within(cable.FAR, target.listen, 0))
        terms = Terms(
            version=VERSION, session=SESSION, rank=0, world_size=1, endpoints=[[cable.FAR_ADDRESS, PORT]], order={},
            packet_bytes=link.within(cable.FAR, target.packet_bytes, 0), window_packets=48,
        )  # fmt: skip
        session = stack.enter_context(Session(listener, terms, timeout_s=DEADLINE_S))
        store = stack.enter_context(contextlib.closing(RecordStore.encode(ingest_world.SCHEMA, rows)))
        supply = stack.enter_context(contextlib.closing(WholeStore(store, part)))
        feeder = stack.enter_context(Feeder("near", facts.as_json(), supply, timeout_s=DEADLINE_S))
        feeding = threading.Thread(
            target=lambda: link.within(cable.NEAR, feeder.run, [(cable.FAR_ADDRESS, PORT)]), daemon=True
        )
        feeding.start()
        assert session.wait_for_facts() is not None
        receiver = link.within(
            cable.FAR,
            lambda: target.receiver(
                layout,
                0,
                address=cable.FAR_ADDRESS,
                mates={0: ""},
                reception=None,
                session=SESSION,
                timeout_s=DEADLINE_S,
            ),
        )
        session.start(receiver, sizes.__getitem__, first_batch=0, batch_count=len(sizes), slots=2)
        for batch in range(len(sizes)):
            assert session.take(batch).values[0].tolist() == ingest_world.expected(sizes, batch)
            session.release(batch)
        counted = session.counters()
        session.close()
        feeding.join(DEADLINE_S)
    assert counted["oversized"] > 0, "this kernel segments messages before a bridge"


def bridge() -> None:
    """Moves the far end's address to a bridge with that end."""
    for command in (
        f"link add {BRIDGE} type bridge",
        f"addr flush dev {cable.FAR}",
        f"link set {cable.FAR} master {BRIDGE}",
        f"addr add {cable.FAR_ADDRESS}/64 dev {BRIDGE} nodad",
        f"link set {BRIDGE} up",
    ):
        ip(command)
    cable.await_links()


@pytest.mark.needs("native-xdp", "ip")
def test_the_program_takes_what_is_sent_to_the_address_that_feeders_are_told(rng: np.random.Generator) -> None:
    """Also after the interface has got others, as by privacy extensions while an elastic run goes on."""
    target = IngestTarget.parse(f"xdp://{cable.FAR}:{PORT}")
    packets = packets_of(0, ETHERNET, rng)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(cable.Cable(mtu_bytes=ETHERNET))
        told = stack.enter_context(link.within(cable.FAR, target.listen, 0)).getsockname()[0]
        assert told == cable.FAR_ADDRESS
        link.within(cable.FAR, ip, f"addr add {EARLIER_ADDRESS}/64 dev {cable.FAR} nodad preferred_lft 0 valid_lft 60")
        assert link.within(cable.FAR, interface_address, cable.FAR) == told, "the other one is deprecated"
        link.within(cable.FAR, ip, f"addr change {EARLIER_ADDRESS}/64 dev {cable.FAR} nodad preferred_lft forever")
        assert link.within(cable.FAR, interface_address, cable.FAR) == EARLIER_ADDRESS
        receiver = stack.enter_context(
            link.within(
                cable.FAR,
                lambda: target.receiver(
                    LAYOUT, 0, address=told, mates={0: ""}, reception=None, session=SESSION, timeout_s=DEADLINE_S
                ),
            )
        )
        sender = stack.enter_context(link.within(cable.NEAR, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)))
        for packet in packets:
            sender.sendto(packet, (told, PORT))
        deadline_s = time.monotonic() + DEADLINE_S
        while receiver.rows_taken(0) < ROWS and time.monotonic() < deadline_s:
            time.sleep(0)
        assert receiver.rows_taken(0) == ROWS


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, timeout=DEADLINE_S)


@pytest.mark.needs("native-xdp", "ip")
def test_an_interface_without_frames_of_ethernet_is_refused_before_the_run() -> None:
    """A tunnel: programs would read the header of IP as that of Ethernet, and take nothing."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun: a kernel with CONFIG_TUN")
    target = IngestTarget.parse("xdp://tunnel0")
    with cable.Cable(mtu_bytes=ETHERNET) as link:
        for command in ("tuntap add mode tun tunnel0", "addr add 198.51.100.1/24 dev tunnel0", "link set tunnel0 up"):
            link.within(cable.FAR, ip, command)
        with pytest.raises(TargetError) as refused:
            link.within(cable.FAR, target.check, 1)
        assert str(refused.value).startswith(
            "--ingest xdp://tunnel0:4800: interface 'tunnel0' has no frames of Ethernet but packets of kind 65534 (`ip"
        )
        assert str(refused.value).endswith("; cpu:// takes any")
        link.within(cable.FAR, IngestTarget.parse(f"xdp://{cable.FAR}").check, 1)
