# SPDX-License-Identifier: Apache-2.0
"""What a container or an old machine may lack. `sennit doctor` asks, and so does the first call where it matters.

Each question has an answer in one line: whether it is as it should be, what was found, and else what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit import cache
from sennit.errors import DeviceError

CPUINFO: Final = Path("/proc/cpuinfo")
AVX2: Final = {"avx2", "f16c"}
AVX512: Final = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEWER: Final = "a newer distribution (Debian 12, Ubuntu 22.04 or later), or a build from a clone (make build)"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found, in one line."""

    fine: bool
    what: str
    remedy: str = ""


def vector_units(cpuinfo: Path = CPUINFO) -> Answer:
    """Which kernels this processor takes. Without AVX2 all is slower, with the same bits."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return Answer(fine=True, what=f"{platform.machine()}: portable kernels")
    found = (
        re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE) if cpuinfo.exists() else None
    )
    flags = set(found[1].split()) if found else set()
    if flags >= AVX2:
        return Answer(fine=True, what="AVX-512 and AVX2" if flags >= AVX512 else "AVX2")
    return Answer(
        fine=False,
        what="no AVX2: sums, codecs and lookups take portable kernels, slower and with the same bits",
        remedy="another processor; in a VM, one that passes AVX2 through (QEMU: -cpu host)",
    )


def libraries(wanted: tuple[int, int] | None = None) -> Answer:
    """Whether glibc is as new as the wheel's tag asks for. `wanted`: that version; None: what the wheel says."""
    found = libc_version()
    if found is None:
        what = f"not glibc, but {platform.libc_ver()[0] or 'another C library'}, which has not been tried"
        return Answer(fine=False, what=what, remedy="a distribution with glibc")
    here = f"glibc {found[0]}.{found[1]}"
    wanted = wheel_glibc() if wanted is None else wanted
    if wanted is None:
        return Answer(fine=True, what=f"{here}, built on this machine")
    asked = f"the wheel asks for {wanted[0]}.{wanted[1]}"
    if found < wanted:
        return Answer(fine=False, what=f"{here} is too old: {asked}", remedy=NEWER)
    return Answer(fine=True, what=f"{here}; {asked}")


def libc_version() -> tuple[int, int] | None:
    """The version of the running glibc; None if the C library is another one."""
    name, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if name == "glibc" and found else None


def wheel_glibc() -> tuple[int, int] | None:
    """The glibc that the installed wheel's tag names (PEP 600); None if there is no such wheel."""
    try:
        text = importlib.metadata.distribution("sennit").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    found = re.search(r"manylinux_(\d+)_(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def cache_folder() -> Answer:
    """Whether things that take long to make can be kept."""
    try:
        folder = cache.writable_folder()
    except DeviceError as error:
        return Answer(fine=False, what=str(error).removesuffix(f"; {cache.REMEDY}"), remedy=cache.REMEDY)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Answer(fine=True, what=str(folder))
    except OSError as error:
        return Answer(fine=False, what=f"{folder}: {error.strerror}", remedy=cache.REMEDY)


def proxy() -> Answer:
    """Whether a proxy stands before this machine's own services. Ranks and torch's stores never use one."""
    names = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    set_here = [name for name in names if os.environ[name]]
    if not set_here:
        return Answer(fine=True, what="none")
    what = f"{', '.join(set_here)} set; ranks and torch's stores use no proxy"
    import urllib.request  # here, so that `sennit --help` stays quick

    if urllib.request.proxy_bypass("127.0.0.1"):
        return Answer(fine=True, what=f"{what}, and no_proxy leaves out 127.0.0.1")
    return Answer(
        fine=False,
        what=f"{what}, but collectors (--otlp) and object stores are asked through it, on this machine, too",
        remedy="export no_proxy=127.0.0.1,localhost, and the names of hosts of your own",
    )
