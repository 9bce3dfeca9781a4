# SPDX-License-Identifier: Apache-2.0
"""The trainer's side: a receiver whose program the agent has loaded. It needs no right, and no compiler."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from sennit.ebpf.arena import Arena
from sennit.ebpf.kernel_features import missing_privileges
from sennit.ebpf.maps import BpfMap
from sennit.offload.admission import Verdict
from sennit.offload.agent.errors import AgentError
from sennit.offload.agent.protocol import CheckRequest, LeaseRequest, Request, TermsRequest, decode, encode_request
from sennit.offload.arena_receiver import ArenaReceiver
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.interfaces import interface_address
from sennit.offload.sketch import DEFAULT_SHAPE, SketchShape

VARIABLE: Final = "SENNIT_AGENT"
SOCKET: Final = Path("/run/sennit/agent.sock")
ANSWER_MAX_BYTES: Final = 1 << 16
ASK_S: Final = 10.0
# How long the agent may take to detach a program.
CLOSE_S: Final = 10.0
# uapi/linux/bpf.h
_BPF_MAP_TYPE_PERCPU_ARRAY: Final = 6
# struct feed_counters of ebpf/include/feed.h
_COUNTERS: Final = np.dtype(
    [*((verdict.name.lower(), np.uint64) for verdict in Verdict)]
    + [(name, np.uint64) for name in ("records", "filtered", "body_bytes")]
)


def agent_socket() -> Path | None:
    """The agent that this process takes: what SENNIT_AGENT says, or else the usual one if this process lacks rights.

    An empty variable stands for none.
    """
    told = os.environ.get(VARIABLE)
    if told is not None:
        return Path(told) if told else None
    return SOCKET if SOCKET.exists() and missing_privileges() else None


def terms(path: Path) -> list[dict[str, Any]]:
    """What this user may have, as the agent says it. Raises TargetUnavailable."""
    with _connected(path, ASK_S) as connection:
        answer, _ = _asked(connection, path, TermsRequest(), [], ASK_S)
    found = answer.get("grants")
    return found if isinstance(found, list) else []


def check(path: Path, interface: str, port: int) -> None:
    """Raises TargetUnavailable if the agent would refuse a program there."""
    with _connected(path, ASK_S) as connection:
        _asked(connection, path, CheckRequest(interface=interface, port=port), [], ASK_S)


class LeasedReceiver(ArenaReceiver):
    """Receives the records of one session with a program of the agent's, at an interface and a UDP port.

    The program is there until `close`, or until this process ends.
    """

    def __init__(
        self,
        layout: BatchLayout,
        *,
        session: int,
        interface: str,
        udp_port: int,
        address: str | None = None,
        agent: Path = SOCKET,
        sketch: SketchShape | None = DEFAULT_SHAPE,
        timeout_s: float = 60.0,
    ) -> None:
        """`address`: where the records are sent to; None: the one of `interfaces.interface_address`.

        Raises TargetUnavailable with the agent's reason, TargetError, PlanError, or OSError if the port is taken.
        """
        super().__init__(layout, session=session, udp_port=udp_port, sketch=sketch)
        self.interface, self._agent = interface, agent
        self._arena = Arena("ring", self.arena_bytes)
        self._counters_descriptor = -1
        self._connection: socket.socket | None = None
        self._bound = bound_socket(interface_address(interface) if address is None else address, udp_port)
        try:
            self._connection = _connected(agent, timeout_s)
            request = LeaseRequest(
                interface=interface,
                port=udp_port,
                session=session,
                address=self._arena.address,
                layout=layout,
                sketch=sketch,
            )
            _, descriptors = _asked(self._connection, agent, request, [self._bound.fileno()], timeout_s)
            self._take(descriptors)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises TargetUnavailable if the agent has ended, or says that the program is no more at its interface."""
        if self._connection is None:
            return
        self._connection.setblocking(False)
        try:
            said = self._connection.recv(ANSWER_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise TargetUnavailable(f"xdp: the agent at {self._agent}: {error.strerror}") from None
        raise TargetUnavailable(f"xdp: the agent at {self._agent}: {_reason(said) or 'has ended'}")

    def close(self) -> None:
        """Waits until the program is detached. Batches are views of the arena, so they become invalid here."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CLOSE_S)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(ANSWER_MAX_BYTES):
                    pass
        self._bound.close()
        descriptor, self._counters_descriptor = self._counters_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._arena.close()

    def _take(self, descriptors: list[int]) -> None:
        if len(descriptors) != 2:
            for descriptor in descriptors:
                os.close(descriptor)
            raise TargetUnavailable(f"xdp: the agent at {self._agent} gave no memory; is it one?")
        memory, self._counters_descriptor = descriptors
        try:
            self._arena.map(memory)
        finally:
            os.close(memory)
        counters = BpfMap(
            name="counters",
            kind=_BPF_MAP_TYPE_PERCPU_ARRAY,
            entries=1,
            key_bytes=4,
            value_bytes=_COUNTERS.itemsize,
            flags=0,
            descriptor=self._counters_descriptor,
            dtype=_COUNTERS,
        )
        self.take_over(self._arena.memory, counters)


def bound_socket(address: str, port: int) -> socket.socket:
    """A socket that nobody reads. It shows the agent that the kernel gives this user the port."""
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        raise TargetUnavailable(f"xdp: UDP port {port} of {address}: {error.strerror}") from error
    return bound


def _connected(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise TargetUnavailable(
            f"xdp: no agent at {path}: {error.strerror or error}; start sennit agent, or set {VARIABLE}"
        ) from None
    return connection


def _asked(
    connection: socket.socket, path: Path, request: Request, descriptors: list[int], timeout_s: float
) -> tuple[dict[str, Any], list[int]]:
    """The answer, and the descriptors that come with it."""
    deadline_s = time.monotonic() + timeout_s
    told, line, found = encode_request(request), bytearray(), list[int]()
    try:
        sent = socket.send_fds(connection, [told], descriptors) if descriptors else 0
        connection.sendall(told[sent:])
        while not line.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            chunk, came, _, _ = socket.recv_fds(connection, ANSWER_MAX_BYTES, 2)
            line, found = line + chunk, found + came
            if not chunk or len(line) > ANSWER_MAX_BYTES:
                raise TargetUnavailable(f"xdp: the agent at {path} ended without an answer")
        answer = decode(bytes(line))
        if "error" in answer:
            raise TargetUnavailable(f"xdp: the agent at {path}: {answer['error']}")
    except BaseException as error:
        for descriptor in found:
            os.close(descriptor)
        # An agent that refuses does so at once, while a long request may still be on its way.
        if isinstance(error, BrokenPipeError | ConnectionResetError):
            with contextlib.suppress(OSError):
                if reason := _reason(connection.recv(ANSWER_MAX_BYTES)):
                    raise TargetUnavailable(f"xdp: the agent at {path}: {reason}") from None
        if isinstance(error, OSError | AgentError):
            what = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise TargetUnavailable(f"xdp: the agent at {path}: {what}") from None
        raise
    return answer, found


def _reason(said: bytes) -> str:
    try:
        return str(decode(said).get("error", "")) if said else ""
    except AgentError:
        return ""
