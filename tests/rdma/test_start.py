# SPDX-License-Identifier: Apache-2.0
"""The errors of a rank with verbs at its start, when a device or a pair of devices is unsuitable."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sennit.testbed.vm import links
from sennit.testbed.vm.guest_command import execute
from sennit.transport import errors
from sennit.transport.meeting.rdma_rails import find_rdma_rails
from tests.ranks import command
from tests.transport.collective_scenarios import reductions
from tests.transport.processes import act, play

pytestmark = pytest.mark.rdma

DEADLINE_S = 120.0


@pytest.mark.usefixtures("unconnected")
def test_an_interface_that_is_down_is_named_with_what_to_do() -> None:
    with pytest.raises(errors.ConfigError, match=r"interface 'cold0': port 1 of cold is down.*ip link set cold0 up"):
        find_rdma_rails(["cold0"])


def test_an_interface_without_a_device_is_told_what_there_is() -> None:
    with pytest.raises(
        errors.ConfigError, match=r"interface 'lo' has no address that an RDMA device serves.*rxe0 port"
    ):
        find_rdma_rails(["lo"])


def test_little_locked_memory_ends_the_start() -> None:
    # The limit counts only without this capability, which root has.
    limited = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=1048576"]
    code = "from sennit.transport.meeting.rdma_rails import find_rdma_rails; find_rdma_rails()"
    ended = subprocess.run(
        [*limited, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "Unsupported: verbs: at most 1024 KiB of memory may be locked" in ended.stderr, ended.stderr
    assert "ulimit -l unlimited" in ended.stderr


def test_ends_of_different_mtu_use_the_smaller_and_say_so(tmp_path: Path) -> None:
    def set_mtu(mtu_bytes: int) -> None:
        execute(f"ip link set {links.netdev(1)} mtu {mtu_bytes}")

    set_mtu(1500)
    try:
        ranks = [
            subprocess.Popen(
                command(partial(act, partial(play, [reductions], 1), rank, 2, tmp_path)),
                env={
                    **os.environ,
                    "SENNIT_TRANSPORT": "verbs",
                    "SENNIT_INTERFACES": links.netdev(rank),
                    "SENNIT_HOST_ID": f"host{rank}",
                    "SENNIT_TIMEOUT_S": "60",
                    "HOSTS": "host0,host1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    finally:
        set_mtu(links.MTU_DEFAULT)
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "RuntimeWarning: verbs: rank 1: packets of 4096 bytes on rxe0" in outputs[0]
    assert "RuntimeWarning: verbs: rank 0: packets of 1024 bytes on rxe1" in outputs[1]
    assert all("give both interfaces, and what is between them, the same MTU" in output for output in outputs)
