# SPDX-License-Identifier: Apache-2.0
"""Which rings of tests must run on this machine, and whether they did: the end of `make test`.

    python -m sennit.testbed.rings build/rings

Each runner leaves a report there in JUnit's form. A test belongs to the ring that its property `ring` names, else to
that of its report's name. A ring that must run and has no test that passed makes the status 1. Outside of CI a ring is
excused by anything that this machine lacks, in CI (CI=true) only by what no package brings: apt-packages.txt is
installed there.
"""

from __future__ import annotations

import collections
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    Ring(name="rdma", needs=("vm",), machine=_no_kernel_boots, marks=frozenset({"rdma"})),
    Ring(name="vm", needs=("vm",), machine=_no_kernel_boots, marks=frozenset({"vm"})),
    Ring(name="trace", needs=("bcc",), machine=lambda: capabilities.missing("root"), marks=frozenset({"bcc"})),
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
    Ring(name="fuzz", needs=("clang",)),
)


def of_test(marks: Collection[str]) -> str:
    """The ring of a Python test with these markers and capabilities that it needs."""
    return next((ring.name for ring in RINGS if ring.marks.intersection(marks)), INNER)


def counts(folder: Path) -> dict[str, collections.Counter[str]]:
    """How many tests of each ring passed, failed and were skipped, by the reports in `folder`.

    Raises ParseError for a report that is cut off.
    """
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            names = [str(entry.get("value")) for entry in case.iter("property") if entry.get("name") == PROPERTY]
            ends = {child.tag for child in case}
            end = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            found[names[0] if names else path.stem][end] += 1
    return found


def excuse(ring: Ring, *, in_ci: bool) -> str | None:
    """Why the ring need not run here; None if it must."""
    return ring.machine() if in_ci else capabilities.missing(*ring.needs)


def report(found: Mapping[str, Mapping[str, int]], *, in_ci: bool) -> tuple[list[str], bool]:
    """A line for each ring, and whether all that must run did."""
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
    return lines, complete


def main(folder: Path) -> int:
    lines, complete = report(counts(folder), in_ci=os.environ.get("CI") == "true")
    print("\n".join(f"test: {line}" for line in lines))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
