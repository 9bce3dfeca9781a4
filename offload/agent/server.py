# SPDX-License-Identifier: Apache-2.0
"""The agent's socket: who may ask is heard, each by a thread of its own, and has a program until the connection ends.

A slow or silent peer keeps nobody waiting but itself. The number of its connections is bounded, and so is the time of
its request.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sennit.closing import Closing
from sennit.errors import ConfigError, SennitError
from sennit.offload.agent.errors import AgentError
from sennit.offload.agent.peer import Peer
from sennit.offload.agent.permissions import Grant, Permissions
from sennit.offload.agent.programs import Loaded, Programs
from sennit.offload.agent.protocol import (
    LINE_MAX_BYTES,
    CheckRequest,
    LeaseRequest,
    TermsRequest,
    decode_request,
    encode,
)
from sennit.thread_names import name_thread

# A whole request must come, and an answer must leave, within this.
REQUEST_S: Final = 10.0
# How often the agent looks whether a program is still at its interface.
LOOK_S: Final = 1.0
CONNECTIONS_MAX: Final = 512
# Connections of a user beyond those that have programs.
SPARE: Final = 4
PAUSE_S: Final = 0.1
CHUNK_BYTES: Final = 1 << 16
# The end of a long error, as of a verifier, says most.
ERROR_MAX: Final = 4000


class Agent(Closing):
    """Serves until `stop`. Closing it detaches all programs, and so does the end of the process."""

    def __init__(self, permissions: Permissions, path: Path, say: Callable[[str], None] = lambda text: None) -> None:
        """`say` is told, in one line, who got or lost a program, and who was refused. Raises ConfigError."""
        self._permissions, self.path, self._say = permissions, path, say
        self._programs = Programs(permissions)
        self._connections: Counter[int] = Counter()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._listener = listen(path)
        self._ends, self._wake = socket.socketpair()

    def run(self) -> None:
        """Hears peers until `stop`."""
        with self._running:
            while self._ends not in _ready([self._listener, self._ends]):
                try:
                    self._admit(self._listener.accept()[0])
                except OSError:  # the peer is gone again, or no descriptors are left until another one goes
                    _ready([self._ends], PAUSE_S)

    def stop(self) -> None:
        """Ends `run`, and all connections. Safe in a handler of signals, and in another thread."""
        with contextlib.suppress(OSError):
            self._wake.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.stop()
        with self._running, self._lock:
            waiting = list(self._threads)
        for thread in waiting:
            thread.join()
        self._programs.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        for end in (self._listener, self._ends, self._wake):
            end.close()

    def _admit(self, connection: socket.socket) -> None:
        """Starts a thread for a peer that may ask and has not too many."""
        connection.settimeout(REQUEST_S)
        try:
            peer = Peer.of(connection)
        except OSError as error:
            self._say(f"refused: a peer that cannot be told: {error.strerror}")
            connection.close()
            return
        grants = self._permissions.of(peer.user, peer.groups)
        with self._lock:
            count, total = self._connections[peer.user], self._connections.total()
            most = SPARE + max((grant.leases for grant in grants), default=0)
            refusal = ""
            if not grants:
                refusal = f"user {peer.user} may have no program; the agent's file says who may"
            elif count >= most or total >= CONNECTIONS_MAX:
                refusal = f"{count} connections of user {peer.user}; allowed: {most}, {CONNECTIONS_MAX} of all users"
            else:
                self._connections[peer.user] += 1
                thread = threading.Thread(
                    target=self._serve, args=(connection, peer, grants), name="sennit-agent", daemon=True
                )
                self._threads.add(thread)
                thread.start()
        if refusal:
            self._say(f"refused: {refusal}")
            with connection, peer, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(encode({"error": refusal}))

    def _serve(self, connection: socket.socket, peer: Peer, grants: Sequence[Grant]) -> None:
        """A connection, from the request to its end."""
        name_thread("sennit-agent")
        try:
            with connection, peer, contextlib.suppress(OSError):
                try:
                    self._answer(connection, peer, grants)
                except (SennitError, ArithmeticError, MemoryError, RecursionError) as error:
                    text = str(error) or type(error).__name__
                    self._say(f"user {peer.user}, process {peer.process}: refused: {text.splitlines()[0]}")
                    connection.sendall(encode({"error": text[-ERROR_MAX:]}))
        finally:
            with self._lock:
                self._connections[peer.user] -= 1
                self._threads.discard(threading.current_thread())

    def _answer(self, connection: socket.socket, peer: Peer, grants: Sequence[Grant]) -> None:
        line, sent = self._request(connection)
        with contextlib.ExitStack() as stack:
            for descriptor in sent:
                stack.callback(os.close, descriptor)
            request = decode_request(line)
            if isinstance(request, TermsRequest):
                connection.sendall(encode({"grants": [_shown(grant) for grant in grants]}))
            elif isinstance(request, CheckRequest):
                self._programs.check(grants, request.interface, request.port)
                connection.sendall(encode({}))
            else:
                self._lease(connection, peer, grants, request, stack.enter_context(_socket_of(sent)))

    def _lease(
        self,
        connection: socket.socket,
        peer: Peer,
        grants: Sequence[Grant],
        request: LeaseRequest,
        bound: socket.socket,
    ) -> None:
        """`bound` stays open with the program, so the port is nobody else's meanwhile."""
        who = f"user {peer.user}, process {peer.process}: {request.interface} port {request.port}"
        with self._programs.load(request, grants, peer.user, bound) as loaded:
            told = encode({"arena_bytes": loaded.memory_bytes})
            socket.send_fds(connection, [told], loaded.descriptors)
            self._say(f"{who}: attached")
            why = self._watch(connection, peer, loaded)
        self._say(f"{who}: detached: {why or 'the trainer closed it'}")
        if why:
            connection.sendall(encode({"error": why}))

    def _watch(self, connection: socket.socket, peer: Peer, loaded: Loaded) -> str:
        """Waits for the end of a lease. Returns why it ends, for the trainer; empty if the trainer wants it so."""
        while True:
            ready = _ready([connection, self._ends, peer.end], LOOK_S)
            if connection in ready:
                return "a trainer says nothing after its request" if connection.recv(1) else ""
            if peer.end in ready:
                return "the process that asked has ended"
            if self._ends in ready:
                return "the agent ends"
            if not loaded.is_attached:
                return f"{loaded.interface} has gone, or somebody detached the program there"

    def _request(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        """The first line, and at most one descriptor. Raises AgentError, or OSError if the peer has gone."""
        line, sent = bytearray(), list[int]()
        deadline_s = time.monotonic() + REQUEST_S
        try:
            while True:
                ready = _ready([connection, self._ends], max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise AgentError(f"no whole request within {REQUEST_S:g} s")
                if self._ends in ready:
                    raise AgentError("the agent ends")
                chunk, descriptors, _, _ = socket.recv_fds(connection, CHUNK_BYTES, 1)
                sent += descriptors
                line += chunk
                if not chunk:
                    raise ConnectionResetError
                if len(sent) > 1 or len(line) > LINE_MAX_BYTES:
                    raise AgentError(f"allowed: a line of at most {LINE_MAX_BYTES} bytes, and one socket with it")
                if chunk.endswith(b"\n"):
                    return bytes(line[:-1]), sent
        except BaseException:
            for descriptor in sent:
                os.close(descriptor)
            raise


def _ready(waited: Sequence[socket.socket | int], timeout_s: float | None = None) -> list[socket.socket | int]:
    """Those of `waited` that can be read, or whose other end has gone. `select` knows no descriptor above 1023."""
    poll = select.poll()
    by_number = {one if isinstance(one, int) else one.fileno(): one for one in waited}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)]


@contextlib.contextmanager
def _socket_of(sent: list[int]) -> Iterator[socket.socket]:
    if not sent:
        raise AgentError("no socket came along; allowed: one of UDP, at the interface's address and the port")
    own = os.dup(sent[0])
    try:
        bound = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise AgentError("what came along is no socket; allowed: one of UDP") from None
    with bound:
        yield bound


def _shown(grant: Grant) -> dict[str, Any]:
    return {
        "interfaces": sorted(grant.interfaces),
        "ports": [grant.ports[0], grant.ports[-1]],
        "leases": grant.leases,
        "memory_mib": grant.memory_mib,
    }


def listen(path: Path) -> socket.socket:
    """A socket that every user may connect to: credentials decide, not the file. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(path)
        listener.bind(os.fspath(path))
        path.chmod(0o666)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Removes what an agent left that was killed."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is there, and is no socket; allowed: a path for a new one")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(REQUEST_S)
        try:
            tried.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"{path}: another agent serves there")
