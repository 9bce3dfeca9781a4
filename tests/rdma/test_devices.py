# SPDX-License-Identifier: Apache-2.0
"""The VM's promises to all tests here: two active devices, RoCE v2 over IPv4 and IPv6, 4,096-byte packets."""

from __future__ import annotations

import json
import subprocess
from types import ModuleType
from typing import Any

import pytest

from sennit.testbed.vm import links

pytestmark = pytest.mark.rdma

DEVICES = (0, 1)


@pytest.fixture(params=DEVICES)
def context(request: pytest.FixtureRequest) -> Any:
    device = pytest.importorskip("pyverbs.device")
    with device.Context(name=f"rxe{request.param}") as opened:
        yield opened


def test_ports_are_active_ethernet_with_the_greatest_packets(context: Any) -> None:
    ibv = pytest.importorskip("pyverbs.enums")
    port = context.query_port(1)
    assert port.state == ibv.IBV_PORT_ACTIVE
    assert port.link_layer == ibv.IBV_LINK_LAYER_ETHERNET
    assert port.active_mtu == ibv.IBV_MTU_4096


@pytest.mark.parametrize("ip_version", [4, 6])
@pytest.mark.parametrize("device", DEVICES)
def test_addresses_are_gids_of_roce_v2(endpoint: ModuleType, device: int, ip_version: int) -> None:
    ibv = pytest.importorskip("pyverbs.enums")
    module = pytest.importorskip("pyverbs.device")
    with module.Context(name=f"rxe{device}") as context:
        index = endpoint.gid_index(context, links.gid(device, ip_version))
        assert context.query_gid_ex(1, index).gid_type == ibv.IBV_GID_TYPE_ROCE_V2


def test_queue_pairs_of_both_kinds_fit(context: Any) -> None:
    attributes = context.query_device()
    assert attributes.max_qp >= 1024
    assert attributes.max_srq >= 1
    assert attributes.max_sge >= 2


def test_another_program_sees_the_same_devices() -> None:
    shown = subprocess.run(["rdma", "-j", "link", "show"], check=True, capture_output=True, timeout=60).stdout
    found = {link["ifname"]: (link["state"], link["netdev"]) for link in json.loads(shown)}
    assert found == {f"rxe{device}": ("ACTIVE", links.netdev(device)) for device in DEVICES}
