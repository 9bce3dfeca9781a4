# SPDX-License-Identifier: Apache-2.0
"""How a rank joins a group: configuration, native core, rendezvous.

`Communicator` is more than that: it has NumPy collectives and the choice of algorithms. The torch backend needs none of
them at its start, so this file imports none (docs/lab/groups.md).
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from sennit.transport import config as configuration
from sennit.transport.errors import ArgumentError
from sennit.transport.light_tuple import LightTuple
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.store import Store
from sennit.transport.native import require_core

if TYPE_CHECKING:
    from sennit.transport import _core
    from sennit.transport.meeting.rails import Rail


class Joined(LightTuple):
    """A rank's end of a group that all ranks have joined."""

    rank: int
    world: int
    name: str
    config: configuration.Config
    timeout_s: float
    """The deadline of operations without their own."""
    store: Store | None
    connection: rendezvous.Connection[_core.Communicator]

    @property
    def handle(self) -> int:
        """The `sennit_comm*` of core.h. Valid while this object, or another reference to the pointer, holds it."""
        return self.connection.endpoint.handle

    @property
    def routes(self) -> tuple[str, ...]:
        return self.connection.routes

    @property
    def is_plain(self) -> bool:
        """Whether all ranks share memory, and choose algorithms by the built-in constants alone (ready_plans.py)."""
        return (
            self.config.algorithm is None
            and self.connection.measured is None
            and not self.connection.has_aggregator
            and all(route in ("self", "shm") for route in self.routes)
        )

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        world: int,
        store: Store | None = None,
        config: configuration.Config | None = None,
        name: str = "world",
        timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        ranks_here_min: int = 1,
        watch: Callable[[], None] | None = None,
        keeps_greeting: bool = True,
    ) -> Self:
        """Returns when every rank has joined. `Communicator` describes the arguments."""
        if world < 1 or not 0 <= rank < world:
            raise ArgumentError(f"rank {rank} of {world}; allowed: world 1 or more, rank 0..world-1")
        # Imported late, so that everything except this works without the extension.
        require_core()
        _tell_of_slow_kernels()
        from sennit.transport import _core

        config = configuration.from_environment() if config is None else config
        timeout_s = config.timeout_s if timeout_s is None else timeout_s

        def make_core(ranks_on_cores: int) -> _core.Communicator:
            return _core.Communicator(
                rank,
                world,
                timeout_s=timeout_s,
                seed=int.from_bytes(os.urandom(8)),
                ranks_here=max(ranks_on_cores, ranks_here_min),
                peer_timeout_s=config.peer_timeout_s,
                threads=config.threads,
            )

        connection = rendezvous.connect(
            make_core,
            config=config,
            store=store,
            rank=rank,
            world=world,
            rails=lambda: _rails(config),
            name=name,
            timeout_s=timeout_s if connect_timeout_s is None else connect_timeout_s,
            watch=watch,
            keeps_greeting=keeps_greeting,
        )
        _core.operation_log_name(connection.endpoint.handle, name)
        if why := connection.endpoint.shm_why_unnamed():
            warnings.warn(
                f"{why}. Ranks share memory without a name there, which other pid namespaces cannot open. A larger one "
                "(docker run --shm-size=1g) avoids this",
                RuntimeWarning,
                stacklevel=3,
            )
        return cls(
            rank=rank, world=world, name=name, config=config, timeout_s=timeout_s, store=store, connection=connection
        )


def _rails(config: configuration.Config) -> Sequence[Rail]:
    # Imported late: only a group that needs a network looks for interfaces and devices.
    if config.transport is configuration.TransportKind.VERBS:
        from sennit.transport.meeting.rdma_rails import find_rdma_rails

        return find_rdma_rails(config.interfaces)
    from sennit.transport.meeting.rails import find_rails

    return find_rails(config.interfaces)


@functools.cache
def _tell_of_slow_kernels() -> None:
    """Warns once in a process. Without wide vectors everything works, so only its slowness would show."""
    from sennit.transport import _core

    if _core.HAS_WIDE_VECTORS:
        return
    from sennit import surroundings

    found = surroundings.vector_units()
    if not found.fine:
        warnings.warn(f"{found.what}; what helps: {found.remedy}", RuntimeWarning, stacklevel=4)
