# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group agree on their aggregator: all of them use it, or none."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sennit.transport.aggregator import DEFAULT_PORT, LEAVES_MAX
from sennit.transport.config import Config
from sennit.transport.errors import ConfigError
from sennit.transport.meeting.rank_records import Record

if TYPE_CHECKING:
    from sennit.transport.meeting.endpoint import Endpoint
    from sennit.transport.meeting.exchanges import Exchanges

# An aggregator answers within a round trip. A rank asks some dozens of times.
JOIN_LIMIT_S: Final = 1.0


def address_of(text: str) -> tuple[str, int]:
    """Returns the address and port of `SENNIT_AGGREGATOR`. Raises ConfigError if there is no such host or port."""
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        if not 0 < int(port) <= 0xFFFF:
            raise ValueError(port)
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"SENNIT_AGGREGATOR {text!r}: {error}; allowed: ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT"
        ) from error
    address = found[0][4]
    return str(address[0]).partition("%")[0], int(port)


def join(endpoint: Endpoint, exchanges: Exchanges, config: Config, hello: Sequence[Record]) -> list[str]:
    """Asks the aggregator to take the group. Returns why the group has none; nothing if it has.

    Raises ConfigError, on every rank, if some ranks name an aggregator and others do not.
    """
    for peer, record in enumerate(hello):
        if bool(record["aggregation_key"]) != bool(hello[0]["aggregation_key"]):
            without = peer if hello[0]["aggregation_key"] else 0
            raise ConfigError(f"rank {without} has no SENNIT_AGGREGATOR; allowed: one on all ranks, or none")

    if len(hello) > LEAVES_MAX:
        return [f"the group has no aggregator, and does its sums itself: {len(hello)} ranks; allowed: 2..{LEAVES_MAX}"]

    def ask() -> Record:
        address, port = address_of(config.aggregator)
        key = int(hello[0]["aggregation_key"], 16)
        return {"why": endpoint.aggregator_open(address, port, key=key, limit_s=JOIN_LIMIT_S)}

    answers = exchanges.exchange("aggregator", ask)
    refused = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]]
    if not refused:
        return []
    endpoint.aggregator_drop()
    return [f"the group has no aggregator, and does its sums itself: {'; '.join(refused)}"]
