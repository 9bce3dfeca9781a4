# SPDX-License-Identifier: Apache-2.0
"""The kernels that a VM can run, in the cache: `find` looks, `provide` builds or downloads a missing one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from sennit import cache, debian, extras
from sennit.errors import SennitError
from sennit.testbed.vm import stock_kernel, uml_kernel

GUEST_PROGRAM: Final = Path(__file__).parent / "guest" / "init.c"
PROCESSOR: Final = "x86_64"
DIGEST_LETTERS: Final = 12
COMPILE_TIMEOUT_S: Final = 60.0


class Kind(StrEnum):
    """How the guest's kernel runs."""

    UML = "uml"
    """User-Mode Linux, built here: up in a fraction of a second, programs at native speed, one processor."""
    QEMU = "qemu"
    """Debian's kernel under emulation: several seconds to start and slow, but two real processors."""


class KernelMissing(SennitError):
    """There is no kernel of this kind in the cache yet."""


def check_processor() -> None:
    """Raises Unavailable where no kernel of either kind can run: 64-bit Arm has neither."""
    found = os.uname().machine
    if found != PROCESSOR:
        raise debian.Unavailable(f"a VM with soft-RoCE needs a processor of {PROCESSOR}, and this machine has {found}")


def find(kind: Kind, patches: Sequence[Path] = ()) -> Path:
    """Returns the newest fitting kernel's folder in the cache. Raises KernelMissing if there is none."""
    entries = sorted(cache.find(_name(kind, "*", patches)), key=lambda path: path.stat().st_mtime)
    if not entries:
        command = " ".join(["sennit testbed kernel", kind, *(f"--patch {file}" for file in patches)])
        plain = not patches and kind is Kind.UML and extras.from_checkout()
        how = f"'make kernel' or '{command}'" if plain else f"'{command}'"
        raise KernelMissing(f"no such {kind} kernel in the cache: run {how}, or the VM with --make-kernel")
    return entries[-1]


def provide(kind: Kind, say: Callable[[str], None], *, newest: bool = False, patches: Sequence[Path] = ()) -> Path:
    """Returns the folder of a kernel. Makes a missing one, and with `newest` also if Debian has a newer kernel."""
    check_patches(kind, patches)
    if not newest:
        try:
            return find(kind, patches)
        except KernelMissing:
            pass

    def waiting() -> None:
        say("waiting for another process that makes the same kernel")

    name, make = _newest(kind, patches, say)
    return cache.provide(name, make, waiting)


def tools_to_make(kind: Kind, patches: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """Returns the programs that `provide` will run, each with its package; none if the cache has the kernel.

    Raises Unavailable if apt has no such kernel.
    """
    try:
        find(kind, patches)
    except KernelMissing:
        if kind is Kind.UML:
            return uml_kernel.tools(uml_kernel.package_name())
        stock_kernel.package_name()
    return []


def key(kind: Kind, patches: Sequence[Path] = ()) -> str:
    """Returns the name that `provide` gives the newest kernel in the cache. It changes with version and patches.

    Asks apt, and makes nothing.
    """
    check_processor()
    return _newest(kind, patches, lambda what: None)[0]


def _newest(kind: Kind, patches: Sequence[Path], say: Callable[[str], None]) -> tuple[str, Callable[[Path], None]]:
    """Returns the name of the newest kernel that apt has, and what fills its folder."""
    if kind is Kind.QEMU:
        package = stock_kernel.package_name()
        name = _name(kind, package.removeprefix("linux-image-"))
        return name, lambda entry: stock_kernel.fetch(entry, package, say)
    package = uml_kernel.package_name()
    version = debian.candidate(package)
    return _name(kind, version, patches), lambda entry: uml_kernel.build(entry, package, version, say, patches)


def check_patches(kind: Kind, patches: Sequence[Path]) -> None:
    """Raises ValueError for patches that cannot go into a kernel of this kind."""
    if patches and kind is not Kind.UML:
        raise ValueError(f"the {kind} kernel is Debian's own: only the {Kind.UML} kernel can be patched")
    for file in patches:
        if not file.is_file():
            raise ValueError(f"there is no patch {file}")
        _changes(file)


def guest_program() -> Path:
    """Returns the first process of every VM. Compiles it when it is first needed."""
    compiler = ["gcc", "-std=c17", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror"]

    def compile_it(entry: Path) -> None:
        purpose = "the first process of the VM"
        debian.require([("gcc", "gcc libc6-dev")], purpose)
        # It comes with the headers. gcc prints the bare name of a file that it does not have.
        if not Path(
            debian.execute([*compiler[:1], "-print-file-name=libc.a"], timeout_s=COMPILE_TIMEOUT_S).strip()
        ).is_file():
            raise debian.Unavailable(f"{purpose} needs libc.a: apt-get install libc6-dev")
        debian.execute([*compiler, "-o", str(entry / "init"), str(GUEST_PROGRAM)], timeout_s=COMPILE_TIMEOUT_S)

    return cache.provide(f"init-{_digest(GUEST_PROGRAM.read_bytes())}", compile_it) / "init"


def _name(kind: Kind, version: str, patches: Sequence[Path] = ()) -> str:
    """Returns the name of a cache entry. Its digest covers everything that determines the content."""
    made_by = b"\0".join([uml_kernel.CONFIGURATION.read_bytes(), *map(_changes, (uml_kernel.XSTATE_PATCH, *patches))])
    if kind is Kind.QEMU:
        made_by = " ".join(stock_kernel.WANTED).encode()
    return f"kernel-{kind}-{version}-{_digest(made_by)}"


def _changes(patch: Path) -> bytes:
    """Returns a patch without the text ahead of the first file."""
    data = patch.read_bytes()
    start = re.search(rb"^(diff|---) ", data, re.MULTILINE)
    if start is None:
        raise ValueError(f"{patch} changes no file: it is not a patch")
    return data[start.start() :]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_LETTERS]
