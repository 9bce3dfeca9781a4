# SPDX-License-Identifier: Apache-2.0
"""Two hosts in network namespaces and one cable between them, with nothing in between that costs time."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pyroute2 import IPRoute

from sennit.closing import Closing
from sennit.testbed.topology import namespace

NEAR: Final = "near"
FAR: Final = "far"
NEAR_ADDRESS: Final = "fd5e:4e17:0:ff::1"
FAR_ADDRESS: Final = "fd5e:4e17:0:ff::2"
NEAR_HARDWARE_ADDRESS: Final = "02:5e:ff:00:00:01"
FAR_HARDWARE_ADDRESS: Final = "02:5e:ff:00:00:02"
_PREFIX_BITS: Final = 64
_IFA_F_NODAD: Final = 0x02  # linux/if_addr.h
_IFF_UP: Final = 1  # linux/if.h
# IF_OPER of linux/if.h by which the worker has not come yet. The loopback interface is UNKNOWN for ever.
_WAITING: Final = ("DOWN", "LOWERLAYERDOWN", "DORMANT")
_LINKS_TIMEOUT_S: Final = 30.0
# linux/sockios.h, linux/ethtool.h
_SIOCETHTOOL: Final = 0x8946
_ETHTOOL_SGRO: Final = 0x2C

_serials = itertools.count()
Result = TypeVar("Result")


class Cable(Closing):
    """An interface `near` in one namespace, `far` in another. Needs root."""

    def __init__(self, *, mtu_bytes: int) -> None:
        """Makes the far interface join packets (GRO). Without that, or an XDP program, veth refuses frames of XDP."""
        prefix = namespace.unique_prefix(next(_serials))
        self._names = {NEAR: f"{prefix}-{NEAR}", FAR: f"{prefix}-{FAR}"}
        self._stack = contextlib.ExitStack()
        try:
            for name in self._names.values():
                namespace.create(name)
                self._stack.callback(namespace.remove, name)
            self.within(NEAR, self._join, mtu_bytes)
            for end, address in ((NEAR, NEAR_ADDRESS), (FAR, FAR_ADDRESS)):
                self.within(end, _set_up, end, address)
            for end in (NEAR, FAR):
                self.within(end, await_links)
            self.within(FAR, _join_packets, FAR)
        except BaseException:
            self.close()
            raise

    def within(self, end: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls the function in a thread at that end."""
        return namespace.within(self._names[end], function, *arguments)

    def close(self) -> None:
        self._stack.close()

    def _join(self, mtu_bytes: int) -> None:
        far = os.open(namespace.path_of(self._names[FAR]), os.O_RDONLY | os.O_CLOEXEC)
        try:
            with IPRoute() as route:
                peer = {"ifname": FAR, "address": FAR_HARDWARE_ADDRESS, "mtu": mtu_bytes, "net_ns_fd": far}
                route.link("add", ifname=NEAR, kind="veth", address=NEAR_HARDWARE_ADDRESS, mtu=mtu_bytes, peer=peer)
        finally:
            os.close(far)


def _set_up(interface: str, address: str) -> None:
    with IPRoute() as route:
        index = socket.if_nametoindex(interface)
        route.addr("add", index=index, address=address, prefixlen=_PREFIX_BITS, flags=_IFA_F_NODAD)
        route.link("set", index=index, state="up")


def _join_packets(interface: str) -> None:
    # struct ethtool_value, and a struct ifreq that points to it.
    value = (ctypes.c_uint32 * 2)(_ETHTOOL_SGRO, 1)
    request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def await_links() -> None:
    """Waits until all links of this thread's namespace that are up have queues. Raises RuntimeError if one gets none.

    A cable has a carrier once both of its ends are up. The end that came first gets its queue from a worker of the
    kernel (net/core/link_watch.c), which takes its time on a busy machine. Until then this end drops all packets, and
    nothing counts them.
    """
    deadline_s = time.monotonic() + _LINKS_TIMEOUT_S
    with IPRoute() as route:
        while waiting := [link for link in route.get_links() if _waits(link)]:
            if time.monotonic() > deadline_s:
                names = ", ".join(link.get_attr("IFLA_IFNAME") for link in waiting)
                raise RuntimeError(f"links {names} have no queue after {_LINKS_TIMEOUT_S:.0f} s")
            os.sched_yield()


def _waits(link: Any) -> bool:
    return bool(link["flags"] & _IFF_UP) and link.get_attr("IFLA_OPERSTATE") in _WAITING
