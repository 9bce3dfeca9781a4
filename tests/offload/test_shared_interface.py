# SPDX-License-Identifier: Apache-2.0
"""Ranks that share an interface: packets are sorted by port, programs are handed over, and no rank waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sennit.ebpf.library import BpfError
from sennit.ebpf.links import attach_xdp
from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.errors import TargetUnavailable
from sennit.offload.framing import frame
from sennit.offload.ingest.shared_interface import Reception, follow, lead
from sennit.offload.ingest.target import STATISTICS, IngestTarget
from sennit.offload.interfaces import TargetError
from sennit.offload.xdp import XdpReceiver
from sennit.testbed.topology import Planes
from tests.offload.ingest_world import PLAN, SESSION, packet

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
FIRST_PORT, XDP_DROP, XDP_PASS = 4800, 1, 2
INTERFACE, DEADLINE_S = "plane0", 30.0
NOBODY = 65_534
# asm/unistd.h
SETRESUID = {"x86_64": 117, "aarch64": 147}
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


@pytest.fixture
def reception(planes: Planes) -> Iterator[Reception]:
    with planes.within(0, Reception) as made:
        yield made


def lead_within(planes: Planes, reception: Reception, receiver: XdpReceiver, timeout_s: float) -> Dispatcher:
    return planes.within(
        0,
        lambda: lead(
            reception,
            receiver.program.descriptor,
            INTERFACE,
            range(0, 3, 2),
            first_port=FIRST_PORT,
            timeout_s=timeout_s,
        ),
    )


@contextlib.contextmanager
def leading(planes: Planes, reception: Reception, receiver: XdpReceiver) -> Iterator[None]:
    """Leads in a thread meanwhile. At the end the dispatcher hands the other rank its packets."""
    led: list[Dispatcher] = []
    leader = threading.Thread(
        target=lambda: led.append(lead_within(planes, reception, receiver, DEADLINE_S)), daemon=True
    )
    leader.start()
    yield
    leader.join(DEADLINE_S)
    with led[0] as dispatcher:
        assert dispatcher.program.test_run(frame(DATAGRAM, FIRST_PORT + 2)).verdict == XDP_DROP


def follow_within(planes: Planes, name: str, descriptor: int, timeout_s: float) -> None:
    planes.within(0, lambda: follow(name, descriptor, INTERFACE, 2, timeout_s=timeout_s))


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_who_leads_waits_for_the_others_but_not_for_ever(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    with pytest.raises(TargetUnavailable, match=r"local ranks \[2\] did not come to share plane0 within 0\.1 s"):
        lead_within(planes, reception, receivers[0], 0.1)
    with pytest.raises(TargetUnavailable, match=r"no rank shares plane0 with local rank 2 within 0\.1 s"):
        follow_within(planes, reception.name, receivers[1].program.descriptor, 0.1)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_who_follows_hears_at_once_that_the_leader_has_ended(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    """Before it comes, and while it waits."""
    raised: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(TargetUnavailable) as refused:
            follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)
        raised.append(refused.value)

    waiting = threading.Thread(target=attempt, daemon=True)
    waiting.start()
    came = reception.next(time.monotonic() + DEADLINE_S)
    assert came is not None
    with came:
        reception.close()
    waiting.join(DEADLINE_S)
    attempt()
    expected = f"xdp: the rank that leads {INTERFACE} failed: it ended before it took the program"
    assert list(map(str, raised)) == [expected, expected]


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_a_process_of_another_user_is_no_leader_and_gets_no_program(
    planes: Planes, receivers: list[XdpReceiver]
) -> None:
    """It has the name that a leader had which has ended, and listens."""
    with planes.within(0, lambda: as_nobody(lambda: occupy("ended"))) as stranger:
        with pytest.raises(TargetUnavailable) as refused:
            follow_within(planes, "ended", receivers[1].program.descriptor, DEADLINE_S)
        with stranger.accept()[0] as visitor:
            assert socket.recv_fds(visitor, 4, 4)[:2] == (b"", []), "it got a program, which it could attach"
    assert str(refused.value) == (
        f"xdp: at {INTERFACE}, process {os.getpid()} of user {NOBODY} has the socket of the rank that leads; "
        f"allowed: user {os.geteuid()}, for all ranks of a machine"
    )


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_another_user_holds_nobody_up(planes: Planes, receivers: list[XdpReceiver]) -> None:
    """Whoever says hello to a rank knows its session, and the interface is no secret. Names of sockets are none."""
    with (
        planes.within(0, lambda: as_nobody(lambda: occupy(f"sennit-ingest-{SESSION:08x}-{INTERFACE}"))),
        planes.within(0, Reception) as reception,
        planes.within(0, lambda: as_nobody(lambda: visit(reception.name))),
        leading(planes, reception, receivers[0]),
    ):
        follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_visitors_that_are_not_awaited_are_left_out(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    """Junk, a number without a program, another rank's number; then the awaited rank."""
    number = (2).to_bytes(4, "little")
    with leading(planes, reception, receivers[0]):
        for said, descriptors in (
            (b"x", []),
            (number, []),
            ((7).to_bytes(4, "little"), [receivers[1].program.descriptor]),
        ):
            with planes.within(0, lambda: visit(reception.name)) as visitor:
                socket.send_fds(visitor, [said], descriptors)
                assert visitor.recv(1) == b""
        follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_silent_visitors_hold_nobody_up(planes: Planes, reception: Reception, receivers: list[XdpReceiver]) -> None:
    with (
        planes.within(0, lambda: visit(reception.name)),
        planes.within(0, lambda: visit(reception.name)),
        leading(planes, reception, receivers[0]),
    ):
        follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_ranks_with_many_open_files_share_an_interface(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    """More than `select` knows, as a trainer has with tables in files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        for _ in range(1_024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with leading(planes, reception, receivers[0]):
            follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_time_of_programs_is_counted_where_that_is_asked_for_alone(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would count for all programs of the machine, which slows them."""

    def counted() -> bool:
        target = IngestTarget.parse(f"xdp://{INTERFACE}")
        with target.receiver(
            LAYOUT, 0, address=target.address(0), mates={0: ""}, reception=None, session=SESSION, timeout_s=DEADLINE_S
        ) as receiver:
            return receiver.program_ns() is not None

    monkeypatch.delenv(STATISTICS, raising=False)
    assert not planes.within(0, counted)
    monkeypatch.setenv(STATISTICS, "1")
    assert planes.within(0, counted)


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_a_program_that_the_kernel_refuses_is_an_error_and_not_a_rank_that_did_not_come(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    leader, raised = leading_in_vain(planes, reception, receivers[0])
    with open(os.devnull) as other, pytest.raises(TargetUnavailable) as heard:
        follow_within(planes, reception.name, other.fileno(), DEADLINE_S)
    leader.join(DEADLINE_S)
    assert "map receivers" in str(raised[0])
    # And the rank whose program it is hears it, too.
    assert str(heard.value) == f"xdp: the rank that leads {INTERFACE} failed: {raised[0]}"


@pytest.mark.needs("native-xdp", "tc-bpf")
def test_ranks_that_come_later_hear_why_there_is_nothing_to_share(
    planes: Planes, reception: Reception, receivers: list[XdpReceiver]
) -> None:
    with planes.within(0, lambda: attach_xdp(receivers[1].program, socket.if_nametoindex(INTERFACE))):
        leader, raised = leading_in_vain(planes, reception, receivers[0])
        with pytest.raises(TargetUnavailable, match=f"the rank that leads {INTERFACE} failed: .*takes one: end the"):
            follow_within(planes, reception.name, receivers[1].program.descriptor, DEADLINE_S)
        leader.join(DEADLINE_S)
    assert isinstance(raised[0], BpfError)


def leading_in_vain(
    planes: Planes, reception: Reception, receiver: XdpReceiver
) -> tuple[threading.Thread, list[BaseException]]:
    """Leads in a thread, and keeps the error that this ends with."""
    raised: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(BpfError) as refused:
            lead_within(planes, reception, receiver, DEADLINE_S)
        raised.append(refused.value)

    leader = threading.Thread(target=attempt, daemon=True)
    leader.start()
    return leader, raised


def occupy(name: str) -> socket.socket:
    """Listens under an abstract name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(DEADLINE_S)
    listener.bind(f"\0{name}")
    listener.listen()
    return listener


def as_nobody(make: Callable[[], socket.socket]) -> socket.socket:
    """Calls it as another effective user, in this thread alone: the C library's call would change all threads."""
    change = ctypes.CDLL(None, use_errno=True).syscall
    change.argtypes = [ctypes.c_long, *[ctypes.c_int] * 3]
    assert change(SETRESUID[platform.machine()], -1, NOBODY, -1) == 0
    try:
        return make()
    finally:
        assert change(SETRESUID[platform.machine()], -1, 0, -1) == 0


def visit(name: str) -> socket.socket:
    """Connects to the leading rank, and says nothing."""
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visitor.settimeout(DEADLINE_S)
    visitor.connect(f"\0{name}")
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
