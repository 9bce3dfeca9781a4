# SPDX-License-Identifier: Apache-2.0
"""Gives each process a part of a core that it cannot exceed: then ranks on few cores cannot lend each other time.

A control group of the kernel for each process, with a quota (Documentation/scheduler/sched-bwc.rst). Needs root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.transport.errors import Unsupported

PERIOD_US: Final = 5_000
ROOT: Final = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def confined(share: float, *, name: str, root: Path = ROOT) -> Iterator[None]:
    """Inside, this process and its threads get at most this share of a core. Raises `Unsupported`."""
    second = (root / "cgroup.controllers").exists()
    parent = root if second else root / "cpu"
    folder, quota_us = parent / f"sennit-bench-{os.getpid()}-{name}", round(PERIOD_US * share)
    try:
        folder.mkdir()
    except OSError as error:
        raise Unsupported("confinement", f"no control group in {parent} ({error.strerror}); it needs root") from None
    try:
        try:
            if second:
                (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise Unsupported("confinement", f"{error.filename}: {error.strerror}") from None
        yield
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            folder.rmdir()
