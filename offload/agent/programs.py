# SPDX-License-Identifier: Apache-2.0
"""The programs that the agent has loaded: one for an interface and a port, each for one trainer.

A dispatcher is at an interface as long as somebody has a program there. Nothing is pinned: the descriptors of this
process alone keep programs and attachments, so whatever ends it also detaches them.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.links import occupant
from sennit.offload.agent.errors import AgentError
from sennit.offload.agent.permissions import Grant, Permissions
from sennit.offload.agent.protocol import LeaseRequest
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.interfaces import has_address, has_fragments, interface_address, interface_index, own_ends
from sennit.offload.plan_program import PROGRAM, RING, PlanProgram
from sennit.offload.xdp_sketch import SlotSketches

# asm-generic/socket.h, Linux 5.14: a number of the socket's network namespace that is never used again.
_SO_NETNS_COOKIE: Final = 71
_COOKIE: Final = struct.Struct("=Q")


@dataclass
class _Shared:
    """A dispatcher, and the ports whose programs it has."""

    dispatcher: Dispatcher
    ports: set[int] = field(default_factory=set)


class Loaded(Closing):
    """One trainer's program, at its interface until it is closed."""

    def __init__(self, programs: Programs, request: LeaseRequest, user: int, memory_bytes: int) -> None:
        self.interface, self.port, self.user, self.memory_bytes = request.interface, request.port, user, memory_bytes
        self.program: PlanProgram | None = None
        self.dispatcher: Dispatcher | None = None
        self._programs = programs

    @property
    def descriptors(self) -> list[int]:
        """What a trainer needs: the arena, and the counters. Neither lets it load, attach or change a program."""
        assert self.program is not None
        return [self.program.object.map(name).descriptor for name in (RING, "counters")]

    @property
    def is_attached(self) -> bool:
        return self.dispatcher is not None and self.dispatcher.is_attached

    def close(self) -> None:
        self._programs.unload(self)


class Programs(Closing):
    """What is loaded, for whom, and how much of it."""

    def __init__(self, permissions: Permissions) -> None:
        self._permissions = permissions
        self._loaded: list[Loaded] = []
        self._shared: dict[str, _Shared] = {}
        # Guards what is above, and is never held for long.
        self._lock = threading.Lock()
        # One compiler and one verifier at a time, so that the users of a machine together take one core at most. And
        # one of each user that waits for it, so that nobody waits behind all that somebody else has asked for.
        self._loading = threading.Lock()
        self._loading_of: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def check(self, grants: Sequence[Grant], interface: str, port: int) -> Grant:
        """Raises AgentError or TargetError if nobody with these grants could have a program there now."""
        grant = next((grant for grant in grants if grant.covers(interface, port)), None)
        if grant is None:
            raise AgentError(f"interface {interface}, port {port}; allowed: {told(grants)}")
        index = interface_index(interface)
        with self._lock:
            if (taken := self._of(interface, port)) is not None:
                raise AgentError(f"port {port} of {interface} has a program of user {taken.user} already")
            is_ours = interface in self._shared
        if not is_ours and (other := occupant(index)):
            raise AgentError(other)
        return grant

    def load(self, request: LeaseRequest, grants: Sequence[Grant], user: int, bound: socket.socket) -> Loaded:
        """Raises AgentError, TargetError, PlanError, TargetUnavailable or BpfError. `bound`: the trainer's socket."""
        grant = self.check(grants, request.interface, request.port)
        ends = own_ends(request.interface, check_socket(bound, request.interface, request.port))
        sketches = (
            SlotSketches(request.layout, request.sketch) if request.sketch and request.layout.plan.sparse else None
        )
        memory_bytes = request.layout.ring_bytes + (sketches.size_bytes if sketches else 0)
        made = self._reserved(request, grant, user, memory_bytes)
        try:
            with self._lock:
                own_turn = self._loading_of[user]
            with own_turn, self._loading:
                fragments = self._fragments(request.interface)
                made.program = PlanProgram(
                    request.layout,
                    session=request.session,
                    udp_port=request.port,
                    sketches=sketches,
                    fragments=fragments,
                    arena_address=request.address,
                )
                made.program.receive_at(ends)
                self._attach(made, fragments)
        except BaseException:
            made.close()
            raise
        return made

    def unload(self, loaded: Loaded) -> None:
        """Detaches it. Another call does nothing."""
        with self._lock:
            if loaded not in self._loaded:
                return
            self._loaded.remove(loaded)
            shared = self._shared.get(loaded.interface)
            if shared is not None and shared.dispatcher is loaded.dispatcher:
                if loaded.port in shared.ports and len(shared.ports) > 1:
                    shared.dispatcher.remove(loaded.port - shared.dispatcher.first_port)
                shared.ports.discard(loaded.port)
                if not shared.ports:
                    del self._shared[loaded.interface]
                    shared.dispatcher.close()
        if loaded.program is not None:
            loaded.program.close()

    def close(self) -> None:
        with self._lock:
            left = list(self._loaded)
        for loaded in left:
            loaded.close()

    def _of(self, interface: str, port: int) -> Loaded | None:
        return next((one for one in self._loaded if (one.interface, one.port) == (interface, port)), None)

    def _reserved(self, request: LeaseRequest, grant: Grant, user: int, memory_bytes: int) -> Loaded:
        """Counts it before it is made, so that no user has more than they may for a moment."""
        with self._lock:
            has = [one for one in self._loaded if one.user == user]
            if self._of(request.interface, request.port) is not None:
                raise AgentError(f"port {request.port} of {request.interface} has a program already")
            if len(has) >= grant.leases:
                raise AgentError(f"user {user} has {len(has)} programs; allowed: {grant.leases}")
            total_mib = (memory_bytes + sum(one.memory_bytes for one in has) + (1 << 20) - 1) >> 20
            if total_mib > grant.memory_mib:
                raise AgentError(f"user {user}: {total_mib} MiB for batches; allowed: {grant.memory_mib}")
            made = Loaded(self, request, user, memory_bytes)
            self._loaded.append(made)
        return made

    def _fragments(self, interface: str) -> bool:
        """The kernel takes one kind of programs behind a dispatcher."""
        with self._lock:
            shared = self._shared.get(interface)
        return has_fragments(interface) if shared is None else shared.dispatcher.fragments

    def _attach(self, made: Loaded, fragments: bool) -> None:
        assert made.program is not None
        interface = made.interface
        with self._lock:
            shared = self._shared.get(interface)
            if shared is None:
                ports = self._permissions.ports_at(interface)
                dispatcher = Dispatcher(first_port=ports[0], receivers=len(ports), fragments=fragments)
                try:
                    dispatcher.attach(interface)
                except BaseException:
                    dispatcher.close()
                    raise
                shared = self._shared[interface] = _Shared(dispatcher)
            dispatcher = made.dispatcher = shared.dispatcher
            if not dispatcher.is_attached:
                raise AgentError(f"{interface} has just gone, or its program was detached: try again")
            dispatcher.add(made.port - dispatcher.first_port, made.program.object.program(PROGRAM).descriptor)
            shared.ports.add(made.port)


def check_socket(bound: socket.socket, interface: str, port: int) -> str:
    """The socket's address. The program takes what the socket would get, so nobody gets packets of which the kernel
    would give them none.

    Raises AgentError.
    """
    try:
        kind = bound.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        (here,) = _COOKIE.unpack(bound.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, _COOKIE.size))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            (there,) = _COOKIE.unpack(own.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, _COOKIE.size))
        if kind != socket.IPPROTO_UDP or bound.family not in (socket.AF_INET, socket.AF_INET6):
            raise AgentError("the socket that came along; allowed: one of UDP")
        if here != there:
            raise AgentError("the trainer is in another network namespace; allowed: that of the agent")
        address, found_port = bound.getsockname()[:2]
    except OSError as error:
        raise AgentError(f"the socket that came along: {error.strerror}") from None
    if found_port != port or not has_address(interface, address):
        allowed = f"{interface_address(interface)} or another address of {interface}, port {port}"
        raise AgentError(f"a socket of {address} port {found_port}; allowed: {allowed}")
    return str(address)


def told(grants: Sequence[Grant]) -> str:
    """The grants for whoever has them."""
    return "; ".join(
        f"{', '.join(sorted(grant.interfaces))} ports {grant.ports[0]} to {grant.ports[-1]}" for grant in grants
    )
