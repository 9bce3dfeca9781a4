# SPDX-License-Identifier: Apache-2.0
"""A key-value store for two machines over one TCP connection, for `sennit doctor --peer`.

Each line is one JSON object. The machine that listens keeps the keys; the other one asks.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from sennit.closing import Closing
from sennit.transport.errors import ConfigError, DeviceError, PeerError, TimeoutError

LINE_MAX_BYTES: Final = 1 << 20
POLL_S: Final = 0.005
ANSWER_S: Final = 30.0


class LocalStore:
    """The keys themselves, for the rank on this machine."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str, /) -> bytes:
        with self._lock:
            return self._values[key].encode()

    def check(self, keys: Sequence[str], /) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            total = int(self._values.get(key, "0")) + amount
            self._values[key] = str(total)
            return total

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._lock:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values.get(key, "").encode()

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        _wait(self.check, keys, timeout)


class RemoteStore(Closing):
    """The other machine's keys."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_S)
        self._connection = connection
        self._stream = connection.makefile("rwb")
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        self._ask("set", key, value)

    def get(self, key: str, /) -> bytes:
        return str(self._ask("get", key)).encode()

    def check(self, keys: Sequence[str], /) -> bool:
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int, /) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return str(self._ask("compare_set", key, expected, desired)).encode()

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        _wait(self.check, keys, timeout)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads what is still to be sent
            self._stream.close()
        self._connection.close()

    def _ask(self, call: str, *arguments: Any) -> Any:
        with self._lock:
            self._stream.write(json.dumps([call, *arguments]).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline(LINE_MAX_BYTES)
        if not line:
            raise PeerError("the other machine's doctor has ended; start it again there")
        return json.loads(line)


def listen(port: int) -> socket.socket:
    """A socket that accepts IPv4 and, if the machine has it, IPv6."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise DeviceError(
            f"cannot listen at TCP port {port}; choose another one on both machines (--port)", error.errno
        ) from error


def accept(server: socket.socket, timeout_s: float) -> tuple[LocalStore, str]:
    """Waits for the other machine, and answers its requests from then on.

    Returns the store, and the other machine's address.
    """
    server.settimeout(timeout_s)
    try:
        connection, address = server.accept()
    except builtins.TimeoutError as error:
        raise TimeoutError(
            f"no other machine came within {timeout_s:g} s; run sennit doctor --peer HOST on it"
        ) from error
    store = LocalStore()
    threading.Thread(target=_serve, args=(connection, store), name="pair-store", daemon=True).start()
    return store, str(address[0]).removeprefix("::ffff:")


def connect(host: str, port: int, timeout_s: float) -> RemoteStore:
    """Raises ConfigError for a name without an address, DeviceError if nobody answers."""
    try:
        return RemoteStore(socket.create_connection((host, port), timeout_s))
    except socket.gaierror as error:
        raise ConfigError(
            f"{host} has no address: {error.strerror}; give an address, or a name that this machine resolves"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"cannot reach {host} at TCP port {port} ({error.strerror or error}). Run 'sennit doctor --listen' there "
            "first, and open this TCP port in firewalls, or choose another one on both machines (--port)",
            error.errno,
        ) from error


def _serve(connection: socket.socket, store: LocalStore) -> None:
    with connection, connection.makefile("rwb") as stream:
        try:
            while line := stream.readline(LINE_MAX_BYTES):
                call, *arguments = json.loads(line)
                if call not in ("set", "get", "check", "add", "compare_set"):
                    return
                answer = getattr(store, call)(*arguments)
                text = answer.decode() if isinstance(answer, bytes) else answer
                stream.write(json.dumps(text).encode() + b"\n")
                stream.flush()
        except (OSError, ValueError, TypeError, KeyError):  # it has gone, or does not run the doctor
            return


def _wait(check: Callable[[Sequence[str]], bool], keys: Sequence[str], timeout: timedelta) -> None:
    deadline_s = time.monotonic() + timeout.total_seconds()
    while not check(keys):
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{list(keys)} did not come within {timeout.total_seconds():g} s")
        time.sleep(POLL_S)
