# SPDX-License-Identifier: Apache-2.0
"""Which addresses of RDMA devices the verbs port uses: one rail a port of one device."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from sennit.transport.errors import ConfigError, Unsupported


@dataclass(frozen=True, kw_only=True)
class RdmaAddress:
    """A RoCE v2 address that a device serves."""

    device: str
    port: int
    address: str
    interface: str
    is_active: bool

    def __str__(self) -> str:
        return f"{self.device} port {self.port} {self.address} on {self.interface}{'' if self.is_active else ', down'}"


def find_rdma_rails(wanted: Sequence[str] = ()) -> list[str]:
    """The rails of this machine: addresses of the interfaces named, or of the first device that has any."""
    from sennit.transport import _core

    names = dict(socket.if_nameindex())
    known = [
        RdmaAddress(device=device, port=port, address=address, interface=names.get(index, ""), is_active=is_active)
        for device, port, address, index, is_active, _ in _core.rdma_addresses()
    ]
    return [rail.address for rail in choose_rdma_rails(known, wanted)]


def choose_rdma_rails(known: Sequence[RdmaAddress], wanted: Sequence[str]) -> list[RdmaAddress]:
    """Of each interface named, in their order, its best address; else of each active port of the first device."""
    listed = "; ".join(map(str, known)) or "none"
    # A link-local address has a scope, which rendezvous does not carry.
    usable = [one for one in known if not ip_address(one.address).is_link_local]
    if not usable:
        raise Unsupported(
            "verbs",
            "no RDMA device here has a RoCE v2 address but link-local ones (see `rdma link`; soft-RoCE: `rdma link add "
            f"rxe0 type rxe netdev NAME`); there are: {listed}",
        )
    if wanted:
        rails = []
        for name in wanted:
            served = [one for one in usable if one.interface == name]
            if not served:
                raise ConfigError(f"interface {name!r} has no address that an RDMA device serves; there are: {listed}")
            rails.append(_best(served))
        return rails
    active = [one for one in usable if one.is_active]
    if not active:
        raise Unsupported("verbs", f"all ports of RDMA devices are down (ip link set NAME up); there are: {listed}")
    device = active[0].device
    ports = dict.fromkeys(one.port for one in active if one.device == device)
    return [_best([one for one in active if (one.device, one.port) == (device, port)]) for port in ports]


def _best(addresses: Sequence[RdmaAddress]) -> RdmaAddress:
    """IPv6 first: its packets have no identification under the ICRC (docs/wire.md)."""
    return next((one for one in addresses if ":" in one.address), addresses[0])
