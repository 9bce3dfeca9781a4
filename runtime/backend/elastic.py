# SPDX-License-Identifier: Apache-2.0
"""Replaces torch's default process group after a failure, or to let new ranks join, without new processes.

    try:
        train(model)
    except torch.distributed.DistBackendError:
        view = elastic.reconfigure()      # every survivor; rank and world are new
        model = DistributedDataParallel(plain_model)

Groups made from the old default group end with it. What was built on them (DDP, meshes, samplers) has to be built
again. Protocol, timers and limits: docs/reference/membership.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sennit.runtime.backend import process_group as backend
from sennit.transport import config
from sennit.transport.communicator import Communicator, Witness, connect_next
from sennit.transport.errors import ArgumentError
from sennit.transport.meeting.membership import Membership, NoEvidence, Terms, View

if TYPE_CHECKING:
    import torch.distributed as dist

    from sennit.runtime.backend.torch_versions import Store

GROUP_NAME = "default"


@dataclass
class _Lineage:
    """The chain of default groups that this process belongs to."""

    store: Store
    """The store of the first group. Nothing in it depends on an epoch."""

    own: Membership
    current: Communicator


_lineage: _Lineage | None = None


def reconfigure(terms: Terms | None = None) -> View:
    """Makes a new default process group of all live ranks. Every rank that is to be in it calls this.

    Raises TimeoutError or PeerError (`sennit.transport.errors`) as `Communicator.reconfigure` does. The old group then
    still exists, but cannot be used.
    """
    import torch
    import torch.distributed as dist

    from sennit.runtime.backend import torch_versions

    global _lineage
    group = torch_versions.default_group()
    current = backend.communicator(group)
    name, _ = torch_versions.backend_and_store(group)
    if name != backend.BACKEND_NAME:
        raise ArgumentError(
            f"the default group's backend is {name!r}; allowed: {backend.BACKEND_NAME!r} for all devices"
        )
    lineage = _lineage
    if lineage is None or lineage.current is not current:
        store = _users_store(group)
        founder = Membership.of_founder(store, name=GROUP_NAME, rank=current.rank, world=current.world)
        lineage = _Lineage(store, founder, current)
    torch_backend = torch_versions.backend_of(group, torch.device("cpu"))
    options = backend.options_of(group) or backend.Options()
    timeout = torch_versions.timeout_of(torch_backend)
    view, successor = connect_next(
        lineage.own,
        terms or Terms(),
        Witness(current),
        store=lineage.store,
        config=current.config,
        name=GROUP_NAME,
        timeout_s=timeout.total_seconds(),
        ranks_here_min=backend.ranks_on_cores(),
    )
    # Nobody waits for the old groups to say goodbye.
    for other in torch_versions.all_groups():
        torch_versions.abort(other)
    dist.destroy_process_group()
    _begin(view, successor, lineage.store, lineage.own, timeout, options)
    return view


def join(
    store: Store,
    *,
    terms: Terms | None = None,
    timeout: timedelta | None = None,
    options: backend.Options | None = None,
) -> View:
    """Makes this process, which has no process group yet, join one at the members' next `reconfigure`.

    `store` is the store that the members gave to `init_process_group`. If they gave an init method, it is
    `PrefixStore("default_pg", store)`, because torch adds this prefix then.
    """
    import torch.distributed as dist

    backend.register()
    if dist.is_initialized():
        raise ArgumentError("this process has a default group already; allowed: processes that are in none")
    settings = config.from_environment()
    limit = timeout or timedelta(seconds=settings.timeout_s)
    own = Membership.of_newcomer(store, name=GROUP_NAME)
    view, group = connect_next(
        own,
        terms or Terms(),
        NoEvidence(),
        store=store,
        config=settings,
        name=GROUP_NAME,
        timeout_s=limit.total_seconds(),
    )
    _begin(view, group, store, own, limit, options or backend.Options())
    return view


def waiting_count() -> int:
    """How many processes wait for the next `reconfigure`: new ranks, and members that have called it already."""
    from sennit.runtime.backend import torch_versions

    group = torch_versions.default_group()
    current = backend.communicator(group)
    if _lineage is not None and _lineage.current is current:
        return _lineage.own.waiting_count()
    return Membership.of_founder(
        _users_store(group), name=GROUP_NAME, rank=current.rank, world=current.world
    ).waiting_count()


def _users_store(group: dist.ProcessGroup) -> Store:
    """The store that `init_process_group` was given. torch has put the group's name in front."""
    from sennit.runtime.backend.torch_versions import PrefixStore, backend_and_store

    _, store = backend_and_store(group)
    return store.underlying_store if isinstance(store, PrefixStore) else store


def _begin(
    view: View, group: Communicator, store: Store, own: Membership, timeout: timedelta, options: backend.Options
) -> None:
    import torch.distributed as dist

    from sennit.runtime.backend.torch_versions import PrefixStore

    global _lineage
    dist.init_process_group(
        backend.BACKEND_NAME,
        store=PrefixStore(f"sennit-epoch-{view.epoch}", store),
        rank=view.rank,
        world_size=view.world,
        timeout=timeout,
        pg_options=backend.ConnectedOptions.of(options, group),
    )
    _lineage = _Lineage(store, own, group)
