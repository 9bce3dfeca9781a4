# SPDX-License-Identifier: Apache-2.0
"""Where a run's ranks receive their records: `xdp://INTERFACE[,INTERFACE…][:PORT]` or `cpu://ADDRESS[:PORT]`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sennit.closing import Closing
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.interfaces import (
    TargetError,
    hardware_address,
    has_fragments,
    interface_address,
    interface_index,
    own_ends,
)
from sennit.offload.targets import Receiver, xdp_receiver

if TYPE_CHECKING:
    from sennit.ebpf.loader import Program
    from sennit.offload.ingest.shared_interface import Reception
    from sennit.offload.xdp import XdpReceiver

STATISTICS: Final = "SENNIT_BPF_STATISTICS"
PORT: Final = 4800
KINDS: Final = ("xdp", "cpu")
# Records in one datagram: a jumbo frame.
XDP_MTU_MAX: Final = 9000
CPU_PACKET_BYTES: Final = 8192
HEADERS_BYTES: Final = 48  # IPv6 and UDP
# Datagrams in flight to a rank, over all its open batches. Below 256, the ring size of a veth interface.
ON_THE_WAY_MAX: Final = 192
CPU_BUFFER_BYTES: Final = ON_THE_WAY_MAX * CPU_PACKET_BYTES
# asm-generic/socket.h: exceeds net.core.rmem_max for processes with the right to.
_SO_RCVBUFFORCE: Final = 33


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestTarget:
    """Local rank `i` takes records at UDP port `port + i` and feeders at the TCP port of the same number."""

    kind: str
    """"xdp" or "cpu"."""

    places: tuple[str, ...]
    """xdp: interfaces, assigned to local ranks in rotation. cpu: one address of this machine."""

    port: int = PORT

    def __str__(self) -> str:
        place = ",".join(self.places)
        return f"{self.kind}://{f'[{place}]' if ':' in place else place}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        kind, separator, rest = text.partition("://")
        allowed = "xdp://INTERFACE[,INTERFACE…][:PORT], cpu://ADDRESS[:PORT]"
        if not separator or kind not in KINDS:
            raise TargetError(f"--ingest {text!r}; allowed: {allowed}")
        if rest.startswith("["):
            place, bracket, behind = rest[1:].partition("]")
            colon, port = behind[:1], behind[1:]
            is_whole = bool(bracket) and colon in ("", ":")
        else:
            place, colon, port = rest.partition(":")
            is_whole = True
        if colon and not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65_535):
            raise TargetError(f"--ingest {text!r}: port {port!r}; allowed: 1 to 65535 (an IPv6 address in brackets)")
        places = tuple(place.split(",")) if kind == "xdp" else (place,)
        if not is_whole or not all(places):
            raise TargetError(f"--ingest {text!r}; allowed: {allowed}")
        return cls(kind=kind, places=places, port=int(port) if colon else PORT)

    def check(self, local_ranks: int) -> None:
        """Checks everything that can be checked before a run."""
        if self.port + local_ranks - 1 > 65_535:
            raise TargetError(f"port {self.port} for {local_ranks} ranks; allowed: up to {65_536 - local_ranks}")
        if self.kind == "xdp":
            if len(set(self.places)) < len(self.places):
                raise TargetError(f"--ingest {self}: an interface is named twice; ranks take turns anyway")
            for place in self.places[:local_ranks]:
                interface_index(place)
                try:
                    hardware_address(place)
                except TargetError as error:
                    raise TargetError(f"--ingest {self}: {error}; cpu:// takes any") from None
            from sennit.offload.agent.receiver import SOCKET, agent_socket

            if (agent := agent_socket()) is not None:
                self._ask(agent, local_ranks)
                return
            try:
                xdp_receiver()
            except TargetUnavailable as error:
                raise TargetError(f"--ingest {self}: {error}") from None
            from sennit.ebpf.kernel_features import missing_privileges
            from sennit.ebpf.links import occupant

            lacking = missing_privileges()
            if lacking:
                raise TargetError(
                    f"--ingest {self}: this process lacks {', '.join(lacking)}, and there is no agent at {SOCKET} "
                    "(sennit agent); cpu:// needs neither"
                )
            for place in self.places[:local_ranks]:
                if taken := occupant(interface_index(place)):
                    raise TargetError(f"--ingest {self}: {taken}; cpu:// needs no interface to itself")
        for local_rank in range(local_ranks):
            self.listen(local_rank).close()

    def _ask(self, agent: Path, local_ranks: int) -> None:
        """Asks the agent for what the ranks will want."""
        from sennit.offload.agent.receiver import check

        for local_rank in range(local_ranks):
            interface = self._interface(local_rank)
            interface_index(interface)
            try:
                check(agent, interface, self.port + local_rank)
            except TargetUnavailable as error:
                raise TargetError(f"--ingest {self}: {error}; cpu:// needs no agent") from None
            self.listen(local_rank).close()

    def address(self, local_rank: int) -> str:
        """Where feeders reach the rank, as a numeric address."""
        if self.kind == "xdp":
            return interface_address(self._interface(local_rank))
        try:
            found = socket.getaddrinfo(self.places[0], self.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise TargetError(f"--ingest {self}: {getattr(error, 'strerror', None) or error}") from None
        host = str(found[0][4][0])
        if host in ("0.0.0.0", "::"):
            raise TargetError(f"--ingest {self}: feeders need one address to send to; allowed: one of this machine's")
        return host

    def listen(self, local_rank: int) -> socket.socket:
        """The listening socket for feeders."""
        host, port = self.address(local_rank), self.port + local_rank
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise TargetError(f"--ingest {self}: {host} port {port}: {error.strerror}") from error
        return listener

    def reception(self) -> Reception | None:
        """Where other ranks find this one if they share its interface; None where no rank attaches anything itself.

        Raises OSError.
        """
        if self.kind == "cpu":
            return None
        from sennit.offload.agent.receiver import agent_socket
        from sennit.offload.ingest.shared_interface import Reception

        return Reception() if agent_socket() is None else None

    def receiver(
        self,
        layout: BatchLayout,
        local_rank: int,
        *,
        address: str,
        mates: Mapping[int, str],
        reception: Reception | None,
        session: int,
        timeout_s: float,
    ) -> Receiver:
        """Starts to receive the rank's records.

        `address`: where `listen` does. The method `address` may find another one by now. `mates`: the local ranks of
        the group at this target, and the names of their receptions. `reception`: this rank's.

        Raises PlanError, TargetUnavailable or OSError.
        """
        port = self.port + local_rank
        if self.kind == "xdp":
            from sennit.offload.agent.receiver import LeasedReceiver, agent_socket

            if (agent := agent_socket()) is not None:
                interface = self._interface(local_rank)
                return LeasedReceiver(
                    layout, session=session, interface=interface, address=address, udp_port=port, agent=agent,
                    timeout_s=timeout_s,
                )  # fmt: skip
            fragments = has_fragments(self._interface(local_rank))
            in_kernel = xdp_receiver()(layout, session=session, udp_port=port, fragments=fragments)
            with _closed_on_error(in_kernel):
                self._attach(in_kernel, address, mates, reception, timeout_s)
            return in_kernel
        from sennit.offload.cpu import CpuReceiver

        on_host = CpuReceiver(layout, session=session)
        with _closed_on_error(on_host):
            on_host.listen(address, port, receive_buffer_bytes=_receive_buffer_bytes())
        return on_host

    def _interface(self, local_rank: int) -> str:
        return self.places[local_rank % len(self.places)]

    def _sharing(self, local_rank: int, mates: Iterable[int]) -> list[int]:
        """The local ranks at the interface of this one."""
        return sorted(mate for mate in mates if self._interface(mate) == self._interface(local_rank))

    def _attach(
        self,
        receiver: XdpReceiver,
        address: str,
        mates: Mapping[int, str],
        reception: Reception | None,
        timeout_s: float,
    ) -> None:
        """Attaches to an interface that other ranks may share."""
        from sennit.offload.ingest.shared_interface import follow, lead

        local_rank = receiver.udp_port - self.port
        ranks = self._sharing(local_rank, mates)
        interface, program = self._interface(local_rank), receiver.program.descriptor
        if len(ranks) > 1:
            receiver.receive_at(own_ends(interface, address))  # the dispatcher is what is attached
        if len(ranks) > 1 and local_rank == ranks[0]:
            assert reception is not None
            dispatcher = lead(
                reception,
                program,
                interface,
                ranks,
                first_port=self.port,
                fragments=has_fragments(interface),
                timeout_s=timeout_s,
            )
            receiver.attached = dispatcher
            _count_time(receiver, dispatcher.program)
            return
        if len(ranks) == 1:
            receiver.attach(interface, address)
        else:
            follow(mates[ranks[0]], program, interface, local_rank, timeout_s=timeout_s)
        _count_time(receiver)

    def packets_on_the_way(self, local_rank: int, mates: Iterable[int]) -> int:
        """Datagrams that may be in flight to a rank. No queue on the host holds more."""
        if self.kind == "xdp":
            return ON_THE_WAY_MAX // len(self._sharing(local_rank, mates))  # they share the interface's ring
        return min(ON_THE_WAY_MAX, _receive_buffer_bytes() // CPU_PACKET_BYTES)

    def packet_bytes(self, local_rank: int) -> int:
        """Bytes of the longest datagram. A feeder uses less where the path MTU is smaller."""
        if self.kind == "cpu":
            return CPU_PACKET_BYTES
        from sennit.ebpf.links import interface_mtu

        return min(interface_mtu(self._interface(local_rank)), XDP_MTU_MAX) - HEADERS_BYTES


def _count_time(receiver: XdpReceiver, *before: Program) -> None:
    """Off unless it is asked for, because the kernel then counts for all programs of the machine, which slows them."""
    if os.environ.get(STATISTICS) == "1":
        receiver.count_time(*before)


def _receive_buffer_bytes() -> int:
    """The receive buffer for all datagrams in flight. The kernel doubles it for its own use (socket(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, CPU_BUFFER_BYTES)
        except PermissionError:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CPU_BUFFER_BYTES)
        return tried.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2


@contextlib.contextmanager
def _closed_on_error(receiver: Closing) -> Iterator[None]:
    try:
        yield
    except BaseException:
        receiver.close()
        raise
