# SPDX-License-Identifier: Apache-2.0
"""The kernel's NVMe/TCP target (drivers/nvme/target): folders of configfs are its ports, subsystems and namespaces.

A port listens in the network namespace of whoever shows the first subsystem at it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

CONFIGURATION: Final = Path("/sys/kernel/config")
ROOT: Final = CONFIGURATION / "nvmet"
TCP_PORT: Final = 4420  # IANA: nvme
COMMAND_TIMEOUT_S: Final = 30.0
SECTOR_BYTES: Final = 512


def why_not() -> str | None:
    """Why this machine can lend no disks; None: it can. Mounts configfs if nobody has."""
    if os.geteuid() != 0:
        return "needs root"
    if not ROOT.is_dir():
        subprocess.run(
            ["mount", "-t", "configfs", "configfs", CONFIGURATION],
            capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
    if not ROOT.is_dir():
        return "this kernel has no NVMe target (nvmet)"
    return "no losetup" if shutil.which("losetup") is None else None


class Subsystem:
    """What a host connects to, by its NVMe Qualified Name.

    `nqn` and `host` are names as NVMe has them, without "/". `host` alone may connect; empty: every host may.
    `made_hosts` has the names of hosts that subsystems of this program made, and is shared by them.
    """

    def __init__(
        self, nqn: str, *, serial: str = "", model: str = "", host: str = "", made_hosts: set[str] | None = None,
        root: Path = ROOT,
    ) -> None:  # fmt: skip
        self.nqn, self.folder = nqn, root / "subsystems" / nqn
        self._attributes = {"attr_allow_any_host": "0" if host else "1", "attr_serial": serial, "attr_model": model}
        self._host = root / "hosts" / host if host else None
        self._made_hosts = set() if made_hosts is None else made_hosts

    def begin(self) -> None:
        """Raises OSError where the kernel refuses; nothing is left then."""
        self.folder.mkdir()
        try:
            for name, value in self._attributes.items():
                if value:
                    _write(self.folder / name, value)
            if self._host is not None:
                with contextlib.suppress(FileExistsError):
                    self._host.mkdir()
                    self._made_hosts.add(self._host.name)
                (self.folder / "allowed_hosts" / self._host.name).symlink_to(self._host)
        except BaseException:
            self.end()
            raise

    def firmware(self) -> str:
        """The revision that hosts see; empty where the kernel does not say."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "attr_firmware").read_text(encoding="utf-8").strip()
        return ""

    def end(self) -> None:
        """Also of one that did not begin whole. Its namespaces and ports must have ended."""
        if self._host is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / "allowed_hosts" / self._host.name).unlink()
        with contextlib.suppress(FileNotFoundError):
            self.folder.rmdir()
        if self._host is not None and self._host.name in self._made_hosts:
            with contextlib.suppress(OSError):  # another subsystem has it still
                self._host.rmdir()
                self._made_hosts.discard(self._host.name)


class Namespace:
    """A block device as one disk of a subsystem. `number` is 1 or more; `uuid` and `nguid` are 32 hex digits."""

    def __init__(self, subsystem: Subsystem, number: int, device: Path, *, uuid: str = "", nguid: str = "") -> None:
        self._folder = subsystem.folder / "namespaces" / str(number)
        self._attributes = {"device_path": str(device), "device_uuid": uuid, "device_nguid": nguid, "enable": "1"}

    def begin(self) -> None:
        """Raises OSError where the kernel refuses; nothing is left then."""
        self._folder.mkdir()
        try:
            for name, value in self._attributes.items():
                if value:
                    _write(self._folder / name, value)
        except BaseException:
            self.end()
            raise

    def pull(self) -> None:
        """The device is gone at once, for all who have it open."""
        _write(self._folder / "enable", "0")

    def end(self) -> None:
        """Also of one that did not begin."""
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()


class Port:
    """An address at which the target serves: it listens while it shows any subsystem."""

    def __init__(self, address: str, tcp_port: int = TCP_PORT, *, root: Path = ROOT) -> None:
        self.address, self.tcp_port = address, tcp_port
        self._ports = root / "ports"
        self._folder: Path | None = None

    def begin(self) -> None:
        """Raises OSError where the kernel refuses; nothing is left then."""
        for number in itertools.count(1):
            folder = self._ports / str(number)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
        self._folder = folder
        try:
            for name, value in (
                ("addr_trtype", "tcp"),
                ("addr_adrfam", f"ipv{ipaddress.ip_address(self.address).version}"),
                ("addr_traddr", self.address),
                ("addr_trsvcid", str(self.tcp_port)),
            ):
                _write(folder / name, value)
        except BaseException:
            self.end()
            raise

    def show(self, subsystem: Subsystem) -> None:
        """Raises OSError if the address is in use, or none of this network namespace."""
        assert self._folder is not None, "begin it before"
        (self._folder / "subsystems" / subsystem.nqn).symlink_to(subsystem.folder)

    def hide(self, subsystem: Subsystem) -> None:
        """Also of one that is not shown. Its hosts lose their connections."""
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / "subsystems" / subsystem.nqn).unlink()

    def end(self) -> None:
        if self._folder is not None:
            self._folder.rmdir()
            self._folder = None


def attach(file: Path, block_bytes: int = SECTOR_BYTES) -> Path:
    """A file as a block device of this machine, whatever file system has it. Raises OSError."""
    return Path(run("losetup", "--find", "--show", "--sector-size", str(block_bytes), str(file)).strip())


def detach(device: Path) -> None:
    run("losetup", "--detach", str(device))


def run(*command: str) -> str:
    """Raises OSError with what the command said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{' '.join(command)}: not done after {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _write(attribute: Path, value: str) -> None:
    # The kernel makes attributes: what is not there is a setting that this kernel lacks.
    descriptor = os.open(attribute, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
