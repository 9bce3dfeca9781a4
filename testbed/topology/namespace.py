# SPDX-License-Identifier: Apache-2.0
"""Network namespaces by name, and running a function inside one.

A name is bound below /run/netns, where `ip netns` finds it too. It contains the process that made it, so the next
process recognises and removes what a killed one left behind. `ip netns exec` would also remount /sys and hide bpffs;
entering with setns(2), or `nsenter --net`, leaves the file systems alone. pyroute2's `netns.create` would move this
process into the namespace, and make /run/netns a shared mount of the machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

FOLDER: Final = Path("/run/netns")
MOUNTS: Final = Path("/proc/self/mountinfo")
# linux/sched.h, linux/mount.h, umount(2)
CLONE_NEWNET: Final = 0x40000000
MS_BIND: Final = 0x1000
MNT_DETACH: Final = 2
ENTER_TIMEOUT_S: Final = 60.0

_NAME = re.compile(r"sennit-(?P<pid>\d+)-(?P<started>\d+)-")
_libc = ctypes.CDLL(None, use_errno=True)
Result = TypeVar("Result")


def unique_prefix(serial: int) -> str:
    """A prefix that no other process uses: the process number and its start time, because numbers are reused."""
    return f"sennit-{os.getpid()}-{_start_ticks(os.getpid())}-{serial}"


def path_of(name: str) -> Path:
    return FOLDER / name


def create(name: str) -> None:
    """Makes an empty namespace whose loopback is down."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = path_of(name)
    path.touch(exist_ok=False)

    def unshare_and_bind() -> None:
        _check(_libc.unshare(CLONE_NEWNET), "unshare(CLONE_NEWNET)")
        source = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        _check(_libc.mount(source.encode(), os.fsencode(path), b"none", MS_BIND, None), f"bind {path}")

    try:
        # unshare(2) affects the thread, which ends here. The bind mount keeps the namespace.
        _in_thread(unshare_and_bind)
    except BaseException:
        path.unlink()
        raise


def remove(name: str) -> None:
    """Removes the name. The namespace ends with its last process and socket. A missing name is no error."""
    path = path_of(name)
    _libc.umount2(os.fsencode(path), MNT_DETACH)
    path.unlink(missing_ok=True)


def remove_stale() -> list[str]:
    """Removes what dead processes left behind, and returns its names."""
    removed = []
    for path in sorted(FOLDER.glob("sennit-*")):
        match = _NAME.match(path.name)
        if match and _start_ticks(int(match["pid"])) != int(match["started"]):
            remove(path.name)
            removed.append(path.name)
    return removed


def processes_in(names: Iterable[str]) -> list[int]:
    """Processes inside these namespaces, by the namespace of their main threads. This process is not among them."""
    inodes = {path_of(name).stat().st_ino for name in names}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns" / "net").stat().st_ino in inodes and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # The process has ended, or is hidden.
            continue
    return found


def enter(name: str) -> None:
    """Moves the calling thread, and the threads that it starts from now on, into the namespace."""
    descriptor = os.open(path_of(name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, CLONE_NEWNET), f"setns({name})", lambda: _why_refused(name, descriptor))
    finally:
        os.close(descriptor)


def _why_refused(name: str, descriptor: int) -> str:
    """What setns(2) does not say: that the descriptor is of no namespace, and what is at the name now."""
    if os.fstat(descriptor).st_dev == os.stat("/proc/self/ns/net").st_dev:
        return ""
    is_bound = any(line.split()[4] == str(path_of(name)) for line in MOUNTS.read_text(encoding="utf-8").splitlines())
    now = "is bound there now" if is_bound else "is not bound there" if path_of(name).exists() else "is gone"
    opened = os.readlink(f"/proc/self/fd/{descriptor}")
    return f"; what process {os.getpid()} opened is {opened}; the namespace {now}"


def within(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns the result of `function`, called by a thread inside the namespace. Sockets that it makes stay inside."""

    def call() -> Result:
        enter(name)
        return function(*arguments)

    return _in_thread(call)


def _in_thread(function: Callable[[], Result]) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="netns", daemon=True)
    thread.start()
    thread.join(ENTER_TIMEOUT_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{function} did not return within {ENTER_TIMEOUT_S:.0f} s")
    return results[0]


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), field 22 of stat); 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The command name, in parentheses, may contain anything.
    return int(text.rpartition(")")[2].split()[19])


def _check(result: int, what: str, why: Callable[[], str] = str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}{why()}")
