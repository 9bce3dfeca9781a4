# SPDX-License-Identifier: Apache-2.0
"""Sockets that see whole packets. They need CAP_NET_RAW, which containers may take even from root."""

from __future__ import annotations

import socket

from sennit.errors import Unsupported

REMEDY = "give it to the container (docker run --cap-add NET_RAW)"


def packet_socket(protocol: int) -> socket.socket:
    """Returns a packet socket. `protocol`: a number of linux/if_ether.h. Raises Unsupported without CAP_NET_RAW."""
    try:
        return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    except PermissionError as error:
        raise Unsupported("packet-sockets", f"no CAP_NET_RAW ({error.strerror}); {REMEDY}") from error
