# SPDX-License-Identifier: Apache-2.0
"""Disks over a network, NVMe/TCP: the kernel of one host exports a device, the kernel of another has it as its own.

Both ends are the kernel's own (drivers/nvme/target, drivers/nvme/host). A port listens, and a connection begins, in the
network namespace of whoever asks for it, so call these functions on a host of `Planes`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CONFIGURATION: Final = Path("/sys/kernel/config")
TARGET: Final = CONFIGURATION / "nvmet"
FABRICS: Final = Path("/dev/nvme-fabrics")
CONTROLLERS: Final = Path("/sys/class/nvme")
TCP_PORT: Final = 4420  # IANA: nvme
# An initiator gives up a lost controller at once: its I/O fails, as that of a disk that was pulled.
LOST: Final = "ctrl_loss_tmo=0"
COMMAND_TIMEOUT_S: Final = 30.0
DEVICE_TIMEOUT_S: Final = 20.0
LOOK_S: Final = 0.01
SECTOR_BYTES: Final = 512


def why_not() -> str | None:
    """Why this machine can have no such disks; None: it can. Mounts configfs if nobody has."""
    if os.geteuid() != 0:
        return "needs root"
    if not TARGET.is_dir():
        subprocess.run(
            ["mount", "-t", "configfs", "configfs", CONFIGURATION],
            capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
    if not TARGET.is_dir():
        return "this kernel has no NVMe target (nvmet)"
    if not FABRICS.exists():
        return "this kernel has no NVMe over TCP (nvme-tcp)"
    missing = [tool for tool in ("mkfs.ext4", "mount", "unshare", "losetup") if shutil.which(tool) is None]
    return f"no {', '.join(missing)}" if missing else None


class Port:
    """An address at which this kernel's target serves disks: it listens while it has any."""

    def __init__(self, address: str) -> None:
        self.address = address
        taken = {int(port.name) for port in (TARGET / "ports").iterdir()}
        self.folder = TARGET / "ports" / str(next(number for number in itertools.count(1) if number not in taken))

    def begin(self) -> None:
        self.folder.mkdir()
        for name, value in (
            ("addr_trtype", "tcp"),
            ("addr_adrfam", "ipv4"),
            ("addr_traddr", self.address),
            ("addr_trsvcid", str(TCP_PORT)),
        ):
            (self.folder / name).write_text(value, encoding="utf-8")

    def end(self) -> None:
        self.folder.rmdir()


class Export:
    """A block device as the one namespace of an NVMe subsystem of a port.

    Begin it in the network namespace of the host that has the device. `name` is no other subsystem's.
    """

    def __init__(self, port: Port, device: Path, name: str) -> None:
        self.name, self.address = f"nqn.2026-11.sennit:{name}", port.address
        self._device = device
        self._subsystem = TARGET / "subsystems" / self.name
        self._space = self._subsystem / "namespaces" / "1"
        self._link = port.folder / "subsystems" / self.name

    def begin(self) -> None:
        """Raises OSError where the kernel refuses."""
        self._subsystem.mkdir()
        (self._subsystem / "attr_allow_any_host").write_text("1", encoding="utf-8")
        self._space.mkdir()
        (self._space / "device_path").write_text(str(self._device), encoding="utf-8")
        (self._space / "enable").write_text("1", encoding="utf-8")
        self._link.symlink_to(self._subsystem)

    def pull(self) -> None:
        """The device is gone at once, for all who have it open."""
        (self._space / "enable").write_text("0", encoding="utf-8")

    def end(self) -> None:
        """Also of one that did not begin whole."""
        with contextlib.suppress(FileNotFoundError):
            self._link.unlink()
        for folder in (self._space, self._subsystem):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


class Connection:
    """The device of an export on another host.

    Begin it in the network namespace of that host, which `host` names to the target.
    """

    def __init__(self, export: Export, host: str) -> None:
        self._options = (
            f"transport=tcp,traddr={export.address},trsvcid={TCP_PORT},nqn={export.name},"
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
                    if disk.read(SECTOR_BYTES):  # the node is there before the disk has its size
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
    device = run("losetup", "--find", "--show", str(file)).strip()
    try:
        yield Path(device)
    finally:
        run("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(device: Path, place: Path) -> Iterator[None]:
    run("mount", str(device), str(place))
    try:
        yield
    finally:
        run("umount", str(place))


def run(*command: str) -> str:
    """Raises OSError with what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
