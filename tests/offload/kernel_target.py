# SPDX-License-Identifier: Apache-2.0
"""The kernel's NVMe target as a folder of files, where no kernel has one (drivers/nvme/target/configfs.c)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path, PosixPath
from typing import Any

from sennit.offload.opi.volumes import Loops

# What the kernel makes in a folder that somebody makes, by the name of the folder above.
ATTRIBUTES = {
    "subsystems": ("attr_allow_any_host", "attr_firmware", "attr_model", "attr_serial"),
    "namespaces": ("device_nguid", "device_path", "device_uuid", "enable"),
    "ports": ("addr_adrfam", "addr_traddr", "addr_trsvcid", "addr_trtype"),
}
GROUPS = {"subsystems": ("allowed_hosts", "namespaces"), "ports": ("subsystems",)}


class Configfs(PosixPath):
    """A path below the target's folder. It refuses what the kernel refuses."""

    def mkdir(self, *arguments: Any, **options: Any) -> None:
        super().mkdir(*arguments, **options)
        for name in ATTRIBUTES.get(self.parent.name, ()):
            (self / name).write_text("6.1.0\n" if name == "attr_firmware" else "")
        for name in GROUPS.get(self.parent.name, ()):
            os.mkdir(self / name)

    def rmdir(self) -> None:
        if self._links_to_here():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        for group in GROUPS.get(self.parent.name, ()):
            if os.listdir(self / group):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
        if not self.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        shutil.rmtree(self)

    def symlink_to(self, target: Any, target_is_directory: bool = False) -> None:
        if self.parent.parent.parent.name == "ports":
            address = (self.parent.parent / "addr_traddr").read_text()
            if address == "203.0.113.1":  # no address of this machine
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL), str(self))
        super().symlink_to(target, target_is_directory)

    def _links_to_here(self) -> bool:
        root = next(parent for parent in self.parents if (parent / "hosts").is_dir())
        return any(link.is_symlink() and Path(os.readlink(link)) == Path(self) for link in Path(root).rglob("*"))


def made_in(folder: Path) -> Configfs:
    """The target of a kernel that has just started."""
    for name in ("hosts", "ports", "subsystems"):
        (folder / name).mkdir(parents=True)
    return Configfs(folder)


def left_in(root: Path) -> list[str]:
    """What a client made and nobody removed."""
    return [name for group in ("hosts", "ports", "subsystems") for name in os.listdir(root / group)]


class NoLoops(Loops):
    """In place of loop devices, which need root: /dev/null. `attached`: the files that it stands for."""

    def __init__(self) -> None:
        self.attached: list[Path] = []

    def attach(self, file: Path, block_bytes: int) -> Path:
        del block_bytes
        self.attached.append(file)
        return Path(os.devnull)

    def detach(self, device: Path) -> None:
        del device
        self.attached.pop()


def count(sys: Path, *words: int) -> None:
    """Sets what the kernel counted of /dev/null, in the order of Documentation/block/stat.rst."""
    folder = sys / "dev" / "block" / "1:3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(" ".join(f"{word:8}" for word in words) + "\n")
