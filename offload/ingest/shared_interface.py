# SPDX-License-Identifier: Apache-2.0
"""Shares one interface, which takes one XDP program, among several ranks of a machine.

The first rank attaches a dispatcher (ebpf/programs/dispatch.bpf.c). The other processes pass their programs to it as
descriptors over a Unix socket with an abstract name, which only this network namespace sees (unix(7)). Both sides check
that the other one is of their user.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence, Set
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.library import BpfError
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.errors import TargetUnavailable

# How long a leader that fails waits for the others, to tell them why.
FAREWELL_S: Final = 5.0
_DONE: Final = b"+"
# Stands before the reason in a refusal.
_REFUSED: Final = b"-"
_ANSWER_MAX_BYTES: Final = 8192
_NUMBER: Final = struct.Struct("<I")
# struct ucred (unix(7)): process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")


class Visit(Closing):
    """What a process has said: the number of its rank (-1: no number), and the programs that it passed."""

    def __init__(self, visitor: socket.socket) -> None:
        self._visitor = visitor
        self.number, self.descriptors = -1, list[int]()
        with contextlib.suppress(OSError):  # it has gone
            said, self.descriptors, _, _ = socket.recv_fds(visitor, _NUMBER.size, 1)
            if len(said) == _NUMBER.size:
                (self.number,) = _NUMBER.unpack(said)

    def accept(self) -> None:
        self._answer(_DONE)

    def refuse(self, reason: str) -> None:
        self._answer(_REFUSED + reason.encode()[: _ANSWER_MAX_BYTES - len(_REFUSED)])

    def _answer(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone, which its run will say
            self._visitor.send(text)

    def close(self) -> None:
        self._visitor.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Reception(Closing):
    """Where the other ranks of an interface find the one that leads them: a socket of this network namespace.

    The kernel chooses its name, and the ranks tell each other. Nobody else could have taken that name before, as they
    could a name that is known. All visitors are heard at once, so nobody waits for a silent one.
    """

    def __init__(self) -> None:
        """Raises OSError if there is no socket to be had."""
        # (`select` knows no descriptor above 1023.)
        self._waiting = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind("")
            self._listener.listen(socket.SOMAXCONN)
            self._waiting.register(self._listener, selectors.EVENT_READ, self._listener)
        except BaseException:
            self.close()
            raise
        self.name: str = self._listener.getsockname()[1:].decode("ascii")
        """The abstract name, without the zero in front."""

    def next(self, deadline_s: float) -> Visit | None:
        """The next visitor that says something; None after the deadline."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._waiting.select(left_s):
                if key.data is not self._listener:
                    self._waiting.unregister(key.data)
                    return Visit(key.data)
                self._accept()
        return None

    def refuse(self, ranks: Set[int], reason: str, deadline_s: float) -> None:
        """Tells these ranks, as they come, why there is nothing to share."""
        missing = set(ranks)
        while missing and (visit := self.next(deadline_s)):
            with visit:
                visit.refuse(reason)
                missing.discard(visit.number)

    def _accept(self) -> None:
        """Lets the next process in, if it is of this user."""
        visitor, _ = self._listener.accept()
        _, user = _peer(visitor)
        if user == os.geteuid():
            visitor.setblocking(False)
            self._waiting.register(visitor, selectors.EVENT_READ, visitor)
        else:
            visitor.close()

    def close(self) -> None:
        for waiting in (self._listener, *(key.data for key in (self._waiting.get_map() or {}).values())):
            waiting.close()
        self._waiting.close()


def lead(
    reception: Reception,
    program_descriptor: int,
    interface: str,
    ranks: Sequence[int],
    *,
    first_port: int,
    fragments: bool = False,
    timeout_s: float,
) -> Dispatcher:
    """Serves the other ranks at the interface, as its first rank. Returns when all have passed their programs.

    Raises TargetUnavailable if one has not by the deadline, or BpfError. Ranks that come then hear why.
    """
    deadline_s = time.monotonic() + timeout_s
    missing = set(ranks[1:])
    try:
        dispatcher = Dispatcher(first_port=first_port, receivers=ranks[-1] + 1, fragments=fragments)
        try:
            dispatcher.add(ranks[0], program_descriptor)
            dispatcher.attach(interface)
            while missing:
                visit = reception.next(deadline_s)
                if visit is None:
                    raise TargetUnavailable(
                        f"xdp: local ranks {sorted(missing)} did not come to share {interface} within {timeout_s:g} s"
                    )
                with visit:
                    if visit.number in missing and visit.descriptors:
                        missing.discard(visit.number)
                        try:
                            dispatcher.add(visit.number, visit.descriptors[0])
                        except BpfError as error:
                            visit.refuse(str(error))
                            raise
                        visit.accept()
        except BaseException:
            dispatcher.close()
            raise
    except Exception as error:
        reception.refuse(missing, str(error), min(deadline_s, time.monotonic() + FAREWELL_S))
        raise
    return dispatcher


def follow(name: str, program_descriptor: int, interface: str, number: int, *, timeout_s: float) -> None:
    """Passes this rank's program to the first rank, whose reception has this name.

    Raises TargetUnavailable if that does not answer in time or has ended, if it is a process of another user, or with
    its reason if it failed.
    """
    deadline_s = time.monotonic() + timeout_s
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        try:
            visitor.settimeout(timeout_s)
            visitor.connect(f"\0{name}")
            process, user = _peer(visitor)
            if user != os.geteuid():
                # The program is a right to the packets of this rank.
                raise TargetUnavailable(
                    f"xdp: at {interface}, process {process} of user {user} has the socket of the rank that leads; "
                    f"allowed: user {os.geteuid()}, for all ranks of a machine"
                )
            socket.send_fds(visitor, [_NUMBER.pack(number)], [program_descriptor])
            visitor.settimeout(max(0.001, deadline_s - time.monotonic()))
            answer = visitor.recv(_ANSWER_MAX_BYTES)
        except TimeoutError:
            raise TargetUnavailable(
                f"xdp: no rank shares {interface} with local rank {number} within {timeout_s:g} s"
            ) from None
        except OSError:
            pass  # nobody is there any more
    if answer == _DONE:
        return
    reason = answer.removeprefix(_REFUSED).decode(errors="replace") or "it ended before it took the program"
    raise TargetUnavailable(f"xdp: the rank that leads {interface} failed: {reason}")


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as they were when it listened or connected (unix(7))."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return process, user
