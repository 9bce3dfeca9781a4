# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: rendezvous, the native core, compiled plans, and NumPy collectives on top.

    with Communicator(rank=rank, world=2, store=FileStore("/tmp/run-1")) as group:
        total = group.allreduce(np.arange(4.0))

The torch backend uses the same class up to `handle`, and posts its own plans in C++.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sennit.transport import config as configuration
from sennit.transport import rendezvous
from sennit.transport.array_collectives import ArrayCollectives
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import Plan
from sennit.transport.plan_cache import PlanCache
from sennit.transport.store import Store

if TYPE_CHECKING:
    from sennit.transport import _core

# How long leaving the `with` block waits for peers to acknowledge what was sent.
SHUTDOWN_S: Final = 5.0


def _rails(interfaces: Sequence[str]) -> list[tuple[str, int]]:
    # Only a group that needs udp looks at network interfaces.
    from sennit.transport.rails import find_rails

    return [(rail.address, 0) for rail in find_rails(interfaces)]


class Communicator(ArrayCollectives):
    """This rank's end of a group of `world` ranks. Safe to use from several threads; a context manager."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        store: Store | None = None,
        config: configuration.Config | None = None,
        name: str = "world",
        timeout_s: float | None = None,
        ranks_here_min: int = 1,
    ) -> None:
        """Returns when every rank has come, at the latest after `timeout_s` (default: the configuration's).

        `store` is shared by all ranks (not needed for a world of 1); `name` tells groups of one store apart.
        `ranks_here_min`: how many ranks share this machine's cores for certain, if the group is part of more.
        """
        if world < 1 or not 0 <= rank < world:
            raise ArgumentError(f"rank {rank} of {world}; allowed: world 1 or more, rank 0..world-1")
        # Late, so that everything but this class works without the extension.
        from sennit.transport import _core

        self.rank = rank
        self.world = world
        self.name = name
        self.config = configuration.from_environment() if config is None else config
        self.timeout_s = self.config.timeout_s if timeout_s is None else timeout_s

        def make_core(ranks_here: int) -> _core.Communicator:
            return _core.Communicator(
                rank,
                world,
                timeout_s=self.timeout_s,
                seed=secrets.randbits(64),
                ranks_here=max(ranks_here, ranks_here_min),
            )

        connection = rendezvous.connect(
            make_core,
            config=self.config,
            store=store,
            rank=rank,
            world=world,
            rails=lambda: _rails(self.config.interfaces),
            name=name,
            timeout_s=self.timeout_s,
        )
        self._core = connection.endpoint
        self.routes = connection.routes
        self.ranks_here = connection.ranks_here
        self._plans: PlanCache[_core.Plan] = PlanCache(_core.Plan)

    @property
    def handle(self) -> int:
        """The `sennit_comm*` of core.h; valid as long as this object or a reference of its own holds it."""
        return self._core.handle

    @property
    def sequence(self) -> int:
        """Collectives posted so far; equal on all ranks when they are in step."""
        return self._core.sequence

    def counters(self) -> dict[str, int]:
        return self._core.counters()

    def describe(self) -> str:
        """Lanes, paths and what is outstanding, for people."""
        return self._core.describe()

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
    ) -> _core.Op:
        """Starts the plan of `key`, compiled on its first use, over `buffers`, which the operation keeps alive."""
        plan = self._plans.get(key, compile_plan)
        return self._core.post(plan, list(buffers), timeout_s=timeout_s, background=background, tag=tag, scalar=scalar)

    def time_plan(
        self, key: Hashable, compile_plan: Callable[[], Plan], buffers: Sequence[Any], iterations: int
    ) -> list[float]:
        """Runs a plan `iterations` times with no Python in between; the seconds of each run. For benchmarks."""
        return self._core.time_plan(self._plans.get(key, compile_plan), list(buffers), iterations)

    def abort(self, reason: str) -> None:
        """Fails every operation in flight, here and on the peers."""
        self._core.abort(reason)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Lets what was sent arrive, says goodbye, and ends; more calls do nothing."""
        self._core.shutdown(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.shutdown()
