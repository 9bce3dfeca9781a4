# SPDX-License-Identifier: Apache-2.0
"""Builds the User-Mode Linux kernel from the kernel source of Debian or Ubuntu and uml.config."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sennit import debian

CONFIGURATION: Final = Path(__file__).parent / "uml.config"
# Without this patch the kernel panics on processors with AMX. Every kernel gets it, besides the caller's patches.
XSTATE_PATCH: Final = Path(__file__).parent / "uml-xstate.patch"
# What the patch and uml.config fit. Later kernels need no such patch, and rxe asks for another checksum there.
OLDEST: Final = (6, 1)
NEWEST: Final = (6, 12)
PREFIX: Final = "linux-source-"
BINARY: Final = "linux"
TOOLS: Final = (
    ("make", "make"),
    ("gcc", "gcc libc6-dev"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("tar", "tar"),
    ("patch", "patch"),
)
# Debian names its sources by two numbers, and Ubuntu by three.
UNPACKER: Final = {2: ("xz", "xz-utils"), 3: ("bzip2", "bzip2")}
UNPACK_TIMEOUT_S: Final = 900.0
PATCH_TIMEOUT_S: Final = 60.0
CONFIGURE_TIMEOUT_S: Final = 600.0
BUILD_TIMEOUT_S: Final = 3600.0
# Half of the source, which this architecture never compiles. The Kconfig files stay, because all of them are read.
UNUSED: Final = (
    "*/drivers/gpu/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/sound/*.[ch]",
    "*/tools/testing/*",
    "*.rst",
    "*.dts",
    "*.dtsi",
)


def package_name() -> str:
    """Returns the newest source that fits: linux-source-6.12 in Debian 12 and 13, linux-source-6.8.0 in Ubuntu 24.04.

    Raises `Unavailable` if apt knows none, and names what it knows.
    """
    known = {name: _numbers(name) for name in debian.names(PREFIX) if re.fullmatch(rf"{PREFIX}[\d.]+", name)}
    fitting = [name for name, numbers in known.items() if OLDEST <= numbers[:2] <= NEWEST and len(numbers) in UNPACKER]
    if not fitting:
        wanted = " to ".join(".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
        found = f" but {', '.join(sorted(known))}" if known else ""
        raise debian.Unavailable(
            f"apt knows no {PREFIX}* of Linux {wanted}{found}: run 'apt-get update', or use Debian 12 or 13"
        )
    return max(fitting, key=_numbers)


def tools(package: str) -> list[tuple[str, str]]:
    """Returns the programs that `build` runs, each with its package."""
    return [*TOOLS, UNPACKER[len(_numbers(package))]]


def _numbers(package: str) -> tuple[int, ...]:
    return tuple(int(number) for number in package.removeprefix(PREFIX).split("."))


def build(entry: Path, package: str, version: str, say: Callable[[str], None], patches: Sequence[Path] = ()) -> None:
    """Fills `entry` with the kernel, its configuration and the log of the build. Works in a folder beside `entry`.

    Applies the patches to Debian's source in their order, after our own patch. Each must fit without fuzz.
    """
    debian.require(tools(package), "building the kernel")
    log = entry / "build.log"
    work = entry.parent
    unpacked = work / "package"
    say(f"downloading {package} {version}")
    debian.unpack(package, version, unpacked)
    say("unpacking the source")
    unpack = ["tar", "-xf", str(archive(unpacked)), *(f"--exclude={pattern}" for pattern in UNUSED), "-C", str(work)]
    debian.execute(unpack, timeout_s=UNPACK_TIMEOUT_S, log=log)
    (source,) = work.glob("linux-source-*")
    for file in (XSTATE_PATCH, *patches):
        say(f"applying {file}")
        apply = ["patch", "--strip=1", "--forward", "--fuzz=0", f"--directory={source}", f"--input={file.resolve()}"]
        debian.execute(apply, timeout_s=PATCH_TIMEOUT_S, log=log)
    output = work / "output"
    make = ["make", "-C", str(source), "ARCH=um", f"O={output}"]
    # allnoconfig takes from this file the answers that are not "no" (Documentation/kbuild/kconfig.rst).
    debian.execute([*make, f"KCONFIG_ALLCONFIG={CONFIGURATION}", "allnoconfig"], timeout_s=CONFIGURE_TIMEOUT_S, log=log)
    check_configuration(CONFIGURATION.read_text(encoding="utf-8"), (output / ".config").read_text(encoding="utf-8"))
    jobs = len(os.sched_getaffinity(0))
    say(f"compiling, {jobs} at a time: some eight minutes of processor time")
    # Nice to what runs beside it for minutes: tests that have deadlines.
    debian.execute(["nice", *make, f"-j{jobs}", BINARY], timeout_s=BUILD_TIMEOUT_S, log=log)
    shutil.copy2(output / BINARY, entry / BINARY)
    shutil.copy2(output / ".config", entry / "config")


def archive(unpacked: Path) -> Path:
    """Returns the source in an unpacked package. In Ubuntu's, the name that Debian has is a link to it."""
    (found,) = (path for path in unpacked.rglob(f"{PREFIX}*.tar.*") if not path.is_symlink())
    return found


def check_configuration(wanted: str, found: str) -> None:
    """Raises if the kernel's own rules overruled an answer. The guest would fail much later, without a clue."""
    lines = set(found.splitlines())
    refused = [line for line in wanted.splitlines() if line and not line.startswith("#") and line not in lines]
    if refused:
        raise debian.StepFailed(f"this kernel does not take these lines of {CONFIGURATION.name}: {', '.join(refused)}")
