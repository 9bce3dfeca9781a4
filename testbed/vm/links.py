# SPDX-License-Identifier: Apache-2.0
"""RoCE links inside a VM: pairs of rxe devices on the two ends of a veth cable, and netem on what they send.

rxe works in the first network namespace only, so both ends are in one namespace. There the kernel would deliver packets
directly, past netem. Routing rules send packets between the two ends out through the cable. The local table, which
knows the direct way, comes after these rules. Neighbours are set from the start, so no first packet has to wait.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from sennit.testbed.vm.job import Record

LINKS_MAX: Final = 64
MTU_MIN: Final = 1280
"""The least MTU of an IPv6 link (RFC 8200, 5)."""
MTU_MAX: Final = 65535
# rxe has 4,096-byte packets if the link has room for them and their headers.
MTU_DEFAULT: Final = 4200
# netem queues the packets that it delays, up to this limit. Its own default of 1,000 is a few megabytes.
NETEM_LIMIT_PACKETS: Final = 10_000
LOCAL_TABLE_PREFERENCE: Final = 30_000
FIRST_PREFERENCE: Final = 100
FIRST_TABLE: Final = 1_000

_ONE_DEVICE = re.compile(r"rxe(?P<number>\d+)=(?P<netem>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a VM. Link k joins the devices rxe(2k) and rxe(2k+1)."""

    count: int = 1
    mtu: int = MTU_DEFAULT
    netem: tuple[str, ...] = ()
    """Settings of tc-netem(8) for every device, or for one device as in `rxe3=loss 1%`. The last one counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.count <= LINKS_MAX:
            raise ValueError(f"{self.count} links, must be 0 to {LINKS_MAX}")
        if not MTU_MIN <= self.mtu <= MTU_MAX:
            raise ValueError(f"mtu {self.mtu}, must be {MTU_MIN} to {MTU_MAX}")
        self.netem_by_device()

    @property
    def devices(self) -> range:
        return range(2 * self.count)

    def netem_by_device(self) -> dict[int, str]:
        settings: dict[int, str] = {}
        for text in self.netem:
            match = _ONE_DEVICE.fullmatch(text)
            if "=" in text and match is None:
                raise ValueError(f"netem {text!r}, must be settings of tc-netem(8), or rxeN=settings")
            numbers = [int(match["number"])] if match else list(self.devices)
            words = (match["netem"] if match else text).split()
            for number in numbers:
                if number not in self.devices:
                    raise ValueError(
                        f"netem {text!r}: {self.count} links have the devices rxe0 to rxe{len(self.devices) - 1}"
                    )
            if not words:
                raise ValueError(f"netem {text!r} sets nothing; an example: 'loss 1%'")
            settings.update(dict.fromkeys(numbers, " ".join(with_limit(words))))
        return settings

    def records(self) -> list[Record]:
        """Returns the guest's steps to make the links. After them the GIDs exist."""
        steps: list[Record] = [
            ("write", "/proc/sys/net/ipv4/conf/all/rp_filter", "0"),
            ("write", "/proc/sys/net/ipv4/conf/default/rp_filter", "0"),
            # Packets from the cable have a source address of this same host.
            ("write", "/proc/sys/net/ipv4/conf/default/accept_local", "1"),
            ("write", "/proc/sys/net/ipv4/conf/default/arp_ignore", "1"),
            # Do not wait a second for somebody who already has the address.
            ("write", "/proc/sys/net/ipv6/conf/default/accept_dad", "0"),
            ("run", self._addresses(), "ip", "-batch", "-"),
        ]
        if self.count == 0:
            return steps
        steps += [
            ("run", self._routes(4), "ip", "-4", "-batch", "-"),
            ("run", self._routes(6), "ip", "-6", "-batch", "-"),
            ("run", self._devices(), "rdma", "-b", "-"),
        ]
        netem = self.netem_by_device()
        if netem:
            commands = [f"qdisc add dev {netdev(number)} root netem {text}" for number, text in sorted(netem.items())]
            steps.append(("run", _lines(commands), "tc", "-batch", "-"))
        for number in self.devices:
            pattern = f"/sys/class/infiniband/rxe{number}/ports/1/gids/*"
            steps += [("await", pattern, gid(number, version)) for version in (4, 6)]
        return steps

    def _addresses(self) -> str:
        commands = ["link set lo up"]
        for number in self.devices[::2]:
            near, far = (f"mtu {self.mtu} address {mac_address(device)}" for device in (number, number + 1))
            commands.append(f"link add {netdev(number)} {near} type veth peer name {netdev(number + 1)} {far}")
        for number in self.devices:
            commands += [f"addr add {address(number, 4)}/24 dev {netdev(number)}"]
            commands += [f"addr add {address(number, 6)}/64 dev {netdev(number)} nodad"]
            commands += [f"link set {netdev(number)} up"]
        return _lines(commands)

    def _routes(self, version: int) -> str:
        commands = []
        for number in self.devices:
            peer, table = address(number ^ 1, version), FIRST_TABLE + number
            commands += [
                f"neigh replace {peer} lladdr {mac_address(number ^ 1)} dev {netdev(number)} nud permanent",
                f"route add {peer} dev {netdev(number)} src {address(number, version)} table {table}",
                f"rule add pref {FIRST_PREFERENCE + number} iif lo to {peer} lookup {table}",
            ]
        return _lines([*commands, f"rule add pref {LOCAL_TABLE_PREFERENCE} lookup local", "rule del pref 0"])

    def _devices(self) -> str:
        return _lines([f"link add rxe{number} type rxe netdev {netdev(number)}" for number in self.devices])


def with_limit(words: list[str]) -> list[str]:
    """Adds a queue limit for delayed packets to settings of tc-netem(8) that set none."""
    return words if "limit" in words else ["limit", str(NETEM_LIMIT_PACKETS), *words]


def netdev(number: int) -> str:
    """Returns the interface of the device rxe<number>."""
    return f"roce{number}"


def address(number: int, version: int) -> str:
    """Returns a device's address. Each link has its own network (RFC 1918; RFC 4193)."""
    link, end = divmod(number, 2)
    return f"10.77.{link}.{end + 1}" if version == 4 else f"fd5e:77:{link + 1:x}::{end + 1}"


def mac_address(number: int) -> str:
    return f"02:5e:77:00:00:{number:02x}"


def gid(number: int, version: int) -> str:
    """Returns a device's GID as sysfs writes it.

    It is the device's IPv6 address, or its IPv4 address mapped into one (RFC 4291, 2.5.5.2).
    """
    text = address(number, version)
    # Not `exploded`: since Python 3.13 it ends with the IPv4 address as it is.
    return ipaddress.IPv6Address(f"::ffff:{text}" if version == 4 else text).packed.hex(":", 2)


def _lines(commands: list[str]) -> str:
    return "".join(f"{command}\n" for command in commands)
