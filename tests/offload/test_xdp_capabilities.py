# SPDX-License-Identifier: Apache-2.0
"""A rank at XDP needs three capabilities, and no other right of root (examples/cluster/kubernetes/xdp.yaml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sennit.ebpf.kernel_features import CAPABILITIES

pytestmark = [pytest.mark.root, pytest.mark.needs("arena", "native-xdp")]

LOADER = Path(__file__).with_name("xdp_loader.py")
# In a network namespace of its own, which ends with the command.
INTERFACE = (
    "ip link add sennit0 type veth peer name sennit1 && ip address add 192.0.2.1/24 dev sennit0 && "
    "ip link set sennit0 up && ip link set sennit1 up"
)


def load(capabilities: set[str]) -> subprocess.CompletedProcess[str]:
    """Runs the loader as root with these capabilities and no others, and with what a user may lock of memory."""
    left = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in sorted(capabilities))])
    limits = f"setpriv --inh-caps={left} --bounding-set={left} --no-new-privs prlimit --memlock=65536"
    script = f'{INTERFACE} && exec {limits} "$@"'
    command = ["unshare", "--net", "bash", "-c", script, "bash", sys.executable, str(LOADER), "sennit0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_three_capabilities_are_enough() -> None:
    done = load(set(CAPABILITIES))
    assert done.stdout == "attached\n", done.stderr


@pytest.mark.parametrize("name", CAPABILITIES)
def test_each_of_them_is_needed_and_named(name: str) -> None:
    done = load(set(CAPABILITIES) - {name})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"this process lacks {name}; the target cpu needs none")
