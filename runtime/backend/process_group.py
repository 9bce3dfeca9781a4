# SPDX-License-Identifier: Apache-2.0
"""The name "sennit" for `torch.distributed`: registration, and the Python half of creating a process group.

`register` is called when torch or sennit is imported (`sennit/__init__.py`), so the module imports nothing heavy.
Rendezvous and plans of a group are made in Python (sennit.transport); all calls on it run in C++
(runtime/backend/csrc).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sennit.collecting import loading

if TYPE_CHECKING:
    import torch.distributed as dist

    from sennit.transport.codecs import Codec
    from sennit.transport.communicator import Communicator
    from sennit.transport.joining import Joined
    from sennit.transport.plans.elements import Dtype
    from sennit.transport.plans.plan import Plan

BACKEND_NAME: Final = "sennit"
# A longer deadline is one of this length: sums of times do not overflow then.
LONGEST_TIMEOUT: Final = timedelta(days=36_500)
DEVICES: Final = ("cpu", "cuda")

# How often this process has made a group of this name and these ranks. A new group must not read the records of an
# earlier one. torch gives names again after `destroy_process_group`, to other ranks too, and who was not in an earlier
# group has not counted it.
_made: Counter[str] = Counter()
# The most ranks that one group has had on the cores of this one so far. Later groups share the cores with them.
_ranks_on_cores = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options for `init_process_group(..., pg_options=...)` and `new_group`."""

    plan_cache_bytes: int = 16 << 20
    """Bytes of compiled plans that a group keeps. The least recently used go first. Room for thousands of shapes."""

    codec: Codec | None = None
    """Every `all_reduce` of float32, float16 and bfloat16 tensors in host memory sends these codes, as
    `all_reduce_coded` does. Rounding is to nearest, because nobody gives a call its seed.
    """

    def __post_init__(self) -> None:
        if self.codec is not None:
            from sennit.transport.errors import ArgumentError
            from sennit.transport.plans.elements import Dtype

            self.codec.coding(Dtype.F32)
            if self.codec.stochastic:
                raise ArgumentError(
                    "stochastic rounding for all calls of a group, which have no seeds; allowed: to nearest, or "
                    "all_reduce_coded and coded_hook"
                )
        if self.plan_cache_bytes < 0:
            raise ValueError(f"plan_cache_bytes {self.plan_cache_bytes}; allowed: 0 or more")


@dataclass(frozen=True, kw_only=True)
class ConnectedOptions(Options):
    """The options of a group whose communicator is already connected (elastic.py)."""

    communicator: Communicator
    """The communicator that the group uses instead of making one."""

    @classmethod
    def of(cls, options: Options, communicator: Communicator) -> ConnectedOptions:
        return cls(**_fields(options), communicator=communicator)

    def plain(self) -> Options:
        """The options of the next group, which makes a communicator of its own."""
        return Options(**_fields(self))


def _fields(options: Options) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(Options)}


class Member:
    """This process's end of a group of this backend."""

    def __init__(self, joined: Joined, options: Options) -> None:
        self.joined = joined
        self.options = options
        self.handle = joined.handle

    @functools.cached_property
    def communicator(self) -> Communicator:
        """Made when somebody asks for it: not at the group's start."""
        from sennit.transport.communicator import Communicator

        return Communicator.of(self.joined)


def register() -> None:
    """Registers "sennit" as a backend of `torch.distributed`. Further calls do nothing."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND_NAME.upper()):
        return
    from torch.backends import cuda

    # Some callers ask a backend for its devices, and for the current one of each. A torch without CUDA has none.
    devices = [name for name in DEVICES if name != "cuda" or cuda.is_built()]  # type: ignore[no-untyped-call]
    dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=devices)
    from sennit.runtime.backend import torch_versions

    torch_versions.name_groups(BACKEND_NAME)
    torch_versions.serve_callers(BACKEND_NAME, lambda group, options: _create(group, Options(**options)))
    # Whoever does not ask for it imports nothing of the transport here.
    if "SENNIT_SHARED_ALLOCATOR" in os.environ:
        from sennit.transport.config import wants_shared_allocator

        if wants_shared_allocator():
            load_extension().symmetric.set_everywhere(True)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of a group (default: the default group): routes, counters, `describe()`."""
    found = communicator_or_names(group)
    if isinstance(found, list):
        raise ValueError(f"the group's backends are {found}; allowed: groups of backend {BACKEND_NAME!r}")
    return found


def communicator_or_names(group: dist.ProcessGroup | None) -> Communicator | list[str]:
    """The communicator of a group; of a group of other backends, their names."""
    found = _member_or_names(group)
    return found if isinstance(found, list) else found.communicator


def options_of(group: dist.ProcessGroup | None) -> Options | None:
    """The options of a group; None if it has other backends only."""
    found = _member_or_names(group)
    return None if isinstance(found, list) else found.options


def _member_or_names(group: dist.ProcessGroup | None) -> Member | list[str]:
    import torch
    import torch.distributed as dist

    from sennit.runtime.backend.torch_versions import backend_of

    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise RuntimeError("there is no default process group; call init_process_group first")
    # What `new_group` returns to the others is a number.
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError("this rank is not in the group; allowed: calls of its members")
    names = []
    for device in (torch.device(name) for name in DEVICES):
        if (backend := backend_of(chosen, device)) is None:
            continue
        if isinstance(backend, load_extension().SennitBackend):
            found: Member = backend.member
            return found
        names.append(backend.name())
    return names


def local_ranks(group: dist.ProcessGroup | None = None) -> int | None:
    """The number of ranks on each host of the group: the same on all its ranks. Collective.

    Hosts are told apart by SENNIT_HOST_ID, or by the kernel. Returns None if all ranks count as one host: where hosts
    have different numbers of ranks, or ranks that do not follow one another. Ranks of one host that reach each other
    over UDP share it all the same.
    """
    import torch.distributed as dist

    from sennit.transport.config import from_environment
    from sennit.transport.meeting.host import host_identity
    from sennit.transport.plans.hosts import Hosts

    found = communicator_or_names(group)
    if isinstance(found, list):
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, host_identity(from_environment().host_id), group=group)
    else:
        names = list(found.host_names)
    hosts = Hosts.of(names)
    return None if hosts is None else hosts.ranks_each


def second_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Makes another group of the same ranks, with the same backend, options and deadline. Collective.

    Calls in the two groups do not wait for each other, so a thread may use each.
    """
    import torch.distributed as dist

    from sennit.runtime.backend import torch_versions

    chosen: Any = group or dist.group.WORLD
    name = torch_versions.backend_and_store(chosen)[0]
    ranks = dist.get_process_group_ranks(chosen)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=torch_versions.timeout_of(torch_versions.backend_of(chosen)),
        backend=name,
        # torch gives them to all backends of a group. Others do not know them.
        pg_options=options_of(chosen) if name == BACKEND_NAME else None,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return made


def failure_of(group: dist.ProcessGroup | None) -> str:
    """Why a group of backend sennit cannot be used any more; empty if it can."""
    found = communicator_or_names(group)
    return "" if isinstance(found, list) else found.failure


def _create(group: Any, options: Options | None) -> dist.Backend:
    """Torch's creator function: `group` is its `_DistributedBackendOptions`."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options is a {type(options).__name__}; allowed: sennit.runtime.backend.process_group.Options or None"
        )
    options = options or Options()
    if group.timeout <= timedelta():
        # torch counts microseconds in 64 bits, so a longer one arrives negative.
        raise ValueError(f"timeout is {group.timeout.total_seconds():g} s; allowed: more than 0, up to 100000000 days")
    timeout = min(group.timeout, LONGEST_TIMEOUT)
    with loading("sennit.transport.joining"):
        load_extension()
        from sennit.transport.joining import Joined

    name = str(group.group_id)
    if isinstance(options, ConnectedOptions):
        member = Member(options.communicator.joined, options.plain())
        member.communicator = options.communicator
        # The prefix of its store is new, and group names begin anew under it.
        _made.clear()
    else:
        made = f"{name}.{_digest(group.global_ranks_in_group)}"
        _made[made] += 1
        joined = Joined.join(
            rank=group.group_rank,
            world=group.group_size,
            store=group.store,
            name=f"{made}.{_made[made]}",
            timeout_s=timeout.total_seconds(),
            ranks_here_min=_ranks_on_cores,
            # torch names no ranks for the default group.
            keeps_greeting=not group.global_ranks_in_group,
        )
        member = Member(joined, options)
    return _backend_of(member, name, list(group.global_ranks_in_group), timeout)


def _digest(ranks: list[int]) -> str:
    """Tells apart the ranks of groups with the same name. torch names none for the default group."""
    return hashlib.sha256(str(ranks).encode()).hexdigest()[:8] if ranks else "all"


def _backend_of(member: Member, name: str, global_ranks: list[int], timeout: timedelta) -> dist.Backend:
    global _ranks_on_cores
    options = member.options
    _ranks_on_cores = max(_ranks_on_cores, member.joined.connection.ranks_on_cores)

    def shrink(excluded: list[int], abort: bool) -> dist.Backend:
        """Implements `torch.distributed.shrink_group`: makes a backend of the remaining ranks, which all call this."""
        from sennit.transport.meeting.membership import Terms

        if abort:
            member.communicator.abort("shrink_group was called with SHRINK_ABORT")
        smaller = member.communicator.reconfigure(Terms(timeout_s=timeout.total_seconds(), exclude=tuple(excluded)))
        remaining = [rank for place, rank in enumerate(global_ranks) if place not in excluded]
        made = Member(smaller.joined, options)
        made.communicator = smaller
        return _backend_of(made, f"{name}:shrunk", remaining, timeout)

    backend: dist.Backend = load_extension().SennitBackend(
        member=member,
        compile_plan=PlanCompiler(member),
        shrink=shrink,
        timeout=timeout,
        group_name=name,
        global_ranks=global_ranks,
        plan_cache_bytes=options.plan_cache_bytes,
        is_coded=options.codec is not None,
        staged_classes=lambda kind: _staged_classes(member, kind),
    )
    return backend


def _staged_classes(member: Member, kind: int) -> int:
    if member.joined.is_plain:
        from sennit.transport.choice.ready_plans import ready_staged_classes

        if (ready := ready_staged_classes(member.joined.world, kind)) is not None:
            return ready
    from sennit.transport.choice.costs import Collective
    from sennit.transport.plans.signature import Kind

    return member.communicator.selection.staged_classes(Collective[Kind(kind).name])


def ranks_on_cores() -> int:
    """The most ranks that one group has had on the cores of this one so far."""
    return _ranks_on_cores


def load_extension() -> Any:
    """The extension `_c10d`. Raises Unsupported, which says what to do, if none fits this torch and this Python."""
    from sennit.runtime.backend import extension

    return extension.load()


class PlanCompiler:
    """Compiles plans that the C++ plan cache does not have."""

    def __init__(self, member: Member) -> None:
        self._rank, self._world, self._member = member.joined.rank, member.joined.world, member
        self._codec = member.options.codec
        # Only such a group has ready plans, and it asks for nothing else first.
        self._is_plain = self._codec is None and member.joined.is_plain

    def __call__(
        self,
        kind: int,
        type_code: int,
        reduce_op: int,
        item_bytes: int,
        root: int,
        separate: bool,
        in_place: bool,
        is_send: bool,
        on_device: bool,
        size_class: int,
        counts: tuple[int, ...],
    ) -> bytes:
        """The encoded plan; the arguments are the fields of `PlanShape` (runtime/backend/csrc/plan_cache.hpp).

        `counts` is empty if the plan takes its counts when it is posted.
        """
        if self._is_plain and not on_device:
            with loading("sennit.transport.choice.ready_plans"):
                from sennit.transport.choice.ready_plans import ready_plan

            ready = ready_plan(
                self._world,
                self._rank,
                kind=kind,
                type_code=type_code,
                op=reduce_op,
                item_bytes=item_bytes,
                root=root,
                separate=separate,
                in_place=in_place,
                size_class=size_class,
            )
            if ready is not None:
                return ready
        with loading("sennit.transport.choice.selection"):
            from sennit.transport import algorithms
            from sennit.transport.choice.selection import grade_bytes
            from sennit.transport.plans.elements import Dtype, ReduceOp
            from sennit.transport.plans.plan_codec import encode
            from sennit.transport.plans.signature import Kind

        if on_device:
            from sennit.transport.plans.binding import with_counts
            from sennit.transport.plans.device_plan import SEGMENT_BYTES, cut_messages, for_device

        world, rank, selection = self._world, self._rank, self._member.communicator.selection
        floats = (Dtype.F16, Dtype.BF16, Dtype.F32)
        moved: dict[str, Any] = {"world": world, "rank": rank, "item_bytes": item_bytes, "type_code": type_code}

        def reduced() -> dict[str, Any]:
            return {"world": world, "rank": rank, "dtype": Dtype(type_code), "op": ReduceOp(reduce_op)}

        vector: dict[str, Any] = {"elements": counts[0] if counts else 0}
        if size_class and Kind(kind) in (Kind.ALLREDUCE, Kind.REDUCE, Kind.BROADCAST):
            vector = {"elements": grade_bytes(size_class - 1) // item_bytes, "counted": True}
        plan: Plan
        match Kind(kind):
            case Kind.ALLREDUCE if self._codec is not None and not on_device and type_code in floats:
                plan = self._coded(**reduced(), elements=counts[0], codec=self._codec)
            case Kind.ALLREDUCE:
                plan = selection.allreduce(**reduced(), **vector, on_device=on_device)
            case Kind.REDUCE:
                plan = selection.reduce(**reduced(), **vector, root=root, on_device=on_device)
            case Kind.BROADCAST:
                segment_bytes = SEGMENT_BYTES if on_device else None
                plan = selection.broadcast(**moved, **vector, root=root, segment_bytes=segment_bytes)
            case Kind.ALLGATHER:
                plan = selection.allgather(**moved, in_place=in_place, list_output=separate, staged=size_class != 0)
            case Kind.GATHER:
                plan = algorithms.gather(**moved, root=root, list_output=separate)
            case Kind.SCATTER:
                plan = algorithms.scatter(**moved, root=root, list_input=separate)
            case Kind.REDUCE_SCATTER if size_class:
                plan = algorithms.reduce_scatter_counted(**reduced(), pieces=1 << size_class - 1, list_input=separate)
            case Kind.REDUCE_SCATTER:
                plan = selection.reduce_scatter(**reduced(), counts=counts, list_input=separate, on_device=on_device)
            case Kind.ALLTOALL if size_class:
                plan = selection.alltoall(**moved, size_class=size_class)
            case Kind.ALLTOALL:
                plan = algorithms.alltoall(**moved, list_input=separate, list_output=separate)
            case Kind.P2P:
                plan = (algorithms.send if is_send else algorithms.recv)(**moved, peer=root)
            case Kind.BARRIER:
                plan = algorithms.barrier(world=world, rank=rank)
        if on_device:
            if plan.count_count:
                plan = with_counts(plan, counts)
                # A message between two ranks has one slot.
                plan = plan if kind == Kind.P2P else cut_messages(plan)
            plan = for_device(plan)
        return encode(plan)

    def _coded(self, *, dtype: Dtype, codec: Codec, **what: Any) -> Plan:
        from sennit.transport import algorithms

        coding = codec.coding(dtype)
        if codec.between_hosts:
            hosts = self._member.communicator.hosts
            return algorithms.allreduce_between_hosts(dtype=dtype, coding=coding, in_place=True, hosts=hosts, **what)
        return algorithms.allreduce_coded(dtype=dtype, coding=coding, in_place=True, **what)
