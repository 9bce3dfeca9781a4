# SPDX-License-Identifier: Apache-2.0
"""Disks of another host: the VM's kernel has both ends of NVMe/TCP."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from sennit.offload.opi.nvme_target import Port, run
from sennit.testbed.scenarios import runner
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.results import Status
from sennit.testbed.topology import Impairer, Planes, nvme

pytestmark = [pytest.mark.rdma, pytest.mark.needs("nvme-tcp")]


def test_a_disk_of_one_host_is_one_of_another_until_it_is_pulled(tmp_path: Path) -> None:
    file, place = tmp_path / "disk.img", tmp_path / "place"
    place.mkdir()
    nvme.make_disk(file, 16 << 20)
    with contextlib.ExitStack() as stack:
        planes = stack.enter_context(Planes(hosts=2, planes=1, impairer=Impairer.NETEM))
        port = Port(planes.ipv4_addresses(1)[0])
        port.begin()
        stack.callback(port.end)
        local = stack.enter_context(nvme.looped(file))
        export = nvme.Export(port, local, "disk")
        stack.callback(export.end)
        planes.within(1, export.begin)
        connection = nvme.Connection(port, export.name, "host0")
        stack.callback(connection.end)
        device = planes.within(0, connection.begin)
        with nvme.mounted(device, place):
            (place / "written").write_bytes(b"over the network")
        with nvme.looped(file) as same, nvme.mounted(same, place):  # the target alone has `local` now
            assert (place / "written").read_bytes() == b"over the network"
        export.pull()
        with pytest.raises(OSError, match=str(device)):
            run("mount", str(device), str(place))


def test_a_target_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=1, impairer=Impairer.NETEM) as planes:
        nobody = nvme.Export(Port(planes.ipv4_addresses(1)[0]), tmp_path / "none", "none")
        with pytest.raises(OSError, match="refused"):
            planes.within(0, nvme.Connection(nobody.port, nobody.name, "host0").begin)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_pulled_disk_is_named_and_a_new_one_gives_the_same_weights(seed: int, tmp_path: Path) -> None:
    scenario = SCENARIOS["remote-disk"].shortened()
    case = runner.run_case(scenario, short=True, strict=False, seed=seed, folder=tmp_path, say=lambda what: None)
    assert case.status == Status.PASSED, f"{case.reason}\n{case.log_tails}"
