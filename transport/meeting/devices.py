# SPDX-License-Identifier: Apache-2.0
"""RDMA devices: ports, GIDs, packet sizes, counters, and what prevents the verbs port from using a device.

Reads through pyverbs, the Python interface of rdma-core, which is imported on first use. Native code moves the data.
This module chooses a device, feeds `sennit doctor`, and tells a user early what is wrong.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sennit.transport.errors import DeviceError, Unsupported

ROOT: Final = Path("/")
SYSFS: Final = Path("/sys/class/infiniband")
HW_COUNTERS: Final = "hw_counters"
CRYPTO: Final = Path("/proc/crypto")
PROCESS_STATUS: Final = Path("/proc/self/status")
# uapi/linux/capability.h: lets a process register memory beyond the limit
CAP_IPC_LOCK: Final = 14
# Enough for a registered ring for each of about ten peers, and the tensors of a small model.
LOCKED_MEMORY_MIN_BYTES: Final = 64 << 20
# InfiniBand Architecture Specification 1.4, 10.9.2: the upper bit of a partition key marks full members.
PARTITION_MASK: Final = 0x7FFF
# The partition of all packets (docs/reference/wire.md).
PARTITION: Final = 0x7FFF
# infiniband/verbs.h, enum ibv_port_state
PORT_STATES: Final = {1: "down", 2: "init", 3: "armed", 4: "active"}
# uapi/rdma/ib_user_verbs.h, enum ibv_mtu: 1 is 256 bytes, 5 is 4,096.
MTU_BASE_BYTES: Final = 128


@dataclass(frozen=True, kw_only=True)
class Gid:
    """An address of a port with RoCE version 2, whose packets are UDP."""

    index: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    interface: str
    """The network interface that has this address. Empty if the interface is gone."""

    @property
    def is_link_local(self) -> bool:
        return self.address.is_link_local


@dataclass(frozen=True, kw_only=True)
class DevicePort:
    """A port of a device."""

    device: str
    number: int
    state: str
    """The name in the specification: active, down, init, armed."""
    is_ethernet: bool
    mtu_bytes: int
    """The largest payload of a packet now. It follows from the interface's MTU."""
    gids: tuple[Gid, ...]
    """RoCE version 2 GIDs only."""
    partitions: tuple[int, ...]
    """Partition keys without the bit of full members. Two ports can talk if they share one."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An RDMA device and its ports."""

    name: str
    ports: tuple[DevicePort, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why something cannot be used, and what to do about it."""

    what: str
    remedy: str
    is_fatal: bool = True
    """False if it works, but worse than it could."""


def whats(problems: Sequence[Problem]) -> str:
    return "; ".join(problem.what for problem in problems)


def remedies(problems: Sequence[Problem]) -> str:
    return "; ".join(problem.remedy for problem in problems)


def read_devices() -> tuple[Device, ...]:
    """Returns every device of this machine, by name. None is not an error."""
    module = _pyverbs("device")
    try:
        names = sorted(entry.name.decode() for entry in module.get_device_list())
    except _pyverbs("pyverbs_error").PyverbsRDMAError:
        return ()  # Without RDMA in the kernel, pyverbs raises instead of returning an empty list.
    devices = []
    for name in names:
        try:
            with module.Context(name=name) as context:
                devices.append(_device(name, context))
        except _pyverbs("pyverbs_error").PyverbsError as error:
            raise DeviceError(f"RDMA device {name} cannot be opened or read: {error}") from None
    return tuple(devices)


def read_counters(port: DevicePort, sysfs: Path = SYSFS) -> dict[str, int]:
    """Returns the counters of a device's port (`hw_counters`), under the driver's names. Empty if it has none.

    The kernel reads the device again only after `lifespan` milliseconds (10 by default).
    """
    folder = sysfs / port.device / "ports" / str(port.number) / HW_COUNTERS
    return (
        {path.name: int(path.read_text(encoding="utf-8")) for path in counter_files(folder)} if folder.is_dir() else {}
    )


def counter_files(folder: Path) -> list[Path]:
    """Returns one file for each counter of a port. A driver setting in the same folder is left out."""
    return [path for path in sorted(folder.iterdir()) if path.name != "lifespan"]


def usable_ports(devices: Sequence[Device]) -> list[DevicePort]:
    """Returns the ports that the verbs port can use now."""
    return [port for device in devices for port in device.ports if not port_problems(port)]


def port_problems(port: DevicePort) -> list[Problem]:
    """Returns what prevents the verbs port from using this port."""
    name = f"port {port.number} of {port.device}"
    if not port.is_ethernet:
        return [Problem(what=f"{name} is InfiniBand; sennit speaks RoCE version 2", remedy="use an Ethernet port")]
    found = []
    interfaces = sorted({gid.interface for gid in port.gids if gid.interface}) or ["<its interface>"]
    if port.state != "active":
        found.append(Problem(what=f"{name} is {port.state}", remedy=f"ip link set {interfaces[0]} up; check the cable"))
    if not port.gids:
        remedy = "give its interface an address; set RoCE version 2 as the driver's default (cma_roce_mode)"
        found.append(Problem(what=f"{name} has no GID of RoCE version 2", remedy=remedy))
    if PARTITION not in port.partitions:
        own = ", ".join(f"{key:#06x}" for key in port.partitions) or "none"
        what = f"{name} is in partitions {own}; packets are in the default one, {PARTITION:#06x}"
        found.append(Problem(what=what, remedy="join the port to the default partition"))
    return found


def pair_problems(near: DevicePort, far: DevicePort) -> list[Problem]:
    """Returns what prevents two ports from talking to each other."""
    found = []
    if near.mtu_bytes != far.mtu_bytes:
        what = f"packets of {near.mtu_bytes} bytes on {near.device} and of {far.mtu_bytes} on {far.device}"
        remedy = "give both interfaces, and what is between them, the same MTU"
        found.append(Problem(what=what, remedy=remedy, is_fatal=False))
    if not set(near.partitions) & set(far.partitions):
        keys = " and ".join(", ".join(f"{key:#06x}" for key in port.partitions) or "none" for port in (near, far))
        remedy = "join both ports to one partition"
        found.append(Problem(what=f"{near.device} and {far.device} share no partition: {keys}", remedy=remedy))
    versions = [{gid.address.version for gid in port.gids} for port in (near, far)]
    if not versions[0] & versions[1]:
        remedy = "give both interfaces addresses of one family"
        found.append(Problem(what=f"{near.device} and {far.device} have no common IP version", remedy=remedy))
    return found


def machine_problems(crypto: Path = CRYPTO, modules: Path = Path("/sys/module")) -> list[Problem]:
    """Returns what prevents every use of RDMA devices on this machine."""
    return locked_memory_problems() + soft_roce_problems(crypto, modules)


def locked_memory_problems() -> list[Problem]:
    """Checks whether operations may register as much memory as they need."""
    found = []
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < LOCKED_MEMORY_MIN_BYTES and not _may_lock_memory():
        what = f"at most {limit_bytes >> 10} KiB of memory may be locked, {LOCKED_MEMORY_MIN_BYTES >> 10} are needed"
        remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd"
        found.append(Problem(what=what, remedy=remedy))
    return found


def soft_roce_problems(crypto: Path = CRYPTO, modules: Path = Path("/sys/module")) -> list[Problem]:
    """Returns what prevents soft-RoCE from having devices."""
    found = []
    # rxe asks the crypto layer for it by name, and no module dependency shows this. Without it, adding a device fails
    # with "No such file or directory".
    if (modules / "rdma_rxe").is_dir() and crypto.is_file() and not _has_crc32(crypto.read_text(encoding="utf-8")):
        what = "soft-RoCE (rdma_rxe) is loaded, but the kernel has no crc32 for it"
        found.append(Problem(what=what, remedy="modprobe crc32_generic, then add the device again"))
    return found


def absence_problems(root: Path = ROOT) -> list[Problem]:
    """Returns why this process finds no usable RDMA device."""
    devices = _names(root / "sys/class/infiniband")
    if devices:
        nodes = [path for path in (root / "dev/infiniband").glob("uverbs*") if os.access(path, os.R_OK | os.W_OK)]
        if nodes:
            return []
        what = f"{', '.join(devices)}: this process cannot open /dev/infiniband/uverbs*"
        remedy = "modprobe ib_uverbs; give this user, or this container, /dev/infiniband"
        return [Problem(what=what, remedy=remedy)]
    found = soft_roce_problems(root / "proc/crypto", root / "sys/module")
    release = os.uname().release
    if _has_module("rdma_rxe", root, release):
        remedy = "an RDMA NIC, or soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev <interface>"
        return [*found, Problem(what="no RDMA device", remedy=remedy)]
    what = f"no RDMA device, and kernel {release} has no module rdma_rxe for soft-RoCE"
    remedy = (
        "a kernel package that has it (Debian: linux-image-amd64, not the cloud kernels; Ubuntu: "
        f"linux-modules-extra-{release}), or sennit testbed vm"
    )
    return [*found, Problem(what=what, remedy=remedy)]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _has_module(name: str, root: Path, release: str) -> bool:
    if (root / "sys/module" / name).is_dir():
        return True
    folder = root / "lib/modules" / release
    lists = [path for path in (folder / "modules.dep", folder / "modules.builtin") if path.is_file()]
    return any(f"/{name}.ko" in path.read_text(encoding="utf-8") for path in lists)


def _has_crc32(text: str) -> bool:
    return any(line.split() == ["name", ":", "crc32"] for line in text.splitlines())


def _may_lock_memory() -> bool:
    for line in PROCESS_STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def _pyverbs(name: str) -> Any:
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        reason = f"{error}: install it for this Python (Debian: python3-pyverbs, for /usr/bin/python3)"
        raise Unsupported("pyverbs", reason) from None


def _device(name: str, context: Any) -> Device:
    port_count = context.query_device().phys_port_cnt
    return Device(name=name, ports=tuple(_port(name, number, context) for number in range(1, port_count + 1)))


def _port(device: str, number: int, context: Any) -> DevicePort:
    ibv = _pyverbs("enums")
    attributes = context.query_port(number)
    gids = []
    for index in range(attributes.gid_tbl_len):
        try:
            entry = context.query_gid_ex(number, index)
        except _pyverbs("pyverbs_error").PyverbsRDMAError:
            continue  # This entry of the table is empty.
        if entry.gid_type == ibv.IBV_GID_TYPE_ROCE_V2:
            gids.append(_gid(index, entry))
    return DevicePort(
        device=device,
        number=number,
        state=state_name(attributes.state),
        is_ethernet=attributes.link_layer == ibv.IBV_LINK_LAYER_ETHERNET,
        mtu_bytes=MTU_BASE_BYTES << attributes.active_mtu,
        gids=tuple(gids),
        partitions=tuple(sorted(_partitions(number, attributes.pkey_tbl_len, context))),
    )


def state_name(state: int) -> str:
    return PORT_STATES.get(state, f"in state {state}")


def _partitions(port: int, count: int, context: Any) -> set[int]:
    keys = {socket.ntohs(context.query_pkey(port, index)) & PARTITION_MASK for index in range(count)}
    return keys - {0}


def _gid(index: int, entry: Any) -> Gid:
    address = ipaddress.IPv6Address(_text(entry.gid_str()))
    try:
        interface = socket.if_indextoname(entry.ndev_ifindex)
    except OSError:
        interface = ""
    return Gid(index=index, address=address.ipv4_mapped or address, interface=interface)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
