# SPDX-License-Identifier: Apache-2.0
"""Says in words what the trial of the network found: which direction fails, between which addresses, and what to do.

The trial itself is native (`csrc/ports/trial.hpp`). `network_trial.py` decides when it runs. This file opens no socket.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# UDP header, then BTH, RETH, immediate and ICRC of a data packet (docs/reference/wire.md).
UDP_BYTES: Final = 8
ROCE_BYTES: Final = 36
IPV4_BYTES: Final = 20
IPV6_BYTES: Final = 40
PAYLOAD_MIN_BYTES: Final = 256
# How many ports of a list a message names.
SHOWN_PORTS: Final = 4


@dataclass(frozen=True)
class TriedPath:
    """One path between two ranks, with the fields of `_core.Communicator.tried_paths` in their order."""

    address: str
    """Our address."""
    source_port: int
    """The source port of our packets."""
    peer_address: str
    peer_port: int
    """The port that our packets go to."""
    peer_source_port: int
    port: int
    """The port where the peer's packets arrive."""
    told_bytes: int
    """The largest payload of ours that arrived at the peer. 0: none did."""
    heard_bytes: int
    """The largest payload that arrived here. 0: none did."""
    error: int
    """errno of our last failed send, or of the network's error about one of our packets. 0: no error."""
    is_used: bool = True
    """Whether the group has it. An interface with addresses of both families uses only one of them with a peer."""
    device: str = ""
    """Our RDMA device. Empty: a socket."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the trial with one peer."""

    failure: str = ""
    """Why there can be no group with this peer. Empty if packets pass both ways."""
    warnings: tuple[str, ...] = ()
    """Paths that stay out of use."""
    notes: tuple[str, ...] = ()
    """Facts worth knowing that are no fault."""


def judge(
    paths: Sequence[TriedPath],
    *,
    rank: int,
    peer: int,
    payload_bytes: int,
    payload_max_bytes: int,
    peer_error: int = 0,
) -> Verdict:
    """Returns the verdict on `peer`.

    `payload_bytes` is what both ends agreed on (0: nothing), `payload_max_bytes` what their interfaces take.
    `peer_error` is the errno that the peer reported for its own sends to us.
    """
    mute = [path for path in paths if path.heard_bytes == 0]
    deaf = [path for path in paths if path.told_bytes == 0]
    own_error = next((path.error for path in paths if path.error), 0)
    if len(mute) == len(paths) or len(deaf) == len(paths):
        return Verdict(failure=_failure(paths, rank, peer, payload_max_bytes, own_error, peer_error))
    replaced = [path for path in paths if not path.is_used and ":" in path.address]
    paths = [path for path in paths if path.is_used]
    mute = [path for path in paths if path.heard_bytes == 0]
    deaf = [path for path in paths if path.told_bytes == 0]
    warnings = []
    if mute:
        warnings.append(
            f"rank {rank} hears nothing from rank {peer} over {len(mute)} of {len(paths)} paths, which stay out of "
            f"use: {_incoming(mute)}"
        )
    if deaf:
        warnings.append(
            f"rank {peer} hears nothing from rank {rank} over {len(deaf)} of {len(paths)} paths, which stay out of "
            f"use: {_outgoing(deaf)}"
        )
    notes = [_replacement(replaced, rank, peer)] if replaced else []
    if 0 < payload_bytes < payload_max_bytes:
        too_small = [path for path in paths if 0 < min(path.told_bytes, path.heard_bytes) < payload_max_bytes]
        notes.append(
            f"packets between rank {rank} and rank {peer} have {_packet_bytes(paths, payload_bytes):,} bytes: those of "
            f"{_packet_bytes(paths, payload_max_bytes):,}, which the interfaces take, do not pass over "
            f"{len(too_small)} of {len(paths)} paths ({_outgoing(too_small)}). For larger ones raise the MTU of the "
            "routers or switches between them"
        )
    return Verdict(warnings=tuple(warnings), notes=tuple(notes))


def _replacement(replaced: Sequence[TriedPath], rank: int, peer: int) -> str:
    parts = []
    if mute := [path for path in replaced if path.heard_bytes == 0]:
        parts.append(f"rank {rank} hears nothing from rank {peer}: UDP {_incoming(mute)}")
    if deaf := [path for path in replaced if path.told_bytes == 0]:
        parts.append(f"rank {peer} hears nothing from rank {rank}: UDP {_outgoing(deaf)}")
    return (
        f"ranks {min(rank, peer)} and {max(rank, peer)} use IPv4, because over IPv6 {', and '.join(parts)}. For IPv6 "
        "look at the firewalls and routes between them"
    )


def refusal(paths: Sequence[TriedPath]) -> str:
    """Returns the words for a peer whose process has ended, so that only its closed port answers."""
    ends = ", ".join(dict.fromkeys(_end(path.peer_address, path.peer_port) for path in paths))
    return f"nobody listens at UDP {ends} any more (port unreachable), and it has left no record of its own trial"


def _failure(
    paths: Sequence[TriedPath], rank: int, peer: int, payload_max_bytes: int, own_error: int, peer_error: int
) -> str:
    comes = any(path.heard_bytes for path in paths)
    goes = any(path.told_bytes for path in paths)
    sizes = (
        f"packets of {_packet_bytes(paths, payload_max_bytes):,} to {_packet_bytes(paths, PAYLOAD_MIN_BYTES):,} bytes"
    )
    if not comes and not goes:
        who = f"ranks {min(rank, peer)} and {max(rank, peer)} hear nothing from each other"
        what = f"UDP {_outgoing(paths)} and {_incoming(paths)}, {sizes}"
        errors = [_words(own_error, f"rank {rank}"), _words(peer_error, f"rank {peer}")]
    elif goes:
        who = f"rank {rank} hears nothing from rank {peer}"
        what = f"UDP {_incoming(paths)}, {sizes}; the other direction works"
        errors = [_words(peer_error, f"rank {peer}")]
    else:
        who = f"rank {peer} hears nothing from rank {rank}"
        what = f"UDP {_outgoing(paths)}, {sizes}; the other direction works"
        errors = [_words(own_error, f"rank {rank}")]
    ports = sorted({path.port for path in paths if not comes} | {path.peer_port for path in paths if not goes})
    said = "".join(f" {text}." for text in errors if text)
    opening = f"Open UDP port {', '.join(map(str, ports))} in the firewalls between them, or set"
    if devices := ", ".join(dict.fromkeys(path.device for path in paths if path.device)):
        return (
            f"{who} (device {devices} of rank {rank}): {what}.{said} {opening} SENNIT_INTERFACES to those of devices "
            "that reach each other, or SENNIT_TRANSPORT=udp"
        )
    return (
        f"{who}: {what}.{said} {opening} SENNIT_PORTS to a range that is open, or SENNIT_INTERFACES to interfaces that "
        "reach each other"
    )


def _words(error: int, who: str) -> str:
    if error == 0:
        return ""
    if error == errno.ECONNREFUSED:
        return f"What {who} sent came back as 'port unreachable': a firewall rejects it"
    if error in (errno.EPERM, errno.EACCES):
        return f"The host of {who} does not let its packets out ({os.strerror(error)}): look for a firewall rule there"
    return f"The host of {who} says: {os.strerror(error)}"


def _outgoing(paths: Sequence[TriedPath]) -> str:
    return _ways([(path.address, path.source_port, path.peer_address, path.peer_port) for path in paths])


def _incoming(paths: Sequence[TriedPath]) -> str:
    return _ways([(path.peer_address, path.peer_source_port, path.address, path.port) for path in paths])


def _ways(ways: Sequence[tuple[str, int, str, int]]) -> str:
    """Describes together the paths of one pair of addresses, which differ only in source port."""
    grouped: dict[tuple[str, str, int], list[int]] = {}
    for source, source_port, destination, port in ways:
        grouped.setdefault((source, destination, port), []).append(source_port)
    return ", ".join(
        f"{source} -> {_end(destination, port)} (source port {_ports(ports)})"
        for (source, destination, port), ports in grouped.items()
    )


def _ports(ports: Sequence[int]) -> str:
    shown = ", ".join(map(str, ports[:SHOWN_PORTS]))
    more = len(ports) - SHOWN_PORTS
    return f"{shown} and {more} more" if more > 0 else shown


def _end(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _packet_bytes(paths: Sequence[TriedPath], payload_bytes: int) -> int:
    """Returns the size of the IP packet, which is what an MTU limits."""
    is_ipv6 = any(ipaddress.ip_address(path.address).version == 6 for path in paths)
    return (IPV6_BYTES if is_ipv6 else IPV4_BYTES) + UDP_BYTES + ROCE_BYTES + payload_bytes
