# SPDX-License-Identifier: Apache-2.0
"""Builds the User-Mode Linux kernel from Debian's kernel source and uml.config."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sennit import debian

CONFIGURATION: Final = Path(__file__).parent / "uml.config"
# Without this patch the kernel panics on processors with AMX. Every kernel gets it, besides the caller's patches.
XSTATE_PATCH: Final = Path(__file__).parent / "uml-xstate.patch"
PACKAGE: Final = "linux-source-6.12"
BINARY: Final = "linux"
TOOLS: Final = (
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("patch", "patch"),
)
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


def require_tools() -> None:
    """Raises `Unavailable` if a program that `build` runs is missing."""
    debian.require(TOOLS, "building the kernel")


def build(entry: Path, version: str, say: Callable[[str], None], patches: Sequence[Path] = ()) -> None:
    """Fills `entry` with the kernel, its configuration and the log of the build. Works in a folder beside `entry`.

    Applies the patches to Debian's source in their order, after our own patch. Each must fit without fuzz.
    """
    require_tools()
    log = entry / "build.log"
    work = entry.parent
    package = work / "package"
    say(f"downloading {PACKAGE} {version}")
    debian.unpack(PACKAGE, version, package)
    say("unpacking the source")
    (archive,) = package.glob("usr/src/linux-source-*.tar.*")
    exclude = [f"--exclude={pattern}" for pattern in UNUSED]
    debian.execute(["tar", "-xf", str(archive), *exclude, "-C", str(work)], timeout_s=UNPACK_TIMEOUT_S, log=log)
    (source,) = work.glob("linux-source-*")
    for file in (XSTATE_PATCH, *patches):
        say(f"applying {file}")
        apply = ["patch", "--strip=1", "--forward", "--fuzz=0", f"--directory={source}", f"--input={file.resolve()}"]
        debian.execute(apply, timeout_s=PATCH_TIMEOUT_S, log=log)
    output = work / "output"
    make = ["make", "-C", str(source), "ARCH=um", f"O={output}"]
    # allnoconfig takes from this file the answers that are not "no" (Documentation/kbuild/kconfig.rst).
    debian.execute([*make, f"KCONFIG_ALLCONFIG={CONFIGURATION}", "allnoconfig"], timeout_s=CONFIGURE_TIMEOUT_S, log=log)
    check_configuration(CONFIGURATION.read_text(), (output / ".config").read_text())
    jobs = len(os.sched_getaffinity(0))
    say(f"compiling, {jobs} at a time: some eight minutes of processor time")
    # Nice to what runs beside it for minutes: tests that have deadlines.
    debian.execute(["nice", *make, f"-j{jobs}", BINARY], timeout_s=BUILD_TIMEOUT_S, log=log)
    shutil.copy2(output / BINARY, entry / BINARY)
    shutil.copy2(output / ".config", entry / "config")


def check_configuration(wanted: str, found: str) -> None:
    """Raises if the kernel's own rules overruled an answer. The guest would fail much later, without a clue."""
    lines = set(found.splitlines())
    refused = [line for line in wanted.splitlines() if line and not line.startswith("#") and line not in lines]
    if refused:
        raise debian.StepFailed(f"this kernel does not take these lines of {CONFIGURATION.name}: {', '.join(refused)}")
