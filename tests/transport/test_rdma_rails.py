# SPDX-License-Identifier: Apache-2.0
"""Which addresses of RDMA devices become rails, and what is said where none can."""

from __future__ import annotations

import pytest

from sennit.transport.errors import ConfigError, DeviceError, Unsupported
from sennit.transport.rdma_rails import RdmaAddress, choose_rdma_rails, find_rdma_rails


def served(device: str, address: str, interface: str, *, port: int = 1, is_active: bool = True) -> RdmaAddress:
    return RdmaAddress(device=device, port=port, address=address, interface=interface, is_active=is_active)


LINK_LOCAL = served("rxe0", "fe80::1", "eth0")
V4 = served("rxe0", "10.0.0.1", "eth0")
V6 = served("rxe0", "fd00::1", "eth0")
OTHER = served("rxe1", "fd00:1::1", "eth1")
SECOND_PORT = served("rxe0", "10.0.1.1", "eth2", port=2)
DOWN = served("rxe0", "fd00::1", "eth0", is_active=False)


@pytest.mark.parametrize(
    ("known", "wanted", "rails"),
    [
        ([LINK_LOCAL, V4, V6, OTHER], [], [V6]),
        ([LINK_LOCAL, V4], [], [V4]),
        ([LINK_LOCAL, V4, V6, SECOND_PORT, OTHER], [], [V6, SECOND_PORT]),
        ([V4, V6, OTHER], ["eth1"], [OTHER]),
        ([V4, SECOND_PORT, V6], ["eth2", "eth0"], [SECOND_PORT, V6]),
        ([DOWN, OTHER], [], [OTHER]),
    ],
)
def test_the_rails_are_those_of_one_device(
    known: list[RdmaAddress], wanted: list[str], rails: list[RdmaAddress]
) -> None:
    assert choose_rdma_rails(known, wanted) == rails


@pytest.mark.parametrize(
    ("known", "wanted", "error", "message"),
    [
        ([], [], Unsupported, "rdma link add rxe0 type rxe netdev NAME.*there are: none"),
        ([LINK_LOCAL], [], Unsupported, "no RDMA device here has a RoCE v2 address but link-local ones"),
        ([DOWN], [], Unsupported, "all ports of RDMA devices are down.*rxe0 port 1 fd00::1 on eth0, down"),
        ([V6], ["eth7"], ConfigError, "interface 'eth7' has no address that an RDMA device serves; there are: rxe0"),
    ],
)
def test_without_a_rail_the_error_says_what_there_is(
    known: list[RdmaAddress], wanted: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_rdma_rails(known, wanted)


def test_a_machine_without_devices_says_what_it_lacks() -> None:
    core = pytest.importorskip("sennit.transport._core", reason="the native core is not built")
    try:
        known, lack = core.rdma_addresses(), "no RDMA device here has a RoCE v2 address"
    except DeviceError:
        known, lack = [], "install libibverbs"
    if known:
        pytest.skip("this machine has RDMA devices")
    with pytest.raises((Unsupported, DeviceError), match=lack):
        find_rdma_rails()
