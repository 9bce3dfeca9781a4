# SPDX-License-Identifier: Apache-2.0
"""Planes: connections between hosts, switching, rate limits, delays, captures, and clean-up."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from pyroute2 import IPRoute

from sennit.testbed.topology import Direction, Impairment, Planes, QueueCounters, namespace
from sennit.testbed.topology.relay_table import RelayCounters
from sennit.transport.meeting import rails
from tests.extent import briefly
from tests.testbed.datagrams import open_socket, send_datagrams

pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf", "nsenter")]

DEADLINE_S = 60.0


def names(pid: int) -> set[str]:
    """Returns the namespaces that this process made, because other processes may make some at the same time."""
    return {path.name for path in namespace.FOLDER.glob(f"sennit-{pid}-*")}


def test_every_host_reaches_every_other_on_every_plane_and_only_it() -> None:
    with Planes(hosts=4, planes=2, mtu=1_500) as planes:
        for source, target in itertools.permutations(range(4), 2):
            for plane in range(2):
                before = {(h, p): planes.counters(h, p).packets for h in range(4) for p in range(2)}
                account = send_datagrams(planes, 10, source=source, target=target, plane=plane)
                assert account.order == list(range(10))
                after = {(h, p): planes.counters(h, p).packets for h in range(4) for p in range(2)}
                assert {port for port in after if after[port] != before[port]} == {(source, plane)}


def test_a_host_sees_its_own_interfaces_only(planes: Planes) -> None:
    assert planes.interfaces(1) == ["plane0", "plane1"]
    assert planes.environment(1)["SENNIT_INTERFACES"] == "plane0,plane1"
    program = "import socket; print(*(name for _, name in socket.if_nameindex()))"
    child = planes.popen(1, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=DEADLINE_S)
    assert {"lo", "plane0", "plane1"} <= set(out.split())
    assert not {name for name in out.split() if name.startswith(("p0h", "p1h", "eth", "delay"))}


def test_a_rank_finds_every_plane_as_a_rail(planes: Planes) -> None:
    for host in range(2):
        found = planes.within(host, rails.read_interfaces, Path("/proc/thread-self/net"))
        by_name = {interface.name: interface for interface in found}
        for plane, name in enumerate(planes.interfaces(host)):
            assert by_name[name].ipv6 == (planes.addresses(host)[plane],)
            assert by_name[name].ipv4 == (planes.ipv4_addresses(host)[plane],)


def has_carrier(planes: Planes, host: int, plane: int) -> bool:
    def ask() -> bool:
        with IPRoute() as route:
            link = route.get_links(*route.link_lookup(ifname=f"plane{plane}"))[0]
            return bool(link.get_attr("IFLA_CARRIER"))

    return planes.within(host, ask)


def wait_for_carrier(planes: Planes, wanted: bool) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while any(has_carrier(planes, host, 1) is not wanted for host in range(2)):
        assert time.monotonic() < deadline_s
        os.sched_yield()


def test_a_black_hole_swallows_one_plane_and_tells_nobody(planes: Planes) -> None:
    planes.switch(1, up=False)
    account = send_datagrams(planes, 100, plane=1)
    assert (account.order, account.switch.blackholed) == ([], 100)
    assert has_carrier(planes, 0, 1)
    assert send_datagrams(planes, 100, plane=0).missing == set()
    planes.switch(1, up=True)
    assert send_datagrams(planes, 100, plane=1).order == list(range(100))


def test_a_link_that_is_down_loses_its_carrier_and_keeps_its_addresses(planes: Planes) -> None:
    planes.switch(1, up=False, how="link")
    wait_for_carrier(planes, False)
    account = send_datagrams(planes, 100, plane=1, arrivals=0)
    assert (account.order, account.switch.packets) == ([], 0)
    assert send_datagrams(planes, 100, plane=0).missing == set()
    planes.switch(1, up=True, how="link")
    wait_for_carrier(planes, True)
    assert send_datagrams(planes, 100, plane=1).order == list(range(100))
    with pytest.raises(ValueError, match="allowed: blackhole, link"):
        planes.switch(1, up=True, how="pull")  # type: ignore[arg-type]


def check_all_are_counted(queue: QueueCounters, datagrams: int) -> None:
    """Datagrams of 1,062 bytes with headers. A few packets of the kernel's own may be among them, as for neighbours."""
    counted = queue.packets + queue.dropped + queue.backlog_bytes // 1_062
    assert 0 <= counted - datagrams <= 5


def test_a_slow_receiver_port_drops_what_its_queue_does_not_hold(planes: Planes) -> None:
    queue_bytes, count = 50_000, 1_000
    planes.limit_rate(8_000_000, hosts=[1], planes=[0], queue_bytes=queue_bytes, direction=Direction.RECEIVE)
    try:
        # All at once: the sender is not told, and does not wait for the queue to drain.
        account = send_datagrams(planes, count, plane=0, arrivals=queue_bytes // 1_062)
        queue = planes.queue_counters(1, 0, Direction.RECEIVE)
        assert account.switch.packets == count
        assert queue.dropped > 0
        check_all_are_counted(queue, count)
        assert send_datagrams(planes, count, plane=1).missing == set()
    finally:
        planes.limit_rate(None, direction=Direction.RECEIVE)
    assert send_datagrams(planes, count, plane=0).missing == set()
    with pytest.raises(ValueError, match="host 1 has no rate limit on plane 0 for what it receives"):
        planes.queue_counters(1, 0, Direction.RECEIVE)


def test_what_waits_in_the_network_is_not_in_the_senders_buffer(planes: Planes) -> None:
    """As on a wire. Otherwise a queue that the sender cannot know of would slow it down."""
    count = 200
    planes.limit_rate(8_000_000, hosts=[1], planes=[0], queue_bytes=1 << 20, direction=Direction.RECEIVE)
    try:
        with (
            planes.within(0, open_socket, planes.addresses(0)[0]) as sender,
            planes.within(1, open_socket, planes.addresses(1)[0]) as receiver,
        ):
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
            sender.setblocking(False)
            for _ in range(count):
                sender.sendto(bytes(1_000), receiver.getsockname())
            assert planes.queue_counters(1, 0, Direction.RECEIVE).dropped == 0
    finally:
        planes.limit_rate(None, direction=Direction.RECEIVE)


def test_a_slow_sender_queues_at_home(planes: Planes) -> None:
    count = 1_000
    planes.limit_rate(8_000_000, hosts=[0], queue_bytes=50_000)
    try:
        account = send_datagrams(planes, count, plane=0, arrivals=50_000 // 1_062)
        queue = planes.queue_counters(0, 0)
        assert queue.dropped > 0
        check_all_are_counted(queue, count)
        # The switch has seen only packets that left the host.
        assert account.switch.packets < count
        # The other direction is not limited.
        assert send_datagrams(planes, count, source=1, target=0, plane=0).missing == set()
    finally:
        planes.limit_rate(None)


def test_a_higher_rate_lets_more_pass(planes: Planes) -> None:
    dropped = [0]
    for bits_per_s in (1_000_000, 10_000_000_000):
        planes.limit_rate(bits_per_s, hosts=[1], planes=[0], queue_bytes=1 << 20, direction=Direction.RECEIVE)
        send_datagrams(planes, 3_000, plane=0, arrivals=10)
        dropped.append(planes.queue_counters(1, 0, Direction.RECEIVE).dropped)
    planes.limit_rate(None, direction=Direction.RECEIVE)
    assert dropped[1] - dropped[0] > dropped[2] - dropped[1]


def settled_delays(planes: Planes) -> RelayCounters:
    """The counters once nothing waits: packets that have arrived may not be counted as sent yet."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := planes.delay_counters()).waiting:
        assert time.monotonic() < deadline_s, found
    return found


@pytest.mark.parametrize("per_packet", [True, False])
def test_delayed_packets_all_come_in_order_and_none_early(per_packet: bool) -> None:
    delay_us, count, segments = 20_000, 200, 10
    with Planes(hosts=2, planes=2, per_packet=per_packet) as planes:
        planes.delay(delay_us, hosts=[0], planes=[1])
        account = send_datagrams(planes, count, plane=1, segments=segments)
        assert account.order == list(range(count))
        assert account.damaged == []
        relay = settled_delays(planes)
        # Super-packets stay whole.
        assert relay.received == relay.sent == (count if per_packet else count // segments)
        assert (relay.lost, relay.overrun) == (0, 0)

        with (
            planes.within(0, open_socket, planes.addresses(0)[1]) as sender,
            planes.within(1, open_socket, planes.addresses(1)[1]) as receiver,
        ):
            receiver.settimeout(DEADLINE_S)
            sent_s = time.monotonic()
            sender.sendto(b"late", receiver.getsockname())
            assert receiver.recv(100) == b"late"
            assert time.monotonic() - sent_s >= delay_us / 1e6

        # No other host uses the relay, and this host does not either after it is switched off.
        assert send_datagrams(planes, 10, source=1, target=0, plane=1).missing == set()
        planes.delay(0)
        assert send_datagrams(planes, 10, plane=1).missing == set()
        assert planes.delay_counters().received == relay.received + 1


def test_delays_of_hosts_differ_and_change_under_traffic(planes: Planes) -> None:
    """A packet with a short delay overtakes those with a long one, whoever sent them."""
    with (
        planes.within(0, open_socket, planes.addresses(0)[0]) as slow,
        planes.within(1, open_socket, planes.addresses(1)[0]) as other,
    ):
        slow.settimeout(DEADLINE_S)
        other.settimeout(DEADLINE_S)
        try:
            planes.delay(1_000_000, hosts=[0])  # long beside what follows
            planes.delay(1_000, hosts=[1])
            began_s = time.monotonic()
            slow.sendto(b"first", other.getsockname())
            other.sendto(b"back", slow.getsockname())
            assert slow.recv(100) == b"back"
            planes.delay(1_000, hosts=[0])
            for number in range(50):
                slow.sendto(f"{number}".encode(), other.getsockname())
            assert [other.recv(100) for _ in range(51)] == [*(f"{n}".encode() for n in range(50)), b"first"]
            assert time.monotonic() - began_s >= 1.0
        finally:
            planes.delay(0)


def test_delayed_packets_to_a_port_that_is_down_are_counted_as_lost(planes: Planes) -> None:
    planes.delay(1_000, hosts=[0])
    try:
        before = settled_delays(planes)
        with planes.within(0, open_socket, planes.addresses(0)[0]) as sender:
            planes.unplug(1)
            for _ in range(20):
                sender.sendto(b"lost", (planes.addresses(1)[0], 9))
        deadline_s = time.monotonic() + DEADLINE_S
        while (after := planes.delay_counters()).received - before.received < 20 or after.waiting:
            assert time.monotonic() < deadline_s, after
            os.sched_yield()
    finally:
        for plane in range(2):
            planes.switch(plane, up=True, how="link")
        planes.delay(0)
    assert (after.lost - before.lost, after.sent, after.overrun) == (20, before.sent, 0)
    assert send_datagrams(planes, 100, plane=0).missing == set()


def test_a_delay_that_cannot_keep_up_says_how_many_it_lost() -> None:
    count, size_bytes = 20_000, 8_900
    with Planes(hosts=2, planes=1) as planes:
        planes.delay(1, hosts=[0])  # not the other host's 'port unreachable'
        assert planes._bpf is not None
        relay_process = planes._bpf._delay
        assert relay_process is not None
        os.kill(relay_process._process.pid, signal.SIGSTOP)
        send_datagrams(planes, count, size_bytes=size_bytes, arrivals=0)
        os.kill(relay_process._process.pid, signal.SIGCONT)
        deadline_s = time.monotonic() + DEADLINE_S
        while (relay := planes.delay_counters()).received + relay.overrun < count:
            assert time.monotonic() < deadline_s, relay
            os.sched_yield()
    assert relay.overrun > 0
    assert relay.received + relay.overrun == count


def test_impairments_come_before_the_delay(clear_planes: Planes, seed: int) -> None:
    clear_planes.impair(Impairment(loss_fraction=0.1, duplicate_fraction=0.1, seed=seed))
    straight = send_datagrams(clear_planes, 1_000)
    clear_planes.delay(1_000)
    try:
        clear_planes.impair(Impairment(loss_fraction=0.1, duplicate_fraction=0.1, seed=seed))
        delayed = send_datagrams(clear_planes, 1_000)
    finally:
        clear_planes.delay(0)
    assert delayed.order == straight.order
    assert (delayed.switch.dropped, delayed.switch.duplicated) == (straight.switch.dropped, straight.switch.duplicated)


def packets_in(path: Path) -> list[tuple[int, bytes]]:
    """Returns original length and captured bytes of each packet of a pcap file in this machine's byte order."""
    data = path.read_bytes()
    found, offset = [], 24
    while offset + 16 <= len(data):
        _, _, captured, length = struct.unpack_from("=4I", data, offset)
        found.append((length, data[offset + 16 : offset + 16 + captured]))
        offset += 16 + captured
    return found


def datagrams_in(path: Path) -> list[bytes]:
    """Returns the datagrams of `send_datagrams`. Hosts sometimes also report their multicast groups (RFC 3810)."""
    return [data for length, data in packets_in(path) if length == 14 + 40 + 8 + 1_000]


@pytest.mark.needs("dumpcap")
def test_captures_show_what_was_sent_and_what_came(clear_planes: Planes, tmp_path: Path, seed: int) -> None:
    clear_planes.impair(Impairment(loss_fraction=0.2, seed=seed))
    sent_path, came_path = tmp_path / "sent.pcap", tmp_path / "came.pcap"
    with (
        clear_planes.capture(0, 0, sent_path, snap_bytes=64) as capture,
        clear_planes.capture(1, 0, came_path, snap_bytes=64),
    ):
        account = send_datagrams(clear_planes, 100)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(datagrams_in(sent_path)) < 100 or len(datagrams_in(came_path)) < len(account.order):
            assert time.monotonic() < deadline_s
            os.sched_yield()
    sent, came = datagrams_in(sent_path), datagrams_in(came_path)
    assert len(sent) == 100
    assert len(came) == len(account.order) < 100
    assert {len(data) for data in sent + came} == {64}
    assert (capture.packets, capture.dropped) == (len(packets_in(sent_path)), 0)


def test_nothing_stays_behind() -> None:
    before = names(os.getpid())
    planes = Planes(hosts=3, planes=1)

    def fail_inside() -> None:
        with planes:
            assert names(os.getpid()) - before == {planes.switch_name, *(planes.netns_name(host) for host in range(3))}
            planes.delay(1_000)
            children.append(planes.popen(0, ["sleep", "1000"]))
            # A command that has ended, but left a process behind.
            children.append(planes.popen(2, ["sh", "-c", "sleep 1000 >&2 & echo $!"], stdout=subprocess.PIPE))
            assert children[1].stdout is not None
            left.append(int(children[1].stdout.readline()))
            assert children[1].wait(DEADLINE_S) == 0
            assert left == namespace.processes_in([planes.netns_name(2)])
            raise KeyError("inside")

    children: list[subprocess.Popen[bytes]] = []
    left: list[int] = []
    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert names(os.getpid()) == before
    assert children[0].returncode == -signal.SIGKILL
    assert children[1].stdout is not None
    assert children[1].stdout.closed
    deadline_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{left[0]}/ns/net").exists():  # It was killed, and is reaped by the process that adopted it.
        assert time.monotonic() < deadline_s
        os.sched_yield()


def test_planes_that_cannot_be_finished_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(os.getpid())

    def refuse(self: Planes, host: int) -> None:
        raise OSError("no more")

    monkeypatch.setattr(Planes, "_build_host", refuse)
    with pytest.raises(OSError, match="no more"), Planes():
        pass
    assert names(os.getpid()) == before


def test_two_at_once_do_not_meet(planes: Planes) -> None:
    with Planes(hosts=2, planes=2) as others:
        others.impair(Impairment(loss_fraction=1))
        assert send_datagrams(planes, 10).missing == set()
        assert send_datagrams(others, 10).order == []


def test_a_number_that_came_again_is_another_process() -> None:
    """Namespaces of a process with this number but another start time are stale. This process's own are not."""
    mine = namespace.unique_prefix(10**6)
    prefix, pid, started, serial = mine.split("-")
    stale = f"{prefix}-{pid}-{int(started) + 1}-{serial}"
    try:
        for name in (mine, stale):
            namespace.path_of(name).touch()
        assert stale in namespace.remove_stale()
        assert not namespace.path_of(stale).exists()
        assert namespace.path_of(mine).exists()
    finally:
        for name in (mine, stale):
            namespace.path_of(name).unlink(missing_ok=True)


@pytest.mark.parametrize("number", briefly([signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]))
def test_a_killed_process_leaves_nothing_for_long(number: signal.Signals) -> None:
    """SIGTERM cleans up. After SIGKILL the next planes clean up."""
    program = textwrap.dedent("""
        import time
        from sennit.testbed.topology import Planes
        with Planes(hosts=2, planes=1) as planes:
            planes.delay(1_000)
            print(planes.switch_name, planes._bpf._delay._process.pid, flush=True)
            while True:
                # Not signal.pause(): a signal that comes just before it would be handled after it.
                time.sleep(0.05)
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        name, relay = child.stdout.readline().split()
        assert name in names(child.pid)
        child.send_signal(number)
        assert child.wait(DEADLINE_S) == (128 + number if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        with Planes(hosts=2, planes=1):
            assert names(child.pid) == set()
    assert names(child.pid) == set()
    deadline_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{relay}").exists():
        assert time.monotonic() < deadline_s
        os.sched_yield()
