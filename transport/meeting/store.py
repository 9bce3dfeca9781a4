# SPDX-License-Identifier: Apache-2.0
"""The key-value store that rendezvous needs, and a small store over a shared folder.

Any `torch.distributed` store fits `Store`, also one that a program writes in Python: `set`, `get`, `wait`, `check` and
`add` are enough for a group. Only elastic runs need `compare_set`. `FileStore` serves programs without torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

from sennit.transport.errors import DeviceError, PeerError, SennitError, TimeoutError, Unsupported

# The first and the longest pause between two looks at the folder or its lock.
POLL_FIRST_S: Final = 0.001
POLL_LAST_S: Final = 0.05
# A lock is held for writing one small file. A longer hold means a stopped process (SIGSTOP) or a dead file server.
LOCK_TIMEOUT_S: Final = 30.0

# Keys that one request asks for.
BATCH_COUNT: Final = 32

Result = TypeVar("Result")


class Store(Protocol):
    """The part of torch's Store that rendezvous uses. `wait` raises an error of any kind when its time is over."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int:
        """Adds to the number at `key`, which starts at 0. Returns the sum."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Sets `key` if its value is `expected` (empty: if it has no value). Returns the value afterwards."""
        ...


class CheckedStore:
    """A store whose failures are a PeerError with the reason. Stores may raise errors of any kind.

    Our own errors pass through unchanged. So do errors of `wait`, because only its caller knows whether time was over.
    """

    def __init__(self, store: Store, *, purpose: str, advice: str = "") -> None:
        """The message starts with `purpose` and ends with `advice`."""
        self._store = store
        self._purpose = purpose
        self._advice = advice
        # A store of torch says whether it has `multi_get`: its FileStore has not. One written in Python may not know
        # the question.
        self._has_batches = False
        with suppress(Exception):
            self._has_batches = bool(store.has_extended_api())  # type: ignore[attr-defined]

    def set(self, key: str, value: str, /) -> None:
        self._try(self._store.set, key, value)

    def get(self, key: str, /) -> bytes:
        """Reads a value that is there."""
        if self._has_batches:
            # `get` of a TCPStore is two requests: it waits for the key first. This sets nothing where there is a value.
            return self._try(self._store.compare_set, key, "", "")
        return self._try(self._store.get, key)

    def check(self, keys: list[str], /) -> bool:
        return self._try(self._store.check, keys)

    def add(self, key: str, amount: int, /) -> int:
        return self._try(self._store.add, key, amount)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        compare_set: Callable[..., bytes] = getattr(self._store, "compare_set", _missing)
        return self._try(compare_set, key, expected, desired, name="compare_set")

    def compare_or_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """`compare_set`. With a store that has none, two processes that do it at once may both succeed."""
        try:
            return self.compare_set(key, expected, desired)
        except Unsupported:
            current = self.get(key) if self.check([key]) else b""
            if current != expected.encode():
                return current
            self.set(key, desired)
            return desired.encode()

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Reads values that are there, in one request where the store can."""
        if self._has_batches and len(keys) > 1:
            return self._try(self._store.multi_get, keys)  # type: ignore[attr-defined]
        return [self.get(key) for key in keys]

    def get_those_there(self, keys: list[str], /) -> list[bytes | None]:
        """Reads the values that are there, some dozens in one request where the store can."""
        found: list[bytes | None] = []
        for first in range(0, len(keys), BATCH_COUNT):
            some = keys[first : first + BATCH_COUNT]
            if self.check(some):
                found += self.multi_get(some)
            else:
                found += [self.get(key) if self.check([key]) else None for key in some]
        return found

    def multi_set(self, values: Mapping[str, str], /) -> None:
        """Writes values, in one request where the store can."""
        if self._has_batches and len(values) > 1:
            self._try(self._store.multi_set, list(values), list(values.values()))  # type: ignore[attr-defined]
            return
        for key, value in values.items():
            self.set(key, value)

    def delete(self, keys: Iterable[str], /) -> None:
        """Forgets keys that nobody reads any more. A store without `delete_key` keeps them."""
        with suppress(Exception):
            for key in keys:
                self._store.delete_key(key)  # type: ignore[attr-defined]

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self._store.wait(keys, timeout)

    def _try(self, call: Callable[..., Result], *arguments: Any, name: str = "") -> Result:
        try:
            return call(*arguments)
        except SennitError:
            raise
        except Exception as error:
            if _names_missing(error):
                what = name or getattr(call, "__name__", str(call))
                raise Unsupported(self._purpose, f"the store has no {what}; allowed: stores that have it") from error
            raise PeerError(f"{self._purpose}: the store failed: {error}{self._advice}") from error


def _missing(*arguments: Any) -> Any:
    raise NotImplementedError


def _names_missing(error: Exception) -> bool:
    """Whether a store has no such method. torch's class says so by an error of its own, for a subclass in Python."""
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "not implemented" in text or "pure virtual" in text


class FileStore:
    """A store whose keys are files in `folder`, which all ranks see. Use a fresh folder for each run.

    `add` and `compare_set` raise TimeoutError if another process locks the folder for `lock_timeout_s`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._folder = Path(folder)
        self._lock_timeout_s = lock_timeout_s
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeviceError(
                f"cannot make the store's folder {self._folder} (give one that can be written)", error.errno
            ) from error

    def set(self, key: str, value: str, /) -> None:
        # The file is renamed into place, so that nobody reads half a value.
        temporary = self._folder / f".{os.urandom(8).hex()}"
        temporary.write_text(value, encoding="utf-8")
        temporary.replace(self._path(key))

    def get(self, key: str, /) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str], /) -> bool:
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._locked():
            total = (int(self.get(key)) if self.check([key]) else 0) + amount
            if amount:
                self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._locked():
            current = self.get(key) if self.check([key]) else b""
            if current != expected.encode():
                return current
            self.set(key, desired)
            return desired.encode()

    def delete_key(self, key: str, /) -> bool:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        if not _poll(lambda: self.check(keys), timeout.total_seconds()):
            raise TimeoutError(
                f"{list(keys)} not in {self._folder} after {timeout.total_seconds():g} s; see that all ranks are "
                "started with this folder"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one process in at a time. The kernel releases the lock of a process that dies."""
        path = self._folder / ".lock"
        with path.open("a") as lock:

            def take() -> bool:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            if not _poll(take, self._lock_timeout_s):
                raise TimeoutError(
                    f"another process has kept {path} locked for {self._lock_timeout_s:g} s; end it (fuser {path} "
                    "names it), or give this run a folder of its own"
                )
            yield

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


def _poll(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Waits for `is_done` and returns whether it came in time. Checks at least once."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = POLL_FIRST_S
    while not is_done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, POLL_LAST_S)
    return True
