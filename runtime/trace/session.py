# SPDX-License-Identifier: Apache-2.0
"""What sessions share: the rows of their tables, of which `since` subtracts what earlier tables had; and for those that
need bcc, its program on tracepoints of the core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

from sennit.ebpf.compiler import INCLUDE, PROGRAMS
from sennit.runtime.trace import kernel_headers
from sennit.runtime.trace.target import SessionError, Target


class Row(Protocol):
    """A dataclass of counts, or of mappings of counts, beside the fields that `KEY` and `LEVELS` name."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    KEY: ClassVar[tuple[str, ...]]
    """The fields that say which process, rank or path the row counts."""
    LEVELS: ClassVar[tuple[str, ...]]
    """The fields whose present value counts, and not a difference."""


RowType = TypeVar("RowType", bound=Row)


def since(before: Sequence[RowType], now: Sequence[RowType]) -> list[RowType]:
    """The rows of `now` with what they have counted since `before`."""
    known = {_key(row): row for row in before}
    return [_less(row, known[_key(row)]) if _key(row) in known else row for row in now]


def _key(row: Row) -> tuple[Any, ...]:
    return type(row), *(getattr(row, name) for name in row.KEY)


def _less(row: RowType, before: RowType) -> RowType:
    counts = [one.name for one in fields(row) if one.name not in (*row.KEY, *row.LEVELS)]
    return replace(row, **{name: _difference(getattr(row, name), getattr(before, name)) for name in counts})


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, Counter):
        return now - before
    if isinstance(now, dict):
        return {name: _difference(value, before[name]) if name in before else value for name, value in now.items()}
    return now - before


TRACEFS: Final = Path("/sys/kernel/tracing")
# sched.h, sys/mount.h
CLONE_NEWNS: Final = 0x20000
MS_REC_PRIVATE: Final = 0x4000 | 0x40000


def problem() -> str:
    """Why no bcc session can run on this machine, and what to do about it; empty if one can."""
    if os.geteuid() != 0:
        return "attaching to tracepoints needs root"
    try:
        import bcc  # noqa: F401
    except ImportError as error:
        return f"bcc: {error}: run 'apt-get install python3-bpfcc' (a venv needs --system-site-packages to see it)"
    if not kernel_headers.installed() and kernel_headers.find() is None:
        return "bcc finds no kernel headers: install those of the running kernel, or run 'sennit trace headers'"
    return ""


class BccProgram:
    """A program of bcc that runs."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def __getitem__(self, table: str) -> Any:
        return self._program[table.encode()]

    def uncounted(self) -> dict[str, int]:
        """Hits missing in the session's figures, by reason (uncounted.h)."""
        found = self["uncounted"]
        return {name: found.sum(number).value for number, name in enumerate(("map_full", "unmatched"))}


@contextlib.contextmanager
def open_bcc(name: str, probes: Sequence[str], target: Target) -> Iterator[BccProgram]:
    """`programs/<name>.bcc.c`, with each of its functions attached to the tracepoint of that name.

    Raises `SessionError`.
    """
    what = problem()
    if what:
        raise SessionError(what)
    if not kernel_headers.installed():
        os.environ[kernel_headers.VARIABLE] = os.fspath(kernel_headers.find() or "")
    _make_tracefs_visible()
    from bcc import BPF, USDT

    library = os.fspath(target.file)
    try:
        usdt = USDT(path=library) if target.process is None else USDT(path=library, pid=target.process)
        for probe in probes:
            usdt.enable_probe(probe=probe, fn_name=probe)
        text = (INCLUDE / "uncounted.h").read_bytes() + (PROGRAMS / f"{name}.bcc.c").read_bytes()
        program = BPF(text=text, usdt_contexts=[usdt], cflags=[f"-I{INCLUDE}"])
    except Exception as error:  # bcc raises this class itself
        raise SessionError(f"bcc: {error}; is {target.path} built with tracepoints, and in {target}?") from None
    try:
        yield BccProgram(program)
    finally:
        program.cleanup()


def _make_tracefs_visible() -> None:
    """bcc attaches through tracefs. If it is not mounted, it is mounted for this process and its children alone."""
    if (TRACEFS / "events").exists():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    tracefs, target = b"tracefs", os.fsencode(TRACEFS)
    if (
        libc.unshare(CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None) != 0
        or libc.mount(tracefs, target, tracefs, ctypes.c_ulong(0), None) != 0
    ):
        raise SessionError(f"{TRACEFS} cannot be mounted: {os.strerror(ctypes.get_errno())}")
