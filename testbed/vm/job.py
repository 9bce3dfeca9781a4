# SPDX-License-Identifier: Apache-2.0
"""The orders for the first process of a VM (guest/init.c), as records: a verb and its arguments, obeyed in order.

The host's root is mounted read-only below a tmpfs, so programs, checkout and packages have their usual paths. Whatever
the command writes is gone with the VM, except in the kept folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Record = tuple[str, ...]

# The largest share of the VM's memory for this tmpfs. The command has the rest.
OVERLAY_SIZE: Final = "75%"
# Links below /dev and their targets below /proc/self/fd: shells and programs expect them.
DESCRIPTOR_LINKS: Final = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file system of the host as the guest mounts it."""

    source: str
    type: str
    options: str


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Device nodes in the guest whose bytes go to the host."""

    output: str
    errors: str
    control: str


def records(
    *,
    root: Mount,
    kept: Mapping[Path, Mount],
    channels: Channels,
    modules: Sequence[str],
    setup: Iterable[Record],
    environment: Mapping[str, str],
    folder: Path,
    command: Sequence[str],
) -> list[Record]:
    """Returns the whole job, from an empty machine to the command in `folder`."""
    steps: list[Record] = []
    for path, kind in (("/proc", "proc"), ("/sys", "sysfs"), ("/dev", "devtmpfs")):
        steps += [("mkdir", path), ("mount", kind, path, kind, "", "")]
    steps += [("load", module) for module in modules]
    steps += [
        ("channels", channels.output, channels.errors, channels.control),
        *(("mkdir", path) for path in ("/lower", "/over", "/new")),
        ("mount", root.source, "/lower", root.type, "ro", root.options),
        ("mount", "tmpfs", "/over", "tmpfs", "", f"size={OVERLAY_SIZE}"),
        ("mkdir", "/over/upper"),
        ("mkdir", "/over/work"),
        ("mount", "overlay", "/new", "overlay", "", "lowerdir=/lower,upperdir=/over/upper,workdir=/over/work"),
    ]
    steps += [("mount", path, f"/new{path}", "", "move", "") for path in ("/proc", "/sys", "/dev")]
    steps += [
        ("enter", "/new"),
        ("mount", "tmpfs", "/run", "tmpfs", "", "mode=755"),
        ("mkdir", "/dev/shm"),
        ("mount", "tmpfs", "/dev/shm", "tmpfs", "", ""),
        ("mkdir", "/dev/pts"),
        ("mount", "devpts", "/dev/pts", "devpts", "", "mode=620,ptmxmode=666"),
        *(("link", f"/proc/self/fd{end}", f"/dev/{name}") for name, end in DESCRIPTOR_LINKS.items()),
        # A name that every host file resolves, because some programs look up their own.
        ("hostname", "localhost"),
        # Without this setting the kernel kills one program of its choice.
        ("write", "/proc/sys/vm/panic_on_oom", "1"),
    ]
    steps += [("mount", mount.source, str(path), mount.type, "keep", mount.options) for path, mount in kept.items()]
    steps += [("env", name, value) for name, value in environment.items()]
    return [*steps, *setup, ("command", str(folder), *command)]


def encode(steps: Iterable[Record]) -> bytes:
    """Encodes each record: the number of its strings, then the strings, all ended by a NUL."""
    parts: list[str] = []
    for record in steps:
        for text in record:
            if "\0" in text:
                raise ValueError(f"a NUL in {text!r} of the step {record[0]!r}")
        parts += [str(len(record)), *record]
    return b"".join(part.encode(errors="surrogateescape") + b"\0" for part in parts)
