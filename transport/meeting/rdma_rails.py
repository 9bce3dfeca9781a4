# SPDX-License-Identifier: Apache-2.0
"""Finds the addresses of RDMA devices that the verbs port uses, one rail for each interface, and checks pairs."""

from __future__ import annotations

import ipaddress
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sennit.transport.errors import ConfigError, MismatchError, Unsupported
from sennit.transport.meeting.devices import (
    PARTITION_MASK,
    DevicePort,
    Gid,
    Problem,
    absence_problems,
    locked_memory_problems,
    pair_problems,
    port_problems,
    remedies,
    state_name,
    whats,
)
from sennit.transport.meeting.rails import Rail

Record: TypeAlias = dict[str, Any]
IP_VERSIONS: Final = (6, 4)  # The order in which rails are paired (docs/reference/wire.md, "Offer")


@dataclass(frozen=True, kw_only=True)
class RdmaRail(Rail):
    """A usable RoCE v2 address, and the port that serves it."""

    port: DevicePort

    def __str__(self) -> str:
        return f"{self.port.device} port {self.port.number} {self.address} on {self.interface}"

    def as_record(self) -> Record:
        """Returns the record that peers compare with their own."""
        return {
            "device": self.port.device,
            "mtu_bytes": self.port.mtu_bytes,
            "partitions": list(self.port.partitions),
            "address": self.address,
        }


def find_rdma_rails(wanted: Sequence[str] = ()) -> list[RdmaRail]:
    """Returns the rails of this machine: addresses of the named interfaces, or of the first device that has any."""
    ports, unreadable = read_ports()
    rails = choose_rdma_rails(ports, wanted, unreadable)
    if problems := locked_memory_problems():
        raise Unsupported("verbs", _text(problems))
    return rails


def read_ports() -> tuple[list[DevicePort], list[Problem]]:
    """Returns the ports of every device, and the errors of devices that cannot be read."""
    from sennit.transport import _core

    interfaces = dict(socket.if_nameindex())
    ports, unreadable = [], []
    for device, number, state, is_ethernet, mtu_bytes, partitions, gids, problem in _core.rdma_ports():
        if number == 0:
            remedy = "give this user, or this container, /dev/infiniband"
            unreadable.append(Problem(what=f"{device} {problem}", remedy=remedy))
            continue
        ports.append(
            DevicePort(
                device=device,
                number=number,
                state=state_name(state),
                is_ethernet=is_ethernet,
                mtu_bytes=mtu_bytes,
                gids=tuple(
                    Gid(index=index, address=ipaddress.ip_address(address), interface=interfaces.get(interface, ""))
                    for index, address, interface in gids
                ),
                partitions=tuple(sorted({key & PARTITION_MASK for key in partitions} - {0})),
            )
        )
    return ports, unreadable


def choose_rdma_rails(
    ports: Sequence[DevicePort], wanted: Sequence[str], unreadable: Sequence[Problem] = ()
) -> list[RdmaRail]:
    """Returns the best address of each named interface, in order; else of each usable port of the first device."""
    if not ports:
        raise Unsupported("verbs", _text(unreadable or absence_problems()))
    # A link-local address has a scope, which rendezvous does not carry.
    rails = [
        RdmaRail(interface=gid.interface, address=str(gid.address), port=port)
        for port in ports
        for gid in port.gids
        if not gid.is_link_local
    ]
    if wanted:
        return [_best(_of_interface(name, rails, ports)) for name in wanted]
    usable = [rail for rail in rails if not port_problems(rail.port)]
    if not usable:
        found = [problem for port in ports for problem in port_problems(port)] + list(unreadable)
        remedy = "give an interface below one an address of another scope"
        local = Problem(what="all addresses of RDMA devices are link-local", remedy=remedy)
        raise Unsupported("verbs", _text(found or [local]))
    device = usable[0].port.device
    numbers = dict.fromkeys(rail.port.number for rail in usable if rail.port.device == device)
    return [
        _best([rail for rail in usable if (rail.port.device, rail.port.number) == (device, number)])
        for number in numbers
    ]


def check_pair(near: Sequence[Record], far: Sequence[Record], peer: int) -> None:
    """Compares this rank's rails with a peer's. Both are records.

    Raises MismatchError if no packet could arrive. Warns if packets are smaller than they could be.
    """
    for version in IP_VERSIONS:
        for ours, theirs in zip(_of_version(near, version), _of_version(far, version), strict=False):
            for problem in pair_problems(ours, theirs):
                text = f"rank {peer}: {_text([problem])}"
                if problem.is_fatal:
                    raise MismatchError(f"verbs: {text}")
                warnings.warn(f"verbs: {text}", RuntimeWarning, stacklevel=2)


def _of_version(records: Sequence[Record], version: int) -> list[DevicePort]:
    ports = []
    for record in records:
        address = ipaddress.ip_address(record["address"])
        if address.version == version:
            ports.append(
                DevicePort(
                    device=f"{record['device']} {address}",
                    number=0,
                    state="active",
                    is_ethernet=True,
                    mtu_bytes=record["mtu_bytes"],
                    gids=(Gid(index=0, address=address, interface=""),),
                    partitions=tuple(record["partitions"]),
                )
            )
    return ports


def _of_interface(name: str, rails: Sequence[RdmaRail], ports: Sequence[DevicePort]) -> list[RdmaRail]:
    usable = [rail for rail in rails if rail.interface == name and not port_problems(rail.port)]
    if usable:
        return usable
    above = [port for port in ports if any(gid.interface == name for gid in port.gids)]
    if problems := [problem for port in above for problem in port_problems(port)]:
        raise ConfigError(f"interface {name!r}: {_text(problems)}")
    listed = "; ".join(map(str, rails)) or whats([problem for port in ports for problem in port_problems(port)])
    raise ConfigError(f"interface {name!r} has no address that an RDMA device serves; there are: {listed}")


def _best(rails: Sequence[RdmaRail]) -> RdmaRail:
    """IPv6 first: its packets have no identification field under the ICRC (docs/reference/wire.md)."""
    return next((rail for rail in rails if ":" in rail.address), rails[0])


def _text(problems: Sequence[Problem]) -> str:
    return f"{whats(problems)} ({remedies(problems)})"
