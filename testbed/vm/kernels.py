# SPDX-License-Identifier: Apache-2.0
"""The kernels that a VM can run, in the cache: `find` looks, `provide` builds or downloads what is not there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from sennit.testbed.vm import cache, debian, stock_kernel, uml_kernel

GUEST_PROGRAM: Final = Path(__file__).parent / "guest" / "init.c"
DIGEST_LETTERS: Final = 12
COMPILE_TIMEOUT_S: Final = 60.0


class Kind(StrEnum):
    """How the guest's kernel runs."""

    UML = "uml"
    """User-Mode Linux, built here: up in a fraction of a second, programs at native speed, one processor."""
    QEMU = "qemu"
    """Debian's kernel under emulation: several seconds to start and slow, but two real processors."""


class KernelMissing(RuntimeError):
    """There is no kernel of this kind in the cache yet."""


def find(kind: Kind) -> Path:
    """The folder of the newest kernel in the cache that fits this source; fails where there is none."""
    entries = sorted(cache.folder().glob(_name(kind, "*")), key=lambda path: path.stat().st_mtime)
    if not entries:
        raise KernelMissing(
            f"no {kind} kernel in {cache.folder()}: run 'make kernel' or 'sennit testbed kernel {kind}'"
        )
    return entries[-1]


def provide(kind: Kind, say: Callable[[str], None], *, newest: bool = False) -> Path:
    """The folder of a kernel, which is made first if there is none; with `newest`, also if Debian has a newer one."""
    if not newest:
        try:
            return find(kind)
        except KernelMissing:
            pass

    def waiting() -> None:
        say("waiting for another process that is at it")

    if kind is Kind.QEMU:
        package = stock_kernel.package_name()
        name = _name(kind, package.removeprefix("linux-image-"))
        return cache.provide(name, lambda entry: stock_kernel.fetch(entry, package, say), waiting)
    debian.require(uml_kernel.TOOLS, "building the kernel")
    version = debian.candidate(uml_kernel.PACKAGE)
    return cache.provide(_name(kind, version), lambda entry: uml_kernel.build(entry, version, say), waiting)


def guest_program() -> Path:
    """The first process of every VM, compiled when it is first needed."""
    compiler = ["gcc", "-std=c17", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror"]

    def compile_it(entry: Path) -> None:
        debian.require([("gcc", "gcc libc6-dev")], "the first process of the VM")
        debian.execute([*compiler, "-o", str(entry / "init"), str(GUEST_PROGRAM)], timeout_s=COMPILE_TIMEOUT_S)

    return cache.provide(f"init-{_digest(GUEST_PROGRAM.read_bytes())}", compile_it) / "init"


def _name(kind: Kind, version: str) -> str:
    """Of an entry: whatever decides what is in it."""
    made_by = uml_kernel.CONFIGURATION.read_bytes()
    if kind is Kind.QEMU:
        made_by = " ".join(stock_kernel.WANTED).encode()
    return f"kernel-{kind}-{version}-{_digest(made_by)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_LETTERS]
