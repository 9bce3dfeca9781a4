# SPDX-License-Identifier: Apache-2.0
"""`sennit doctor --listen` and `--peer`: try the network between two machines before a job needs it.

The two machines make a group as a job does. So interfaces, ports and packet sizes are those of a job with the same
`SENNIT_*` variables.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sennit import host_name
from sennit.doctor import pair_store
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind, from_environment
from sennit.transport.errors import ConfigError, SennitError
from sennit.transport.meeting.store import Store

DEFAULT_PORT: Final = 4790
LISTEN_S: Final = 600.0
CONNECT_S: Final = 10.0
MEET_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """The result of the trial; the fields are those of `--json`."""

    ok: bool
    error: str = ""
    route: str = ""
    """udp or verbs."""
    description: str = ""
    """Addresses, packet size, paths."""
    notes: tuple[str, ...] = ()
    """Dead paths, smaller packets."""


def listen(port: int = DEFAULT_PORT, *, say: Callable[[str], None] = print, timeout_s: float = LISTEN_S) -> PairReport:
    """Waits for the other machine, then tries the network to it."""
    try:
        with pair_store.listen(port) as server:
            own = socket.gethostname()
            say(f"waiting for the other machine; run there: sennit doctor --peer {own} --port {port}")
            if address := host_name.leads_here_only(own):
                say(f"(with an address of this machine in place of {own}, which resolves to {address})")
            store, peer = pair_store.accept(server, timeout_s)
        say(f"{peer} has come")
        return _meet(0, store)
    except SennitError as error:
        return PairReport(ok=False, error=str(error))


def visit(host: str, port: int = DEFAULT_PORT, *, resolve: host_name.Resolve = host_name.resolve) -> PairReport:
    """Tries the network to a machine that listens."""
    try:
        if address := host_name.leads_here_only(host, resolve):
            if host_name.means_this_machine(host):
                raise ConfigError(
                    f"{host} is this machine itself; give an address of the other one (there: `ip -brief address`)"
                )
            raise ConfigError(
                f"{host} resolves to {address} here, which is this machine itself, not another one: "
                f"{host_name.what_to_do(host, address)}"
            )
        with pair_store.connect(host, port, CONNECT_S) as store:
            return _meet(1, store)
    except SennitError as error:
        return PairReport(ok=False, error=str(error))


def _meet(rank: int, store: Store) -> PairReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report's notes say the same
        with Communicator(
            rank=rank, world=2, store=store, config=_over_the_network(from_environment(), rank), timeout_s=MEET_S
        ) as group:
            description = group.describe().partition("\n")[0].partition("; ")[2]
            total = group.allreduce(np.full(1 << 16, rank + 1.0, np.float32))
            if not (total == 3).all():
                raise SennitError("an AllReduce of the two machines gave a wrong sum")
            # The rank that keeps the store must not end before the other has read from it.
            group.barrier()
            return PairReport(ok=True, route=group.routes[1 - rank], description=description, notes=group.notes)


def _over_the_network(config: Config, rank: int) -> Config:
    """The configuration of a job, but never shared memory: two processes of one machine try the network, too."""
    transport = config.transport
    if transport in (TransportKind.AUTO, TransportKind.SHM):
        transport = TransportKind.UDP
    return config._replace(transport=transport, host_id=f"doctor-{rank}")
