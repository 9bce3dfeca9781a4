# SPDX-License-Identifier: Apache-2.0
"""Confines ranks on one machine: each to a part of a core, and to a host of its own with a link as slow as asked.

`confined` is a control group of the kernel with a quota (Documentation/scheduler/sched-bwc.rst): ranks on few cores
then cannot lend each other time. `hosts_of` makes network namespaces. Both need root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.testbed.topology import Planes
from sennit.testbed.topology.switch import Impairer
from sennit.transport.errors import Unsupported

# A host's own queue at a limited link. It holds the host's sockets back.
QUEUE_BYTES: Final = 1 << 20


@contextlib.contextmanager
def hosts_of(
    count: int, *, round_trip_us: int = 0, rate_mbit: int | None = None
) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """For each host its namespace (`testbed.topology.namespace.enter`), and what its ranks need in the environment.

    `round_trip_us`: what the network adds to a round trip. `rate_mbit`: of each host's link, in each direction. One
    host: this machine as it is, an empty list.
    """
    if count == 1:
        yield []
        return
    with Planes(hosts=count, planes=1, mtu=9000, impairer=Impairer.AUTO) as planes:
        if round_trip_us:
            planes.delay(round_trip_us // 2)
        if rate_mbit is not None:
            planes.limit_rate(rate_mbit * 10**6, queue_bytes=QUEUE_BYTES)
        yield [
            # Ranks of a host share memory.
            (planes.netns_name(host), {**planes.environment(host), "SENNIT_TRANSPORT": "auto"})
            for host in range(count)
        ]


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
                (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}", encoding="utf-8")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="utf-8")
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="utf-8")
            (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        except OSError as error:
            raise Unsupported("confinement", f"{error.filename}: {error.strerror}") from None
        yield
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        with contextlib.suppress(OSError):
            folder.rmdir()
