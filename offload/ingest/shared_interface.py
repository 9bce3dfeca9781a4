# SPDX-License-Identifier: Apache-2.0
"""Shares one interface, which takes one XDP program, among several ranks of a machine.

The first rank attaches a dispatcher (ebpf/programs/dispatch.bpf.c). The other processes pass their programs to it as
descriptors over a Unix socket with an abstract name, which only this network namespace sees (unix(7)).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import compile_program
from sennit.ebpf.links import Link, attach_xdp
from sennit.ebpf.loader import BpfObject
from sennit.offload.errors import TargetUnavailable

RETRY_S: Final = 0.02
_DONE: Final = b"+"
_NUMBER: Final = struct.Struct("<I")
# struct ucred (unix(7)): process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")


class Dispatcher(Closing):
    """The dispatcher at an interface: UDP port `first_port + n` goes to receiver `n`, everything else to the host."""

    def __init__(self, *, first_port: int, receivers: int, fragments: bool = False) -> None:
        """`fragments` as of the receivers' programs: the kernel takes no other ones."""
        self._object = BpfObject(
            compile_program("dispatch"),
            read_only={"first_port": first_port},
            max_entries={"receivers": receivers},
            xdp_fragments=fragments,
        )
        self._link: Link | None = None
        self.program = self._object.program("dispatch")

    def add(self, number: int, program_descriptor: int) -> None:
        self._object.map("receivers").write(number, _NUMBER.pack(program_descriptor))

    def attach(self, interface: str) -> None:
        self._link = attach_xdp(self.program, socket.if_nametoindex(interface))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._object.close()


def lead(
    program_descriptor: int,
    interface: str,
    ranks: Sequence[int],
    *,
    session: int,
    first_port: int,
    fragments: bool = False,
    timeout_s: float,
) -> Dispatcher:
    """Serves the other ranks at the interface, as its first rank. Returns when all have passed their programs.

    Raises TargetUnavailable if one has not by the deadline.
    """
    deadline_s = time.monotonic() + timeout_s
    dispatcher = Dispatcher(first_port=first_port, receivers=ranks[-1] + 1, fragments=fragments)
    try:
        dispatcher.add(ranks[0], program_descriptor)
        dispatcher.attach(interface)
        missing = set(ranks[1:])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(_name(session, interface))
            listener.listen(socket.SOMAXCONN)
            visitors: set[socket.socket] = set()
            try:
                while missing:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise TargetUnavailable(
                            f"xdp: local ranks {sorted(missing)} did not come to share {interface} "
                            f"within {timeout_s:g} s"
                        )
                    ready, _, _ = select.select([listener, *visitors], [], [], left_s)
                    for found in ready:
                        if found is listener:
                            visitors |= _accept(listener)
                            continue
                        visitors.discard(found)
                        with found:
                            missing.discard(_receive(found, dispatcher, missing))
            finally:
                for visitor in visitors:
                    visitor.close()
    except BaseException:
        dispatcher.close()
        raise
    return dispatcher


def follow(program_descriptor: int, interface: str, number: int, *, session: int, timeout_s: float) -> None:
    """Passes this rank's program to the first rank. Raises TargetUnavailable if that does not answer in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                visitor.connect(_name(session, interface))
                socket.send_fds(visitor, [_NUMBER.pack(number)], [program_descriptor])
                if visitor.recv(1) == _DONE:
                    return
            except OSError:
                pass
        if time.monotonic() + RETRY_S >= deadline_s:
            raise TargetUnavailable(f"xdp: no rank shares {interface} with local rank {number} within {timeout_s:g} s")
        time.sleep(RETRY_S)


def _accept(listener: socket.socket) -> set[socket.socket]:
    """The next visitor, if it is a process of this user. Nobody waits for what it says: others are heard meanwhile."""
    visitor, _ = listener.accept()
    _, user, _ = _CREDENTIALS.unpack(visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        visitor.close()
        return set()
    visitor.setblocking(False)
    return {visitor}


def _receive(visitor: socket.socket, dispatcher: Dispatcher, missing: set[int]) -> int:
    """The number of the rank that passed its program; -1 for a process that is not expected or has gone.

    Raises BpfError if the kernel refuses the program of an expected rank.
    """
    try:
        said, descriptors, _, _ = socket.recv_fds(visitor, _NUMBER.size, 1)
    except OSError:
        return -1
    try:
        number = _NUMBER.unpack(said)[0] if len(said) == _NUMBER.size else -1
        if number not in missing or not descriptors:
            return -1
        dispatcher.add(number, descriptors[0])
        with contextlib.suppress(OSError):  # it has gone, which its run will say
            visitor.send(_DONE)
        return int(number)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _name(session: int, interface: str) -> str:
    return f"\0sennit-ingest-{session:08x}-{interface}"
