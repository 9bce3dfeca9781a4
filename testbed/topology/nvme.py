# SPDX-License-Identifier: Apache-2.0
"""Disks over a network, NVMe/TCP: the kernel of one host exports a device, the kernel of another has it as its own.

Both ends are the kernel's own (drivers/nvme/target, drivers/nvme/host). A port listens, and a connection begins, in the
network namespace of whoever asks for it, so call these functions on a host of `Planes`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.offload.opi import nvme_target
from sennit.offload.opi.nvme_target import Namespace, Port, Subsystem, run

FABRICS: Final = Path("/dev/nvme-fabrics")
CONTROLLERS: Final = Path("/sys/class/nvme")
# An initiator gives up a lost controller at once: its I/O fails, as that of a disk that was pulled.
LOST: Final = "ctrl_loss_tmo=0"
DEVICE_TIMEOUT_S: Final = 20.0
LOOK_S: Final = 0.01


def why_not() -> str | None:
    """Why this machine can have no such disks; None: it can. Mounts configfs if nobody has."""
    if reason := nvme_target.why_not():
        return reason
    if not FABRICS.exists():
        return "this kernel has no NVMe over TCP (nvme-tcp)"
    missing = [tool for tool in ("mkfs.ext4", "mount", "unshare") if shutil.which(tool) is None]
    return f"no {', '.join(missing)}" if missing else None


class Export:
    """A block device as the one namespace of an NVMe subsystem of a port.

    Begin it in the network namespace of the host that has the device. `name` is no other subsystem's.
    """

    def __init__(self, port: Port, device: Path, name: str) -> None:
        self.name, self.port = f"nqn.2026-11.sennit:{name}", port
        self._subsystem = Subsystem(self.name)
        self._space = Namespace(self._subsystem, 1, device)

    def begin(self) -> None:
        """Raises OSError where the kernel refuses."""
        self._subsystem.begin()
        self._space.begin()
        self.port.show(self._subsystem)

    def pull(self) -> None:
        """The device is gone at once, for all who have it open."""
        self._space.pull()

    def end(self) -> None:
        """Also of one that did not begin whole."""
        self.port.hide(self._subsystem)
        self._space.end()
        self._subsystem.end()


class Connection:
    """The device of a subsystem on another host. `port`: the target's address; `name`: the subsystem's.

    Begin it in the network namespace of that host, which `host` names to the target.
    """

    def __init__(self, port: Port, name: str, host: str) -> None:
        self._options = (
            f"transport=tcp,traddr={port.address},trsvcid={port.tcp_port},nqn={name},"
            f"hostnqn=nqn.2026-11.sennit:{host},hostid={uuid.uuid5(uuid.NAMESPACE_DNS, host)},{LOST}"
        )
        self._controller: Path | None = None

    def begin(self) -> Path:
        """The device. Raises OSError if the target does not answer, or shows no device in time."""
        descriptor = os.open(FABRICS, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.write(descriptor, self._options.encode())
            said = os.read(descriptor, 256).decode()  # instance=0,cntlid=1
        finally:
            os.close(descriptor)
        self._controller = CONTROLLERS / f"nvme{said.partition('instance=')[2].partition(',')[0]}"
        deadline_s = time.monotonic() + DEVICE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            # nvme0n1, or nvme0c0n1 of the head nvme0n1 where the kernel has several ways to a device.
            for found in self._controller.glob("nvme*n*"):
                device = Path("/dev") / re.sub(r"c\d+n", "n", found.name)
                with contextlib.suppress(OSError), device.open("rb") as disk:
                    if disk.read(nvme_target.SECTOR_BYTES):  # the node is there before the disk has its size
                        return device
            time.sleep(LOOK_S)
        raise TimeoutError(f"{self._controller.name} shows no device within {DEVICE_TIMEOUT_S:g} s")

    def end(self) -> None:
        """Also after the target is gone. Then the kernel may have ended it already."""
        if self._controller is not None:
            with contextlib.suppress(OSError):
                (self._controller / "delete_controller").write_text("1", encoding="utf-8")
            self._controller = None


def make_disk(file: Path, size_bytes: int) -> None:
    """A file with an empty ext4."""
    with file.open("wb") as out:
        out.truncate(size_bytes)
    run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(file))


@contextlib.contextmanager
def looped(file: Path) -> Iterator[Path]:
    """A file as a device of this machine, whatever file system has it."""
    device = nvme_target.attach(file)
    try:
        yield device
    finally:
        nvme_target.detach(device)


@contextlib.contextmanager
def mounted(device: Path, place: Path) -> Iterator[None]:
    run("mount", str(device), str(place))
    try:
        yield
    finally:
        run("umount", str(place))
