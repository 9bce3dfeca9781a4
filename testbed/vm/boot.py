# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs on this machine: User-Mode Linux where it boots, else Debian's own in QEMU.

A cached kernel may have been built on another machine, and a User-Mode Linux depends on the host's processor. So each
kernel is booted once on each kind of machine. The result is kept in the kernel's folder of the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit import debian
from sennit.testbed.vm import kernels, runner
from sennit.testbed.vm.kernels import Kind
from sennit.testbed.vm.links import Links
from sennit.testbed.vm.machines import MACHINES

AUTO: Final = "auto"
RECORDS: Final = "boots"
BOOTED: Final = "yes"
NAMES: Final = {Kind.UML: "User-Mode Linux", Kind.QEMU: "QEMU"}
CPUINFO: Final = Path("/proc/cpuinfo")
DIGEST_LETTERS: Final = 12


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel that boots here."""

    kind: Kind
    kernel: Path
    instead_because: str = ""
    """Why the first kind was not taken; empty if it was."""


def wanted(name: str, patches: Sequence[Path] = ()) -> tuple[Kind, ...]:
    """Returns the kinds for `auto`, `uml` or `qemu`, best first. Raises ValueError for another name."""
    if name != AUTO:
        if name not in set(Kind):
            raise ValueError(f"kernel {name!r}, must be {', '.join([AUTO, *Kind])}")
        return (Kind(name),)
    # QEMU's kernel is Debian's own and has no patches.
    return (Kind.UML,) if patches else (Kind.UML, Kind.QEMU)


def choose(kinds: Sequence[Kind], patches: Sequence[Path] = ()) -> Choice:
    """Returns the first kernel in the cache that boots. If none does, raises KernelMissing with the reasons.

    Raises Unavailable where no kernel can run.
    """

    def take(kind: Kind) -> Path:
        kernel = kernels.find(kind, patches)
        reason = problem(kind, kernel)
        if reason:
            raise kernels.KernelMissing(reason)
        return kernel

    return _first(kinds, take, kernels.KernelMissing)


def provide(
    kinds: Sequence[Kind], say: Callable[[str], None], *, newest: bool = False, patches: Sequence[Path] = ()
) -> Choice:
    """Returns the first kernel that boots. Builds or downloads missing kernels, and retries kernels that did not boot.

    Raises Unavailable with the reason for each kind if no kind can run here.
    """

    def take(kind: Kind) -> Path:
        # All that is missing is said at once, before minutes of building; nothing where apt has no kernel to build.
        tools = kernels.tools_to_make(kind, patches)
        debian.require((*tools, *runner.TOOLS, *MACHINES[kind].tools), f"a VM of the kind {kind}")
        kernels.guest_program()
        kernel = kernels.provide(kind, say, newest=newest, patches=patches)
        reason = problem(kind, kernel, again=True)
        if reason:
            say(reason)
            raise debian.Unavailable(reason)
        return kernel

    return _first(kinds, take, debian.Unavailable)


def problem(kind: Kind, kernel: Path, *, again: bool = False) -> str:
    """Returns why the kernel does not boot on this machine; empty if it does.

    Boots the kernel unless a machine like this has done so. With `again`, also boots one that failed.
    """
    record = kernel / RECORDS / _machine()
    try:
        known = record.read_text(encoding="utf-8").strip()
    except OSError:
        known = ""
    if known == BOOTED:
        return ""
    if known and not again:
        return known
    request = runner.Request(
        command=("true",),
        kind=kind,
        kernel=kernel,
        folder=Path("/"),
        links=Links(count=0),
        timeout_s=runner.BOOT_TIMEOUT_S,
    )
    try:
        outcome = runner.run(request, output=lambda data: None, errors=lambda data: None)
    except debian.Unavailable as error:  # The program can be installed at any time, so this result is not kept.
        return str(error)
    reason = "" if outcome.code == 0 else f"{NAMES[kind]} does not boot here: {outcome.reason or outcome.code}"
    with contextlib.suppress(OSError):  # A cache that cannot be written is tried each time.
        _write(record, reason or BOOTED)
    return reason


def _first(kinds: Sequence[Kind], take: Callable[[Kind], Path], failure: type[Exception]) -> Choice:
    kernels.check_processor()
    reasons: list[str] = []
    for kind in kinds:
        try:
            return Choice(kind=kind, kernel=take(kind), instead_because="; ".join(reasons))
        except failure as error:
            reasons.append(str(error))
    raise failure("; ".join(reasons))


def _machine() -> str:
    """Identifies the processor's features and the host's kernel, which has to save their state."""
    fields = dict(
        line.partition(":")[::2] for line in CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    )
    known = {name.strip(): value.strip() for name, value in fields.items()}
    parts = [known.get("model name", ""), known.get("flags", ""), os.uname().release, os.uname().version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGEST_LETTERS]


def _write(path: Path, text: str) -> None:
    """Writes in one step, so that nobody reads half of the file."""
    path.parent.mkdir(exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
    os.replace(name, path)
