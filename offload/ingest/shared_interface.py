# SPDX-License-Identifier: Apache-2.0
"""Shares one interface, which takes one XDP program, among several ranks of a machine.

The first rank attaches a dispatcher (ebpf/programs/dispatch.bpf.c). The other processes pass their programs to it as
descriptors over a Unix socket with an abstract name, which only this network namespace sees (unix(7)).
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
from sennit.offload.dispatcher import Dispatcher
from sennit.offload.errors import TargetUnavailable

RETRY_S: Final = 0.02
# How long a leader that fails waits for the others, to tell them why.
FAREWELL_S: Final = 5.0
_DONE: Final = b"+"
# Stands before the reason in a refusal.
_REFUSED: Final = b"-"
_ANSWER_MAX_BYTES: Final = 8192
_NUMBER: Final = struct.Struct("<I")
# struct ucred (unix(7)): process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")


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

    Raises TargetUnavailable if one has not by the deadline, or BpfError. Ranks that come then hear why.
    """
    deadline_s = time.monotonic() + timeout_s
    missing = set(ranks[1:])
    with _Reception(_name(session, interface)) as reception:
        try:
            dispatcher = Dispatcher(first_port=first_port, receivers=ranks[-1] + 1, fragments=fragments)
            try:
                dispatcher.add(ranks[0], program_descriptor)
                dispatcher.attach(interface)
                while missing:
                    visit = reception.next(deadline_s)
                    if visit is None:
                        raise TargetUnavailable(
                            f"xdp: local ranks {sorted(missing)} did not come to share {interface} "
                            f"within {timeout_s:g} s"
                        )
                    with visit:
                        if visit.number in missing and visit.descriptors:
                            dispatcher.add(visit.number, visit.descriptors[0])
                            missing.discard(visit.number)
                            visit.answer(_DONE)
            except BaseException:
                dispatcher.close()
                raise
        except Exception as error:
            reception.refuse(missing, str(error), min(deadline_s, time.monotonic() + FAREWELL_S))
            raise
    return dispatcher


def follow(program_descriptor: int, interface: str, number: int, *, session: int, timeout_s: float) -> None:
    """Passes this rank's program to the first rank.

    Raises TargetUnavailable if that does not answer in time, or with its reason if it failed.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor, contextlib.suppress(OSError):
            visitor.settimeout(max(0.001, deadline_s - time.monotonic()))
            visitor.connect(_name(session, interface))
            socket.send_fds(visitor, [_NUMBER.pack(number)], [program_descriptor])
            answer = visitor.recv(_ANSWER_MAX_BYTES)
        if answer == _DONE:
            return
        if answer.startswith(_REFUSED):
            reason = answer.removeprefix(_REFUSED).decode(errors="replace")
            raise TargetUnavailable(f"xdp: the rank that leads {interface} failed: {reason}")
        if time.monotonic() + RETRY_S >= deadline_s:
            raise TargetUnavailable(f"xdp: no rank shares {interface} with local rank {number} within {timeout_s:g} s")
        time.sleep(RETRY_S)


class _Visit(Closing):
    """What a process has said: the number of its rank (-1: no number), and the programs that it passed."""

    def __init__(self, visitor: socket.socket) -> None:
        self._visitor = visitor
        self.number, self.descriptors = -1, list[int]()
        with contextlib.suppress(OSError):  # it has gone
            said, self.descriptors, _, _ = socket.recv_fds(visitor, _NUMBER.size, 1)
            if len(said) == _NUMBER.size:
                (self.number,) = _NUMBER.unpack(said)

    def answer(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone, which its run will say
            self._visitor.send(text)

    def close(self) -> None:
        self._visitor.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class _Reception(Closing):
    """The socket that the other ranks connect to. All are heard at once, so that nobody waits for a silent one."""

    def __init__(self, name: str) -> None:
        # (`select` knows no descriptor above 1023.)
        self._waiting = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(name)
            self._listener.listen(socket.SOMAXCONN)
            self._waiting.register(self._listener, selectors.EVENT_READ, self._listener)
        except BaseException:
            self.close()
            raise

    def next(self, deadline_s: float) -> _Visit | None:
        """The next visitor that says something; None after the deadline."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._waiting.select(left_s):
                if key.data is not self._listener:
                    self._waiting.unregister(key.data)
                    return _Visit(key.data)
                self._accept()
        return None

    def refuse(self, ranks: Set[int], reason: str, deadline_s: float) -> None:
        """Tells these ranks, as they come, why there is nothing to share."""
        missing = set(ranks)
        answer = _REFUSED + reason.encode()[: _ANSWER_MAX_BYTES - len(_REFUSED)]
        while missing and (visit := self.next(deadline_s)):
            with visit:
                visit.answer(answer)
                missing.discard(visit.number)

    def _accept(self) -> None:
        """Lets the next process in, if it is of this user."""
        visitor, _ = self._listener.accept()
        _, user, _ = _CREDENTIALS.unpack(visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user == os.geteuid():
            visitor.setblocking(False)
            self._waiting.register(visitor, selectors.EVENT_READ, visitor)
        else:
            visitor.close()

    def close(self) -> None:
        for waiting in (self._listener, *(key.data for key in self._waiting.get_map().values())):
            waiting.close()
        self._waiting.close()


def _name(session: int, interface: str) -> str:
    return f"\0sennit-ingest-{session:08x}-{interface}"
