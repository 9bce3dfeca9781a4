# SPDX-License-Identifier: Apache-2.0
"""Volumes: files as block devices, and block devices as they are; what the kernel counts of each."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from pydpu.proto.v1 import opicommon_pb2

from sennit.offload.opi import nvme_target
from sennit.offload.opi.resources import Refused, invalid

# linux/fs.h
_BLKSSZGET: Final = 0x1268
BLOCK_BYTES: Final = (512, 1024, 2048, 4096)
# Documentation/block/stat.rst: field of VolumeStats -> column of the file, and bytes in its unit. Ticks are ms.
COLUMNS: Final = {
    "read_ops_count": (0, 1), "read_bytes_count": (2, 512), "read_latency_ticks": (3, 1),
    "write_ops_count": (4, 1), "write_bytes_count": (6, 512), "write_latency_ticks": (7, 1),
    "unmap_ops_count": (11, 1), "unmap_bytes_count": (13, 512), "unmap_latency_ticks": (14, 1),
}  # fmt: skip
INT32_MAX: Final = 2**31 - 1


class Identity(NamedTuple):
    """What a file or a device is, whatever its name."""

    folder: int
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Volume:
    device: Path
    block_bytes: int
    blocks: int
    identity: Identity
    detach: Callable[[], None]
    """Gives the device back."""


class Loops:
    """The kernel's loop devices."""

    def attach(self, file: Path, block_bytes: int) -> Path:
        return nvme_target.attach(file, block_bytes)

    def detach(self, device: Path) -> None:
        nvme_target.detach(device)


def open_volume(
    file: str, block_bytes: int, blocks: int, *, folder: Path, taken: Iterable[Identity], loops: Loops
) -> Volume:
    """A file or device below `folder`. `block_bytes` and `blocks`: as they must be; 0: as they are.

    Raises Refused, and OSError where the kernel refuses.
    """
    path = Path(file)
    # A link in the folder, which only this machine's operator can make, may lead to a device.
    if os.path.normpath(file) != file or folder not in path.parents:
        raise invalid(f"filename {file!r}, must be a path below {folder}, without ..")
    try:
        # Exclusive: not the disk of a file system that is mounted here. Without waiting for a FIFO's other end.
        exclusive = os.O_EXCL if stat.S_ISBLK(path.stat().st_mode) else 0
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | exclusive)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        code = grpc.StatusCode.NOT_FOUND if missing else grpc.StatusCode.FAILED_PRECONDITION
        raise Refused(code, f"filename {file!r}: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        is_device = stat.S_ISBLK(facts.st_mode)
        if not is_device and not stat.S_ISREG(facts.st_mode):
            raise invalid(f"filename {file!r}, must be a file or a block device")
        own = struct.unpack("i", fcntl.ioctl(descriptor, _BLKSSZGET, bytes(4)))[0] if is_device else 0
        size = os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.close(descriptor)
    block = block_bytes or own or nvme_target.SECTOR_BYTES
    if block not in ((own,) if own else BLOCK_BYTES):
        raise invalid(f"block_size {block}, must be {own or ', '.join(map(str, BLOCK_BYTES))}")
    if size == 0 or size % block:
        raise invalid(f"filename {file!r} has {size} bytes, must be blocks of {block}")
    if blocks not in (0, size // block):
        raise invalid(f"blocks_count {blocks}, but {file!r} has {size // block} blocks of {block} bytes")
    identity = Identity(0, facts.st_rdev) if is_device else Identity(facts.st_dev, facts.st_ino)
    if identity in taken:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"filename {file!r} is another volume's")
    device = path if is_device else loops.attach(path, block)
    return Volume(
        device=device,
        block_bytes=block,
        blocks=size // block,
        identity=identity,
        detach=(lambda: None) if is_device else (lambda: loops.detach(device)),
    )


def counted(volumes: Iterable[Volume], sys: Path) -> Any:
    """`VolumeStats`: what the kernel counted of devices since each is there, summed.

    Counts of OPI have 32 bits. They stay at 2³¹ - 1 where more was counted.
    """
    sums = dict.fromkeys(COLUMNS, 0)
    for volume in volumes:
        number = volume.device.stat().st_rdev
        file = sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}" / "stat"
        words = file.read_text(encoding="utf-8").split()
        for field, (column, unit) in COLUMNS.items():
            # Kernels before 4.18 count no discards.
            sums[field] += int(words[column]) * unit if column < len(words) else 0
    return opicommon_pb2.VolumeStats(**{field: min(value, INT32_MAX) for field, value in sums.items()})
