# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: rendezvous, the native core, compiled plans, and NumPy collectives.

    with Communicator(rank=rank, world=2, store=FileStore("/tmp/run-1")) as group:
        total = group.allreduce(np.arange(4.0))

The torch backend posts its own plans in C++, and makes a Communicator only for those who ask for one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sennit.transport import config as configuration
from sennit.transport.array_collectives import ArrayCollectives
from sennit.transport.errors import ConfigError
from sennit.transport.joining import Joined
from sennit.transport.light_tuple import LightTuple
from sennit.transport.meeting.store import Store
from sennit.transport.plans.plan_cache import PlanCache

if TYPE_CHECKING:
    from sennit.transport import _core
    from sennit.transport.choice.selection import Selection
    from sennit.transport.meeting import membership
    from sennit.transport.plans.plan import Plan

# How long leaving the `with` block waits for peers to acknowledge what was sent.
SHUTDOWN_S: Final = 5.0


class Lineage(LightTuple):
    """The place of a communicator in a chain of groups, each made of the one before."""

    name: str
    """The name of the first group."""

    epoch: int = 0
    """The number of groups before this one."""

    membership: membership.Membership | None = None
    """This process's part in the agreement on the next group. Made when first needed."""


class Witness:
    """What a communicator knows of its ranks, for the agreement on the next epoch."""

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def find_gone(self) -> Collection[int]:
        return self._group.find_gone_ranks()

    def suspects(self) -> Collection[int]:
        return self._group.lost_ranks


def connect_next(
    own: membership.Membership,
    terms: membership.Terms,
    evidence: membership.Evidence,
    *,
    store: Store,
    config: configuration.Config,
    name: str,
    timeout_s: float,
    ranks_here_min: int = 1,
) -> tuple[membership.View, Communicator]:
    """Agrees on the next epoch and connects it. Operations of the new group get `timeout_s`."""

    def connect(view: membership.View, watch: Callable[[], None], limit_s: float) -> Communicator:
        group = Communicator(
            rank=view.rank,
            world=view.world,
            store=store,
            config=config,
            name=f"{name}/epoch-{view.epoch}",
            timeout_s=timeout_s,
            connect_timeout_s=limit_s,
            ranks_here_min=ranks_here_min,
            watch=watch,
            lineage=Lineage(name=name, epoch=view.epoch, membership=own),
        )
        try:
            # All ranks are connected before the first of them uses the new group.
            group.barrier(timeout_s=limit_s)
        except BaseException:
            group.shutdown(0.0)
            raise
        return group

    return own.reform(terms, evidence, connect)


class Communicator(ArrayCollectives):
    """This rank's end of a group of `world` ranks. A context manager. Several threads may use it."""

    def __init__(
        self,
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
        lineage: Lineage | None = None,
        keeps_greeting: bool = True,
    ) -> None:
        """Returns when every rank has joined. The deadline is `connect_timeout_s` (default: `timeout_s`).

        `timeout_s` is the deadline of operations without their own (default: the configuration's). All ranks share
        `store` (a world of 1 needs none). `name` tells the groups of one store apart. `ranks_here_min` is a lower bound
        on the ranks that share this rank's cores, for a group that is part of a larger one. `watch` is called
        repeatedly until every rank has joined, and may raise to end the wait. `lineage` is set if another group was
        made into this one. `keeps_greeting`: a few records stay in the store, so that a process that comes too late
        hears that its rank is taken.
        """
        joined = Joined.join(
            rank=rank,
            world=world,
            store=store,
            config=config,
            name=name,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            ranks_here_min=ranks_here_min,
            watch=watch,
            keeps_greeting=keeps_greeting,
        )
        self._take(joined, Lineage(name=name) if lineage is None else lineage)

    @classmethod
    def of(cls, joined: Joined) -> Self:
        """The communicator of a group that this rank has joined already."""
        self = cls.__new__(cls)
        self._take(joined, Lineage(name=joined.name))
        return self

    def _take(self, joined: Joined, lineage: Lineage) -> None:
        from sennit.transport import _core

        self.joined = joined
        connection = joined.connection
        self.rank = joined.rank
        self.world = joined.world
        self.name = joined.name
        self.config = joined.config
        self.timeout_s = joined.timeout_s
        self._core = connection.endpoint
        self.routes = connection.routes
        self.ranks_here = connection.ranks_here
        self.host_names = connection.host_names
        """The name of each rank's host, the same on all ranks: SENNIT_HOST_ID, or what the kernel calls it."""
        self.hosts = connection.hosts
        """Which ranks reach each other through shared memory."""
        self.notes = connection.notes
        """Notes on how the ranks reach each other: dead paths, smaller packets."""
        self._plans: PlanCache[_core.Plan] = PlanCache(_core.Plan)
        self._lineage = lineage

    @functools.cached_property
    def selection(self) -> Selection:
        """Which algorithms the group's collectives run."""
        from sennit.transport.choice.selection import Selection

        connection = self.joined.connection
        return Selection(
            hosts=self.hosts,
            forced=self.config.algorithm,
            near=connection.calibration.shared_memory,
            far=connection.calibration.network,
            has_aggregator=connection.has_aggregator,
        )

    @property
    def handle(self) -> int:
        """The `sennit_comm*` of core.h. Valid while this object, or another reference to the pointer, holds it."""
        return self._core.handle

    @property
    def epoch(self) -> int:
        """How often the group was reconfigured before this one."""
        return self._lineage.epoch

    @property
    def sequence(self) -> int:
        """Collectives posted so far. Equal on all ranks that are in step."""
        return self._core.sequence

    @property
    def failure(self) -> str:
        """Why the group cannot be used any more. Empty while it works."""
        return self._core.failure

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """The ranks that the failure blames: dead ranks, and ranks that were silent for the peer timeout or until a
        deadline.
        """
        return tuple(self._core.lost_ranks)

    def find_gone_ranks(self) -> tuple[int, ...]:
        """Looks up the ranks whose process, or whose end of this group, is gone now."""
        return tuple(self._core.find_gone_ranks())

    def counters(self) -> dict[str, int]:
        """Returns this rank's counters, summed since the group was made. docs/reference/counters.md has the names."""
        return self._core.counters()

    def describe(self) -> str:
        """Describes, for people, how many operations are in flight, and which peers and paths they wait for."""
        return "\n".join((self._core.describe(), *self.notes))

    def post(
        self,
        key: Hashable,
        compile_plan: Callable[[], Plan],
        buffers: Sequence[Any],
        *,
        timeout_s: float = 0.0,
        tag: int | None = None,
        scalar: float = 1.0,
        background: bool = False,
        counts: Sequence[int] = (),
        seed: int = 0,
    ) -> _core.Op:
        """Starts the plan of `key` over `buffers` and compiles it on first use.

        The operation keeps the buffers alive. `counts` are for a plan that takes them, `seed` for stochastic rounding
        in a plan that encodes. Raises ArgumentError and sends
        nothing if they do not fit the plan or the buffers.
        """
        plan = self._plans.get(key, compile_plan)
        return self._core.post(
            plan,
            list(buffers),
            timeout_s=timeout_s,
            background=background,
            tag=tag,
            scalar=scalar,
            counts=counts,
            seed=seed,
        )

    def register(self, buffer: Any) -> contextlib.closing[_core.Registration]:
        """Declares that several operations will use `buffer`, whole or in parts, until the result is closed (`with`).

        RDMA devices then register it only once. Meanwhile Python's buffer protocol keeps the owner from resizing or
        freeing the buffer. Without RDMA devices the call changes nothing.
        """
        return contextlib.closing(self._core.register_memory(buffer))

    def time_plan(
        self,
        key: Hashable,
        compile_plan: Callable[[], Plan],
        buffers: Sequence[Any],
        iterations: int,
        counts: Sequence[int] = (),
    ) -> list[float]:
        """Runs a plan `iterations` times without Python in between. Returns the seconds of each run. For benchmarks."""
        return self._core.time_plan(self._plans.get(key, compile_plan), list(buffers), iterations, counts)

    def abort(self, reason: str) -> None:
        """Fails every operation in flight, on this rank and on the peers."""
        self._core.abort(reason)

    def reconfigure(self, terms: membership.Terms | None = None) -> Communicator:
        """Returns the communicator of the ranks that live and want to go on, newcomers included. Ends this one.

        Every rank of the new group calls this, after a failure or when all have agreed to. Ranks keep their order and
        get new numbers. Raises TimeoutError if no group forms in time, and PeerError if the others went on without this
        rank. docs/reference/membership.md has the protocol.
        """
        from sennit.transport.meeting import membership

        name = self._lineage.name
        own = self._lineage.membership
        if own is None:
            own = membership.Membership.of_founder(self._shared_store(), name=name, rank=self.rank, world=self.world)
            self._lineage = self._lineage._replace(membership=own)
        _, successor = connect_next(
            own,
            terms or membership.Terms(),
            Witness(self),
            store=self._shared_store(),
            config=self.config,
            name=name,
            timeout_s=self.timeout_s,
        )
        self.shutdown(0.0)
        return successor

    @classmethod
    def join(
        cls,
        *,
        store: Store,
        config: configuration.Config | None = None,
        name: str = "world",
        timeout_s: float | None = None,
        terms: membership.Terms | None = None,
    ) -> Communicator:
        """Joins an existing group at its members' next `reconfigure`. `store` and `name` are the group's."""
        from sennit.transport.meeting import membership

        config = configuration.from_environment() if config is None else config
        _, group = connect_next(
            membership.Membership.of_newcomer(store, name=name),
            terms or membership.Terms(),
            membership.NoEvidence(),
            store=store,
            config=config,
            name=name,
            timeout_s=config.timeout_s if timeout_s is None else timeout_s,
        )
        return group

    def _shared_store(self) -> Store:
        if self.joined.store is None:
            raise ConfigError(f"{self.name} was made without a store, so nobody can join it")
        return self.joined.store

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Waits until peers have what was sent, says goodbye, and ends the group. Further calls do nothing."""
        self._core.shutdown(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.shutdown()
