# SPDX-License-Identifier: Apache-2.0
"""Kernel headers for bcc, which compiles every program against some, even if it reads nothing of the kernel.

bcc finds the running kernel's headers if they are installed or in the kernel itself (CONFIG_IKHEADERS). Otherwise the
headers of another Debian kernel do: our programs read only arguments of tracepoints, no kernel structures.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from typing import Final

from sennit import cache, debian

VARIABLE: Final = "BCC_KERNEL_SOURCE"
"""The variable in which bcc finds the folder of headers."""
IN_KERNEL: Final = Path("/sys/kernel/kheaders.tar.xz")
# Debian 12's own series, which its clang and bcc were made for.
PACKAGE: Final = re.compile(r"linux-headers-(6\.1\.0-(\d+))-amd64")
PREFIX: Final = "headers-"


def installed() -> bool:
    """Whether bcc finds headers by itself."""
    return VARIABLE in os.environ or IN_KERNEL.exists() or Path("/lib/modules", platform.release(), "build").exists()


def find() -> Path | None:
    """Headers in the cache; None if there are none."""
    found = cache.find(f"{PREFIX}*")
    return found[-1] if found else None


def provide() -> Path:
    """Headers in the cache. If there are none, apt downloads them and they are unpacked; nothing is installed.

    Raises `Unavailable` if apt has none, and `StepFailed`.
    """
    found = find()
    if found is not None:
        return found
    matches = [match for name in debian.names("linux-headers-6.1.0-") if (match := PACKAGE.fullmatch(name))]
    if not matches:
        raise debian.Unavailable("apt knows no linux-headers-6.1.0-*-amd64: install the headers of the running kernel")
    newest = max(matches, key=lambda match: int(match[2]))[1]

    def unpack(entry: Path) -> None:
        # The two packages refer to each other by absolute paths. Merged into one tree they stand alone.
        for part in ("common", "amd64"):
            package = f"linux-headers-{newest}-{part}"
            unpacked = entry.parent / part
            debian.unpack(package, debian.candidate(package), unpacked)
            shutil.copytree(unpacked / "usr/src" / package, entry, dirs_exist_ok=True, ignore=_links)
            shutil.rmtree(unpacked)

    return cache.provide(f"{PREFIX}{newest}", unpack)


def _links(folder: str, names: list[str]) -> list[str]:
    """These link to tools of a third package, which no header needs."""
    return [name for name in names if Path(folder, name).is_symlink()]
