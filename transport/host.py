# SPDX-License-Identifier: Apache-2.0
"""Tells hosts apart, for ranks that look for neighbours.

Equal identities are only a hint that shared memory may work between two ranks. The proof is that each rank opens the
other's segment (`rendezvous.py`). That fails between containers that share a kernel but not `/dev/shm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sennit.transport.errors import DeviceError

# random(4): a new random UUID at every boot, the same in all containers of one kernel. Host names do not help:
# containers of one host have different names, and clones of one image have the same.
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_identity(override: str | None = None, *, boot_id: Path = BOOT_ID) -> str:
    """Returns `override` (SENNIT_HOST_ID) if given, else the kernel's boot id."""
    return machine_identity(boot_id=boot_id) if override is None else f"named:{override}"


def machine_identity(*, boot_id: Path = BOOT_ID) -> str:
    """Returns the machine whose cores this process shares, whatever SENNIT_HOST_ID says."""
    try:
        return f"boot:{boot_id.read_text().strip()}"
    except OSError as error:
        raise DeviceError(f"cannot read {boot_id} (mount /proc in this container)", error.errno) from error
