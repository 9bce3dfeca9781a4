# SPDX-License-Identifier: Apache-2.0
"""The file systems in memory that Docker gives a container, for tests that enter one without Docker.

Both kinds are mounted `noexec` unless an option says `exec`: moby, daemon/oci_linux.go (`withMounts`, `setupIpcDirs`).
Podman does the same.
"""

from __future__ import annotations

import argparse
import shlex

SHM = "/dev/shm"
DEFAULTS = "noexec,nosuid,nodev,mode=1777"


def script(options: str, root: str = "") -> str:
    """Lines of shell that mount them below `root`, for the options of `docker create` that a workflow has.

    Raises SystemExit for an option that Docker knows and this does not.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shm-size", default="64m")
    parser.add_argument("--tmpfs", action="append", default=[])
    parser.add_argument("--privileged", action="store_true")
    found = parser.parse_args(shlex.split(options))
    mounts = {SHM: f"size={found.shm_size}"}
    for text in found.tmpfs:  # An own one at /dev/shm takes the place of Docker's.
        path, _, own = text.partition(":")
        mounts[path] = own
    lines = []
    for path, own in mounts.items():
        asked = ",".join(filter(None, (DEFAULTS, own)))  # of two that contradict each other, mount takes the later one
        lines += [f'mount -t tmpfs -o {shlex.quote(asked)} tmpfs "{root}{path}"']
    return "\n".join(lines)
