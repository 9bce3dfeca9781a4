# SPDX-License-Identifier: Apache-2.0
"""What a library must offer to be measured, and which library serves which peer."""

import importlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from sennit.testbed.bench.cases import Case
from sennit.transport.codecs import COLLECTIVE_CODECS

# Names of the core with a codec: core-int8 codes everywhere, core-int8-between between hosts alone.
BETWEEN = "-between"
CODED = tuple(f"core-{name}" for name in COLLECTIVE_CODECS)
# Peer -> library. Peers of one library share its workers. The symmetric ones are sennit with symmetric memory,
# new-sizes is sennit with an allreduce whose size differs from call to call.
LIBRARIES = {
    "sennit": "torch",
    "symmetric": "torch",
    "new-sizes": "torch",
    "gloo": "torch",
    "sennit-core": "core",
    "core-symmetric": "core",
    "openmpi": "openmpi",
    "udp-bare": "udp_bare",
    **dict.fromkeys((*CODED, *(peer + BETWEEN for peer in CODED)), "core"),
}
# Library -> module and class. A module imports its library on load, so only that library's worker imports the module.
_CLASSES = {
    "torch": ("torch_library", "TorchLibrary"),
    "core": ("core_library", "CoreLibrary"),
    "openmpi": ("openmpi_library", "OpenMpiLibrary"),
    "udp_bare": ("udp_bare_library", "UdpBareLibrary"),
    "kernel_rc": ("kernel_rc_library", "KernelRcLibrary"),
}


class Library(Protocol):
    """A collective library on one rank. `peer` names one of the backends it offers."""

    rank: int

    def join(self, peer: str) -> None:
        """Makes the group. Every rank calls it."""

    def allocate(self, case: Case) -> None:
        """Allocates and touches the tensors of a case, and frees those of other cases."""

    def run(self, peer: str, case: Case, iterations: int) -> float:
        """Runs the case back to back. Returns the mean seconds per run."""

    def verify(self, peer: str, case: Case) -> None:
        """Runs the case once. Raises if the result is wrong."""

    def stop(self) -> None:
        """Leaves the groups."""


def make_library(name: str, arguments: Sequence[str]) -> Library:
    """The library of this worker. `arguments` come from the workers' command line."""
    module, class_name = _CLASSES[name]
    made = getattr(importlib.import_module(f"sennit.testbed.bench.transport.{module}"), class_name)(*arguments)
    return cast(Library, made)


def mean_seconds(operation: Callable[[], object], iterations: int) -> float:
    """Calls the operation back to back."""
    begin = time.perf_counter()
    for _ in range(iterations):
        operation()
    return (time.perf_counter() - begin) / iterations


def mean_seconds_in_flight(start: Callable[[], Callable[[], object]], in_flight: int, iterations: int) -> float:
    """Keeps up to `in_flight` operations started. `start` returns a function that waits for its operation."""
    begin = time.perf_counter()
    waiting: deque[Callable[[], object]] = deque()
    for _ in range(iterations):
        if len(waiting) == in_flight:
            waiting.popleft()()
        waiting.append(start())
    for wait in waiting:
        wait()
    return (time.perf_counter() - begin) / iterations
