# SPDX-License-Identifier: Apache-2.0
"""The two ways to run a guest: as the process of a User-Mode Linux, and as a PC that QEMU emulates."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit import debian
from sennit.testbed.vm import initramfs, stock_kernel, uml_kernel
from sennit.testbed.vm.job import Channels, Mount, Record
from sennit.testbed.vm.kernels import Kind

QEMU: Final = "qemu-system-x86_64"
QEMU_PROCESSORS: Final = 2
# Bytes of a message between guest and file server. The default of 8 KiB doubles the time of every start of Python.
P9_MESSAGE_BYTES: Final = 512_000
P9: Final = f"trans=virtio,version=9p2000.L,msize={P9_MESSAGE_BYTES}"
SHM: Final = Path("/dev/shm")
MEMINFO: Final = Path("/proc/meminfo")
MIB: Final = 1 << 20
MEMORY_DEFAULT_BYTES: Final = 4096 * MIB
MEMORY_MIN_BYTES: Final = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class Descriptors:
    """The host's ends of the guest's channels: file descriptors that the process of the VM inherits."""

    output: int
    errors: int
    control: int
    console: int


class Machine(ABC):
    """What differs between the two kinds of machine."""

    root: Mount
    channels: Channels
    setup: Sequence[Record] = ()
    """Additional steps of its guest."""
    tools: Sequence[tuple[str, str]] = ()
    """Programs that it needs, each with its package."""

    def __init__(self, kernel: Path) -> None:
        self.kernel = kernel

    @abstractmethod
    def command(
        self, *, initrd: Path, folder: Path, memory_bytes: int, descriptors: Descriptors, kept: Sequence[Path]
    ) -> list[str]:
        """Returns the command that starts the VM. `folder` is for its temporary files."""

    @abstractmethod
    def kept_mounts(self, kept: Sequence[Path]) -> dict[Path, Mount]:
        """How the guest mounts folders of the host to write to them."""

    @abstractmethod
    def default_memory_bytes(self) -> int:
        """Returns what a VM gets that asks for no amount."""

    def modules(self) -> list[initramfs.Entry]:
        """Files of kernel modules, in loading order."""
        return []

    def environment(self, memory_bytes: int) -> Mapping[str, str]:
        """Environment of the VM's own process."""
        del memory_bytes
        return os.environ

    def processors(self) -> set[int] | None:
        """Processors that the VM must stay on; None for all."""
        return None


class Uml(Machine):
    """The guest's kernel is a program. It sees the host's files through `hostfs`, with the rights of the user."""

    root = Mount(source="none", type="hostfs", options="/")
    channels = Channels(output="/dev/tty1", errors="/dev/tty2", control="/dev/tty3")
    # A process of the guest is a process of the host, in which every run of adjacent pages of the guest's memory is
    # a mapping. A process may have vm.max_map_count mappings, 65,530 by default. The kernel's lists of single free
    # pages (last in, first out) scatter pages. When these lists hold many megabytes, torch runs out of mappings. The
    # shortest possible lists make free pages join larger blocks (Documentation/admin-guide/sysctl/vm.rst).
    # A panic prints its registers, which name the function, at the level "info", which "quiet" keeps off the console.
    setup = (
        ("write", "/proc/sys/vm/percpu_pagelist_high_fraction", "1000000"),
        ("write", "/proc/sys/kernel/printk", "7"),
    )

    def command(
        self, *, initrd: Path, folder: Path, memory_bytes: int, descriptors: Descriptors, kept: Sequence[Path]
    ) -> list[str]:
        del kept
        consoles = (descriptors.console, descriptors.output, descriptors.errors, descriptors.control)
        return [
            str(self.kernel / uml_kernel.BINARY),
            f"mem={memory_bytes // MIB}M",
            f"initrd={initrd}",
            f"uml_dir={folder}",
            "quiet",
            "con=null",
            *(f"con{number}=null,fd:{descriptor}" for number, descriptor in enumerate(consoles)),
        ]

    def kept_mounts(self, kept: Sequence[Path]) -> dict[Path, Mount]:
        return {path: Mount(source="none", type="hostfs", options=str(path)) for path in kept}

    def default_memory_bytes(self) -> int:
        return _share(max(free_bytes for _, free_bytes, _ in _memory_folders()))

    def environment(self, memory_bytes: int) -> Mapping[str, str]:
        return {**os.environ, "TMPDIR": str(memory_folder(memory_bytes))}

    def processors(self) -> set[int] | None:
        """One processor. Kernel and programs of the guest take turns; on two processors each turn costs a migration."""
        usable = sorted(os.sched_getaffinity(0))
        return {usable[os.getpid() % len(usable)]}


class Qemu(Machine):
    """A PC emulated in software (TCG), because nested virtualisation is rarely available. Files come over 9p."""

    root = Mount(source="root", type="9p", options=f"{P9},cache=loose")
    channels = Channels(output="/dev/vport0p1", errors="/dev/vport0p2", control="/dev/vport0p3")
    tools = ((QEMU, "qemu-system-x86"),)

    def command(
        self, *, initrd: Path, folder: Path, memory_bytes: int, descriptors: Descriptors, kept: Sequence[Path]
    ) -> list[str]:
        del folder
        options = ["-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", str(QEMU_PROCESSORS)]
        options += ["-m", f"{memory_bytes // MIB}M", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        # The serial device comes first, because its ports carry its number among all virtio devices in their names.
        options += ["-device", "virtio-serial-pci", "-device", "virtio-rng-pci"]
        ports = (descriptors.output, descriptors.errors, descriptors.control)
        for number, descriptor in enumerate((descriptors.console, *ports)):
            options += ["-add-fd", f"fd={descriptor},set={number}"]
            options += ["-chardev", f"file,id=c{number},path=/dev/fdset/{number},append=on"]
        options += ["-serial", "chardev:c0"]
        for number in range(1, len(ports) + 1):
            options += ["-device", f"virtserialport,chardev=c{number},nr={number}"]
        shared = [(self.root.source, "/", ",multidevs=remap,readonly=on")]
        shared += [(mount.source, str(path), "") for path, mount in self.kept_mounts(kept).items()]
        for tag, path, extra in shared:
            options += ["-fsdev", f"local,id={tag},path={_quoted(path)},security_model=none{extra}"]
            options += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        boot = "console=ttyS0 panic=-1 quiet mitigations=off nokaslr no_timer_check audit=0"
        return [
            QEMU, *options,
            "-kernel", str(self.kernel / stock_kernel.IMAGE), "-initrd", str(initrd), "-append", boot,
        ]  # fmt: skip

    def kept_mounts(self, kept: Sequence[Path]) -> dict[Path, Mount]:
        # Not cached, so that the host sees at once what the guest has written.
        options = f"{P9},cache=mmap"
        return {path: Mount(source=f"keep{number}", type="9p", options=options) for number, path in enumerate(kept)}

    def default_memory_bytes(self) -> int:
        available = re.search(r"MemAvailable: *(\d+) kB", MEMINFO.read_text(encoding="utf-8"))
        return _share(int(available[1]) << 10) if available else MEMORY_DEFAULT_BYTES

    def modules(self) -> list[initramfs.Entry]:
        paths = sorted((self.kernel / stock_kernel.MODULES).iterdir())
        return [initramfs.file(f"modules/{path.name}", path.read_bytes()) for path in paths]


MACHINES: Final[dict[Kind, type[Machine]]] = {Kind.UML: Uml, Kind.QEMU: Qemu}


def memory_folder(memory_bytes: int) -> Path:
    """Returns a folder for the memory of a User-Mode Linux: a tmpfs with room that allows execution, else on disk.

    Raises Unavailable, which says what each folder lacks.
    """
    reasons = []
    for path, free_bytes, problem in _memory_folders():
        if free_bytes >= memory_bytes:
            return path
        reasons.append(f"{path} {problem or f'has {free_bytes // MIB} MiB free'}")
    raise debian.Unavailable(
        f"there is no room for the VM's memory of {memory_bytes // MIB} MiB: {', '.join(reasons)}; ask for less with "
        f"--memory, set TMPDIR to a folder with room for programs, or start a container with --tmpfs {SHM}:exec,size=3g"
    )


def temporary_folder() -> Path:
    """Returns the folder for temporary files. Raises Unavailable if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise debian.Unavailable(f"{error.strerror}: set TMPDIR to a folder that can be written") from None


def _memory_folders() -> Iterator[tuple[Path, int, str]]:
    """Yields where memory may lie, best first: the folder, its free bytes, and why it has none for us."""
    for path in (SHM, temporary_folder()):
        if not path.is_dir():
            yield path, 0, "is not there"
        elif os.statvfs(path).f_flag & os.ST_NOEXEC:
            yield path, 0, "is mounted noexec"
        else:
            yield path, shutil.disk_usage(path).free, ""


def _share(room_bytes: int) -> int:
    """4 GiB, or three quarters of the room: others may use it, too. What is below the least finds no folder."""
    return min(MEMORY_DEFAULT_BYTES, max(MEMORY_MIN_BYTES, room_bytes * 3 // 4 // MIB * MIB))


def _quoted(path: str) -> str:
    """Escapes a path inside an option of QEMU, where a comma ends it."""
    return path.replace(",", ",,")
