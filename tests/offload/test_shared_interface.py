# SPDX-License-Identifier: Apache-2.0
"""Ranks that share an interface: packets are sorted by port, programs are handed over, and no rank waits for ever."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sennit.ebpf.library import BpfError
from sennit.ebpf.links import attach_xdp
from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.errors import TargetUnavailable
from sennit.offload.framing import frame
from sennit.offload.ingest.shared_interface import follow, lead
from sennit.offload.ingest.target import STATISTICS, IngestTarget
from sennit.offload.interfaces import TargetError
from sennit.offload.xdp import XdpReceiver
from sennit.testbed.topology import Planes
from tests.offload.ingest_world import PLAN, SESSION, packet

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
FIRST_PORT, XDP_DROP, XDP_PASS = 4800, 1, 2
INTERFACE, DEADLINE_S = "plane0", 30.0
LAYOUT = BatchLayout(plan=PLAN, batch_rows=4, slots=2)
DATAGRAM = packet(0, 0, np.arange(4))


@pytest.fixture
def receivers() -> Iterator[list[XdpReceiver]]:
    with (
        XdpReceiver(LAYOUT, session=SESSION, udp_port=FIRST_PORT) as first,
        XdpReceiver(LAYOUT, session=SESSION, udp_port=FIRST_PORT + 2) as third,
    ):
        yield [first, third]


def test_each_gets_what_is_for_its_port_and_the_host_the_rest(receivers: list[XdpReceiver]) -> None:
    with Dispatcher(first_port=FIRST_PORT, receivers=3) as dispatcher:
        dispatcher.add(0, receivers[0].program.descriptor)
        dispatcher.add(2, receivers[1].program.descriptor)
        for port, verdict in ((-1, XDP_PASS), (0, XDP_DROP), (1, XDP_PASS), (2, XDP_DROP), (3, XDP_PASS)):
            assert dispatcher.program.test_run(frame(DATAGRAM, FIRST_PORT + port)).verdict == verdict, port
        for junk in (bytes(14), frame(DATAGRAM, FIRST_PORT)[:60], b"\xff" * 100):
            assert dispatcher.program.test_run(junk).verdict == XDP_PASS
    for receiver in receivers:
        assert receiver.counters().datagrams[Verdict.ACCEPTED] == 1
        assert receiver.rows_taken(0) == 4


@pytest.fixture(scope="module")
def planes() -> Iterator[Planes]:
    with Planes(hosts=2, planes=1, mtu=1500, per_packet=True) as made:
        yield made


def lead_within(planes: Planes, receiver: XdpReceiver, timeout_s: float) -> Dispatcher:
    return planes.within(
        0,
        lambda: lead(
            receiver.program.descriptor,
            INTERFACE,
            range(0, 3, 2),
            session=SESSION,
            first_port=FIRST_PORT,
            timeout_s=timeout_s,
        ),
    )


def follow_within(planes: Planes, descriptor: int, timeout_s: float) -> None:
    planes.within(0, lambda: follow(descriptor, INTERFACE, 2, session=SESSION, timeout_s=timeout_s))


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_who_leads_waits_for_the_others_but_not_for_ever(planes: Planes, receivers: list[XdpReceiver]) -> None:
    with pytest.raises(TargetUnavailable, match=r"local ranks \[2\] did not come to share plane0 within 0\.1 s"):
        lead_within(planes, receivers[0], 0.1)
    with pytest.raises(TargetUnavailable, match=r"no rank shares plane0 with local rank 2 within 0\.1 s"):
        follow_within(planes, receivers[1].program.descriptor, 0.1)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_visitors_that_are_not_awaited_are_left_out(planes: Planes, receivers: list[XdpReceiver]) -> None:
    """Junk, a number without a program, another rank's number; then the awaited rank."""
    led: list[Dispatcher] = []
    number = (2).to_bytes(4, "little")
    leader = threading.Thread(target=lambda: led.append(lead_within(planes, receivers[0], DEADLINE_S)), daemon=True)
    leader.start()
    for said, descriptors in (
        (b"x", []),
        (number, []),
        ((7).to_bytes(4, "little"), [receivers[1].program.descriptor]),
    ):
        with planes.within(0, visit) as visitor:
            socket.send_fds(visitor, [said], descriptors)
            assert visitor.recv(1) == b""
    follow_within(planes, receivers[1].program.descriptor, DEADLINE_S)
    leader.join(DEADLINE_S)
    with led[0] as dispatcher:
        assert dispatcher.program.test_run(frame(DATAGRAM, FIRST_PORT + 2)).verdict == XDP_DROP


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_silent_visitors_hold_nobody_up(planes: Planes, receivers: list[XdpReceiver]) -> None:
    led: list[Dispatcher] = []
    leader = threading.Thread(target=lambda: led.append(lead_within(planes, receivers[0], DEADLINE_S)), daemon=True)
    leader.start()
    with planes.within(0, visit), planes.within(0, visit):
        follow_within(planes, receivers[1].program.descriptor, DEADLINE_S)
        leader.join(DEADLINE_S)
    with led[0] as dispatcher:
        assert dispatcher.program.test_run(frame(DATAGRAM, FIRST_PORT + 2)).verdict == XDP_DROP


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_ranks_with_many_open_files_share_an_interface(planes: Planes, receivers: list[XdpReceiver]) -> None:
    """More than `select` knows, as a trainer has with tables in files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    led: list[Dispatcher] = []
    leader = threading.Thread(target=lambda: led.append(lead_within(planes, receivers[0], DEADLINE_S)), daemon=True)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        for _ in range(1_024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        leader.start()
        follow_within(planes, receivers[1].program.descriptor, DEADLINE_S)
        leader.join(DEADLINE_S)
        led[0].close()


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_time_of_programs_is_counted_where_that_is_asked_for_alone(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would count for all programs of the machine, which slows them."""

    def counted() -> bool:
        target = IngestTarget.parse(f"xdp://{INTERFACE}")
        with target.receiver(LAYOUT, 0, mates=[0], session=SESSION, timeout_s=DEADLINE_S) as receiver:
            return receiver.program_ns() is not None

    monkeypatch.delenv(STATISTICS, raising=False)
    assert not planes.within(0, counted)
    monkeypatch.setenv(STATISTICS, "1")
    assert planes.within(0, counted)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_a_program_that_the_kernel_refuses_is_an_error_and_not_a_rank_that_did_not_come(
    planes: Planes, receivers: list[XdpReceiver]
) -> None:
    leader, raised = leading_in_vain(planes, receivers[0])
    with open(os.devnull) as other, pytest.raises(TargetUnavailable) as heard:
        follow_within(planes, other.fileno(), DEADLINE_S)
    leader.join(DEADLINE_S)
    assert "map receivers" in str(raised[0])
    # And the rank whose program it is hears it, too.
    assert str(heard.value) == f"xdp: the rank that leads {INTERFACE} failed: {raised[0]}"


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_ranks_that_come_later_hear_why_there_is_nothing_to_share(planes: Planes, receivers: list[XdpReceiver]) -> None:
    with planes.within(0, lambda: attach_xdp(receivers[1].program, socket.if_nametoindex(INTERFACE))):
        leader, raised = leading_in_vain(planes, receivers[0])
        with pytest.raises(TargetUnavailable, match=f"the rank that leads {INTERFACE} failed: .*takes one: end the"):
            follow_within(planes, receivers[1].program.descriptor, DEADLINE_S)
        leader.join(DEADLINE_S)
    assert isinstance(raised[0], BpfError)


def leading_in_vain(planes: Planes, receiver: XdpReceiver) -> tuple[threading.Thread, list[BaseException]]:
    """Leads in a thread, and keeps the error that this ends with."""
    raised: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(BpfError) as refused:
            lead_within(planes, receiver, DEADLINE_S)
        raised.append(refused.value)

    leader = threading.Thread(target=attempt, daemon=True)
    leader.start()
    return leader, raised


def visit() -> socket.socket:
    """Connects to the leading rank as soon as it listens."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        visitor.settimeout(DEADLINE_S)
        try:
            visitor.connect(f"\0sennit-ingest-{SESSION:08x}-{INTERFACE}")
        except ConnectionRefusedError:
            visitor.close()
            assert time.monotonic() < deadline_s, "nobody leads"
            time.sleep(0)
            continue
        return visitor


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_an_interface_with_somebody_elses_program_is_refused_before_the_run(
    planes: Planes, receivers: list[XdpReceiver]
) -> None:
    target = IngestTarget.parse(f"xdp://{INTERFACE}")

    def attempt() -> str:
        index = socket.if_nametoindex(INTERFACE)
        with attach_xdp(receivers[0].program, index), pytest.raises(TargetError) as refused:
            target.check(local_ranks=1)
        target.check(local_ranks=1)
        return str(refused.value)

    said = planes.within(0, attempt)
    assert f"{INTERFACE} has the XDP program 'feed' (id " in said
    assert "or run `bpftool link detach id " in said
    assert said.endswith("; cpu:// needs no interface to itself")
    assert "\n" not in said
