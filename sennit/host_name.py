# SPDX-License-Identifier: Apache-2.0
"""Host names that lead to the machine itself: the usual trap of distributed programs on Debian and Ubuntu.

Their installers write the machine's own name beside 127.0.1.1 into /etc/hosts. A rank that publishes or binds what its
name resolves to (gloo does, and so does a store at MASTER_ADDR) cannot be reached by other machines.
"""

import ipaddress
import socket
from collections.abc import Callable, Sequence

Resolve = Callable[[str], Sequence[str]]


def resolve(name: str) -> list[str]:
    """The addresses of a host name. Raises OSError where it has none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def leads_here_only(name: str, resolve: Resolve = resolve) -> str:
    """The loopback address that this machine's name leads to; empty if it leads to another, or to none."""
    try:
        addresses = resolve(name)
    except OSError:
        return ""
    if not addresses or not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return ""
    return addresses[0]


def means_this_machine(name: str) -> bool:
    """Whether it is an address of loopback, or localhost (RFC 6761), which no line of /etc/hosts may change."""
    try:
        return ipaddress.ip_address(name.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        parts = name.lower().rstrip(".").split(".")
        return parts[-1] == "localhost" or parts[0] in ("localhost", "localhost4", "localhost6", "ip6-localhost")


def what_to_do(name: str, address: str) -> str:
    if means_this_machine(name):
        return (
            "give this machine a name of its own; or give programs an address in place of the name (MASTER_ADDR, "
            "--rdzv-endpoint)"
        )
    return (
        f"in /etc/hosts, write the address of a network interface before {name} in place of {address}; or give "
        "programs an address in place of the name (MASTER_ADDR, --rdzv-endpoint)"
    )
