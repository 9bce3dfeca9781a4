# SPDX-License-Identifier: Apache-2.0
"""Hosts in network namespaces, joined by planes that can be impaired, rate-limited, delayed and switched off."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv6Address
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from pyroute2 import IPRoute

from sennit.doctor import capabilities
from sennit.testbed.topology import namespace
from sennit.testbed.topology.bpf_switch import BpfSwitch
from sennit.testbed.topology.cable import await_links
from sennit.testbed.topology.capture import SNAP_BYTES, Capture
from sennit.testbed.topology.delay import DELAY_MAX_US
from sennit.testbed.topology.fabric import HOSTS_MAX, PLANES_MAX, mac_address, port_ifindex
from sennit.testbed.topology.impairment import Impairment, ImpairmentCounters
from sennit.testbed.topology.netem import NetemCounters
from sennit.testbed.topology.netem_switch import NetemSwitch
from sennit.testbed.topology.rate_limit import (
    ETHERNET_HEADER_BYTES,
    RATE_MAX_BITS_PER_S,
    RATE_MIN_BITS_PER_S,
    Direction,
    QueueCounters,
    read_queue,
    set_limit,
)
from sennit.testbed.topology.relay_table import RelayCounters
from sennit.testbed.topology.switch import NEEDS, Impairer, Switch, resolve

MTU_MIN_BYTES: Final = 1280  # RFC 8200, section 5
MTU_MAX_BYTES: Final = 9000
IPV6_PREFIX_BITS: Final = 64
IPV4_PREFIX_BITS: Final = 24
# linux/if_addr.h: usable at once, without duplicate address detection
IFA_F_NODAD: Final = 0x02
# linux/neighbour.h
NUD_PERMANENT: Final = 0x80
# net.ipv6.conf.*.addr_gen_mode: no link-local address, so nobody searches for routers and groups
ADDR_GEN_MODE_NONE: Final = 1
CHILD_TIMEOUT_S: Final = 10.0

_serials = itertools.count()
Result = TypeVar("Result")
Ports = Iterable[int] | None


class Planes:
    """`hosts` hosts, each with an interface on each of `planes` planes. A context manager.

    Leaving it removes everything, including processes started in it. A plane is a switch with one veth cable to every
    host. All switches share one namespace. `impairer` says what forwards and impairs there: one BPF program at their
    ports (fabric.bpf.c), or bridges and the kernel's netem. Every host knows every other host's hardware address, so no
    neighbour discovery can fail in place of the packets under test.

    `per_packet`: hosts give whole packets to the switch instead of super-packets (GSO) of up to 64 KiB. Then every
    packet rolls its own dice, as on a wire. It costs throughput: say which one a figure was taken with.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        planes: int = 4,
        mtu: int = MTU_MAX_BYTES,
        per_packet: bool = False,
        impairer: Impairer = Impairer.BPF,
    ) -> None:
        for name, value, low, high in (
            ("hosts", hosts, 2, HOSTS_MAX),
            ("planes", planes, 1, PLANES_MAX),
            ("mtu", mtu, MTU_MIN_BYTES, MTU_MAX_BYTES),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} {value}; allowed: {low}..{high}")
        self.hosts, self.planes, self.mtu, self.per_packet = hosts, planes, mtu, per_packet
        self._prefix = namespace.unique_prefix(next(_serials))
        self.impairer = resolve(impairer)
        self._bpf: BpfSwitch | None = None
        self._netem: NetemSwitch | None = None
        self._limited: set[tuple[int, int]] = set()
        self._children: list[subprocess.Popen[Any]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        reason = capabilities.missing(*NEEDS[self.impairer])
        if reason is not None:
            raise RuntimeError(f"planes cannot be made: {reason}")
        namespace.remove_stale()
        try:
            self._stack.enter_context(_termination_raises())
            for name in [self.switch_name, *map(self.netns_name, range(self.hosts))]:
                self._stack.callback(namespace.remove, name)
                namespace.create(name)
            switch = self._make_switch()
            self._stack.callback(switch.close)
            namespace.within(self.switch_name, self._build_switch)
            for host in range(self.hosts):
                namespace.within(self.netns_name(host), self._build_host, host)
            namespace.within(self.switch_name, switch.attach)
            for name in [self.switch_name, *map(self.netns_name, range(self.hosts))]:
                namespace.within(name, await_links)
            self._stack.callback(self._stop_processes)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bpf = self._netem = None
        self._stack.close()
        self._limited.clear()

    @property
    def switch_name(self) -> str:
        """The namespace of all planes' switches."""
        return f"{self._prefix}-switch"

    def netns_name(self, host: int) -> str:
        """The namespace of a host, as `ip netns` knows it."""
        return f"{self._prefix}-host{host}"

    def interfaces(self, host: int) -> list[str]:
        """A host's interface on each plane. Joined by commas it is the value of SENNIT_INTERFACES."""
        self._pick(host, range(self.hosts), "host")
        return [f"plane{plane}" for plane in range(self.planes)]

    def addresses(self, host: int) -> list[str]:
        """A host's IPv6 address on each plane."""
        self._pick(host, range(self.hosts), "host")
        return [_ipv6(host, plane) for plane in range(self.planes)]

    def ipv4_addresses(self, host: int) -> list[str]:
        """A host's IPv4 address on each plane."""
        self._pick(host, range(self.hosts), "host")
        return [_ipv4(host, plane) for plane in range(self.planes)]

    def environment(self, host: int) -> dict[str, str]:
        """Variables with which a rank on this host uses its planes and treats ranks on other hosts as remote."""
        return {
            "SENNIT_TRANSPORT": "udp",
            "SENNIT_INTERFACES": ",".join(self.interfaces(host)),
            "SENNIT_HOST_ID": self.netns_name(host),
        }

    def popen(self, host: int, command: list[str], **popen_args: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host. The end of the planes kills it with all that it started."""
        child = subprocess.Popen([*self._entry(host), *command], **popen_args)
        self._children.append(child)
        return child

    def within(self, host: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Returns the result of `function`, called on a host. A socket that it makes stays on the host."""
        return namespace.within(self.netns_name(host), function, *arguments)

    def impair(self, impairment: Impairment, *, hosts: Ports = None, planes: Ports = None) -> None:
        """Replaces the impairment of what these hosts send on these planes. None: all of them."""
        self._switch.impair(impairment, self._ports(hosts, planes))

    def counters(self, host: int, plane: int) -> ImpairmentCounters:
        """Returns the counters of what `host` sent on `plane`. Only for planes impaired by bpf."""
        self._ports([host], [plane])
        if self._bpf is None:
            raise RuntimeError(f"these planes have no counters of the switch: they are impaired by {self.impairer}")
        return self._bpf.counters(host, plane)

    def netem_counters(self, host: int, plane: int) -> NetemCounters:
        """Returns the counters of what `host` sent on `plane`. Only for planes impaired by netem."""
        self._ports([host], [plane])
        if self._netem is None:
            raise RuntimeError(f"these planes have no counters of netem: they are impaired by {self.impairer}")
        return self._netem.counters(host, plane)

    def switch(self, plane: int, *, up: bool, how: Literal["blackhole", "link"] = "blackhole") -> None:
        """Switches a plane off or on for all hosts. blackhole: packets vanish and no host is told. link: the hosts lose
        the carrier too. Each way is switched on again by its own name.
        """
        ports = self._ports(None, [plane])
        if how == "blackhole":
            self._switch.set_blackhole(not up, ports)
        elif how == "link":
            namespace.within(self.switch_name, _set_links, [port_ifindex(*port) for port in ports], up)
        else:
            raise ValueError(f"how {how!r}; allowed: blackhole, link")

    def unplug(self, host: int) -> None:
        """Takes the carrier from all links of a host, for good. A host that loses power does this to its switches."""
        ports = self._ports([host], None)
        namespace.within(self.switch_name, _set_links, [port_ifindex(*port) for port in ports], False)

    def limit_rate(
        self,
        bits_per_s: int | None,
        *,
        queue_bytes: int = 0,
        hosts: Ports = None,
        planes: Ports = None,
        direction: Direction = Direction.SEND,
    ) -> None:
        """Limits what these hosts send, or receive, on each of these planes; None removes the limit. A queue of
        `queue_bytes` takes the excess, and drops what does not fit.
        """
        if bits_per_s is not None:
            if not RATE_MIN_BITS_PER_S <= bits_per_s <= RATE_MAX_BITS_PER_S:
                raise ValueError(f"bits_per_s {bits_per_s}; allowed: {RATE_MIN_BITS_PER_S}..{RATE_MAX_BITS_PER_S}")
            if not self.mtu + ETHERNET_HEADER_BYTES <= queue_bytes < 1 << 32:
                raise ValueError(f"queue_bytes {queue_bytes}; allowed: a frame ({self.mtu} and header) to 2^32-1")
        ports = self._ports(hosts, planes)
        if self._netem is not None and Direction(direction) == Direction.SEND:
            self._netem.limit_rate(bits_per_s, queue_bytes, ports)
            return
        for host, plane in ports:
            name, interface = self._queue(host, plane, Direction(direction))
            namespace.within(name, set_limit, interface, bits_per_s, queue_bytes, self.mtu)
            if direction == Direction.RECEIVE:
                (self._limited.add if bits_per_s is not None else self._limited.discard)((host, plane))
                # What waits in the switch must not fill the sender's socket buffer.
                queued = any(limited_plane == plane for _, limited_plane in self._limited)
                self._switch.set_queued(queued, self._ports(None, [plane]))

    def queue_counters(self, host: int, plane: int, direction: Direction = Direction.SEND) -> QueueCounters:
        """What the queue of a rate limit did since it was made. Changing the limit keeps the counters."""
        self._ports([host], [plane])
        name, interface = self._queue(host, plane, Direction(direction))
        found = namespace.within(name, read_queue, interface)
        if found is None:
            raise ValueError(f"host {host} has no rate limit on plane {plane} for what it {Direction(direction)}s")
        return found

    def delay(self, delay_us: int, *, hosts: Ports = None, planes: Ports = None) -> None:
        """Delays packets that these hosts send on these planes, in us. With 0 they overtake packets still delayed."""
        if not 0 <= delay_us <= DELAY_MAX_US:
            raise ValueError(f"delay_us {delay_us}; allowed: 0..{DELAY_MAX_US}")
        self._switch.delay(delay_us, self._ports(hosts, planes))

    def delay_counters(self) -> RelayCounters:
        """Returns the counters of the relay process. All are zero if nothing was ever delayed, or if netem delays."""
        return self._switch.delay_counters()

    @contextlib.contextmanager
    def capture(self, host: int, plane: int, path: Path | str, *, snap_bytes: int = SNAP_BYTES) -> Iterator[Capture]:
        """Captures a host's packets into a pcap file: sent ones before any impairment, received ones after it."""
        self._ports([host], [plane])
        reason = capabilities.missing("dumpcap")
        if reason is not None:
            raise RuntimeError(f"no capture: {reason}")
        running = Capture(self._entry(host), f"plane{plane}", Path(path), snap_bytes)
        try:
            yield running
        finally:
            running.stop()

    def _entry(self, host: int) -> list[str]:
        return ["nsenter", f"--net={namespace.path_of(self.netns_name(host))}", "--"]

    def _queue(self, host: int, plane: int, direction: Direction) -> tuple[str, str]:
        """Returns namespace and interface of the queue towards the switch, or from it."""
        if direction == Direction.SEND:
            return self.netns_name(host), f"plane{plane}"
        return self.switch_name, f"p{plane}h{host}"

    def _make_switch(self) -> Switch:
        if self.impairer is Impairer.NETEM:
            self._netem = NetemSwitch(
                hosts=self.hosts,
                planes=self.planes,
                name=self.switch_name,
                mtu=self.mtu,
                netns_of=self.netns_name,
            )
            return self._netem
        self._bpf = BpfSwitch(hosts=self.hosts, planes=self.planes, name=self.switch_name, mtu=self.mtu)
        return self._bpf

    @property
    def _switch(self) -> Switch:
        switch = self._bpf or self._netem
        if switch is None:
            raise RuntimeError("these planes do not exist yet: use them inside 'with Planes(...) as planes'")
        return switch

    def _ports(self, hosts: Ports, planes: Ports) -> list[tuple[int, int]]:
        wanted_hosts = range(self.hosts) if hosts is None else hosts
        wanted_planes = list(range(self.planes) if planes is None else planes)
        return [
            (self._pick(host, range(self.hosts), "host"), self._pick(plane, range(self.planes), "plane"))
            for host in wanted_hosts
            for plane in wanted_planes
        ]

    @staticmethod
    def _pick(value: int, allowed: range, what: str) -> int:
        if value not in allowed:
            raise ValueError(f"{what} {value}; allowed: 0..{len(allowed) - 1}")
        return value

    def _build_switch(self) -> None:
        _write_sysctl("net/ipv6/conf/default/disable_ipv6", 1)
        segments = {"gso_max_segs": 1} if self.per_packet else {}
        with IPRoute() as route:
            for host in range(self.hosts):
                # The cable's other end must not appear with a link-local address.
                namespace.within(self.netns_name(host), _prepare_host)
                with _opened(namespace.path_of(self.netns_name(host))) as descriptor:
                    for plane in range(self.planes):
                        route.link(
                            "add",
                            ifname=f"p{plane}h{host}",
                            index=port_ifindex(host, plane),
                            kind="veth",
                            mtu=self.mtu,
                            peer={
                                "ifname": f"plane{plane}",
                                "address": mac_address(host, plane),
                                "mtu": self.mtu,
                                "net_ns_fd": descriptor,
                                **segments,
                            },
                        )
                        route.link("set", index=port_ifindex(host, plane), state="up")

    def _build_host(self, host: int) -> None:
        with IPRoute() as route:
            route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
            for plane in range(self.planes):
                index = route.link_lookup(ifname=f"plane{plane}")[0]
                route.link("set", index=index, state="up")
                route.addr(
                    "add", index=index, address=_ipv6(host, plane), prefixlen=IPV6_PREFIX_BITS, flags=IFA_F_NODAD
                )
                route.addr("add", index=index, address=_ipv4(host, plane), prefixlen=IPV4_PREFIX_BITS)
                for other in range(self.hosts):
                    if other != host:
                        for address in (_ipv6(other, plane), _ipv4(other, plane)):
                            route.neigh(
                                "add",
                                ifindex=index,
                                dst=address,
                                lladdr=mac_address(other, plane),
                                state=NUD_PERMANENT,
                            )

    def _stop_processes(self) -> None:
        """Ends the children and what they started, because any process keeps the namespaces alive."""
        for child in self._children:
            if child.poll() is None:  # It may not have entered its namespace yet.
                child.kill()
        hosts = [self.netns_name(host) for host in range(self.hosts)]
        deadline_s = time.monotonic() + CHILD_TIMEOUT_S
        # More than one pass: a process that is being killed may still fork.
        while (running := namespace.processes_in(hosts)) and time.monotonic() < deadline_s:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for child in self._children:
                child.poll()
            os.sched_yield()
        for child in self._children:
            child.wait(CHILD_TIMEOUT_S)
            # Nobody waits for their output.
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        self._children.clear()


def _ipv6(host: int, plane: int) -> str:
    """A unique local address (RFC 4193); namespaces keep it apart from real ones."""
    return str(IPv6Address(f"fd5e:4e17:0:{plane:x}::{host + 1:x}"))


def _ipv4(host: int, plane: int) -> str:
    return f"10.94.{plane}.{host + 1}"


def _prepare_host() -> None:
    _write_sysctl("net/ipv6/conf/default/addr_gen_mode", ADDR_GEN_MODE_NONE)


def _write_sysctl(name: str, value: int) -> None:
    Path("/proc/sys", name).write_text(f"{value}", encoding="utf-8")


def _set_links(indices: list[int], up: bool) -> None:
    with IPRoute() as route:
        for index in indices:
            route.link("set", index=index, state="up" if up else "down")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that everything is cleaned up, if the program has no handler."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not ours:
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
