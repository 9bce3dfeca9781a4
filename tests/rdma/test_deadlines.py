# SPDX-License-Identifier: Apache-2.0
"""No wait of these tests is without a deadline, though the kernel keeps who removes a device that has a user."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from sennit.testbed.vm.guest_command import execute, wait_for_kept
from sennit.transport.communicator import Communicator
from sennit.transport.config import TransportKind

pytestmark = pytest.mark.rdma


def test_a_command_that_the_kernel_keeps_is_given_up_with_the_kernels_stacks() -> None:
    device = pytest.importorskip("pyverbs.device")
    execute("ip link add held0 type dummy")
    execute("rdma link add held type rxe netdev held0")
    wanted = r"^'rdma link delete held' did not end within 0\.5 s(.|\n)*task:rdma (.|\n)*ib_uverbs_remove_one"
    with device.Context(name="held"), pytest.raises(TimeoutError, match=wanted):
        execute("rdma link delete held", timeout_s=0.5)
    # Nobody uses the device any more, so the command ends after all.
    wait_for_kept()
    assert not Path("/sys/class/infiniband/held").exists()
    execute("ip link del held0")


def test_the_error_of_a_group_does_not_keep_its_device(mixed: ModuleType, groups: ModuleType, tmp_path: Path) -> None:
    def fail(group: Communicator) -> None:
        group.barrier()
        raise ZeroDivisionError

    near = groups.Seat(transport=TransportKind.VERBS, interface=mixed.NEAR, host="near")
    far = groups.Seat(transport=TransportKind.UDP, interface=mixed.FAR, host="far", namespace=mixed.FAR)
    with pytest.raises(ZeroDivisionError) as error:
        groups.run([near, far], tmp_path, fail)
    execute(f"rdma link delete {mixed.NEAR_DEVICE}", timeout_s=5.0)
    assert error.value.__traceback__ is not None
