# SPDX-License-Identifier: Apache-2.0
"""A /dev/shm that is too small, in a mount namespace: the error tells the needed and the available bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

pytestmark = [pytest.mark.root, pytest.mark.needs("root")]

OFFER = """
from sennit.transport import _core
try:
    _core.Communicator(0, 8, timeout_s=1.0, seed=1).shm_offer()
except OSError as error:
    print(error)
"""


def test_the_error_has_the_size_that_is_needed_and_what_is_there() -> None:
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-ec", script, sys.executable, OFFER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("/dev/shm is too small for this rank's inboxes: "), done.stdout
    sizes, _, reason = done.stdout.partition(": ")[2].partition(" free: ")
    needed, _, there = sizes.partition(" needed, ")
    assert int(needed.removesuffix(" MiB")) > 1
    assert there == "1 MiB of 1 MiB"
    assert reason.startswith("No space left on device")
