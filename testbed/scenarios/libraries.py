# SPDX-License-Identifier: Apache-2.0
"""The two libraries of a scenario behind one interface: sennit's native core without torch, and torch's gloo over TCP.

Both use the same planes. Rendezvous uses files, because TCP between the namespaces would suffer from the impairments.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sennit.testbed.scenarios.model import ELEMENT_BYTES, Library, Operation
from sennit.testbed.scenarios.payload import Payload


class Group(Protocol):
    """A joined group of ranks."""

    def run(self, payload: Payload) -> None:
        """Runs one repetition and blocks. Raises what the library raises."""

    def counters(self) -> dict[str, int]: ...

    def describe(self) -> str: ...

    def bytes_received(self) -> int:
        """Payload bytes received so far."""

    def lost_ranks(self) -> list[int]:
        """Ranks that the library reported as lost."""

    def reconfigure(self, timeout_s: float) -> tuple[int, int]:
        """Continues as a group of the survivors. Returns this rank and the world size in it."""

    def close(self) -> None: ...


def join(library: Library, *, rank: int, world: int, store: Path, timeout_s: float) -> Group:
    """The group of all ranks that share `store`."""
    match library:
        case Library.SENNIT:
            return SennitGroup(rank=rank, world=world, store=store, timeout_s=timeout_s)
        case Library.GLOO:
            return GlooGroup(rank=rank, world=world, store=store, timeout_s=timeout_s)


class SennitGroup:
    """Configured by the `SENNIT_*` variables that the conductor has set."""

    def __init__(self, *, rank: int, world: int, store: Path, timeout_s: float) -> None:
        from sennit.transport.communicator import Communicator
        from sennit.transport.meeting.store import FileStore

        self._group = Communicator(rank=rank, world=world, store=FileStore(store), timeout_s=timeout_s)

    def run(self, payload: Payload) -> None:
        from sennit.transport import algorithms
        from sennit.transport.plans.elements import Dtype, ReduceOp
        from sennit.transport.plans.plan import Plan

        world, rank, elements = self._group.world, self._group.rank, payload.elements
        if payload.codec is not None and payload.operation is Operation.ALLTOALL:
            payload.got[:] = self._group.alltoall(payload.given, codec=payload.codec)
            return
        if payload.codec is not None:
            rows = payload.given.reshape(-1, elements)
            payload.got[:] = self._group.allreduce(rows, leaves=payload.leaves, codec=payload.codec)
            return
        if payload.scattered:
            payload.got[:] = self._group.allgather(self._group.reduce_scatter(payload.given))
            return

        def compile_plan() -> Plan:
            match payload.operation:
                case Operation.ALLREDUCE if payload.leaves is not None:
                    call: dict[str, Any] = {"elements": elements, "dtype": Dtype.F32, "op": ReduceOp.SUM}
                    return self._group.selection.allreduce(world=world, rank=rank, leaves=payload.leaves, **call)
                case Operation.ALLREDUCE:
                    return self._group.selection.allreduce(
                        world=world, rank=rank, elements=elements + 1, dtype=Dtype.F32, op=ReduceOp.SUM, in_place=True
                    )
                case Operation.ALLTOALL:
                    return algorithms.alltoall(world=world, rank=rank, item_bytes=ELEMENT_BYTES)
                case Operation.INCAST:
                    return algorithms.gather(world=world, rank=rank, root=0, item_bytes=ELEMENT_BYTES)

        counts: list[int] = []
        match payload.operation:
            case Operation.ALLTOALL:
                counts = [elements // world] * 2 * world
            case Operation.INCAST:
                counts = [elements] * world

        buffers = [payload.given]
        if payload.got is not payload.given and payload.got.size:
            buffers.append(payload.got)
        flat = [buffer.view(np.uint8) for buffer in buffers]
        self._group.post((payload.operation, elements), compile_plan, flat, counts=counts).wait()

    def counters(self) -> dict[str, int]:
        return self._group.counters()

    def describe(self) -> str:
        return self._group.describe()

    def bytes_received(self) -> int:
        counters = self._group.counters()
        return counters.get("data_bytes_received", 0)

    def lost_ranks(self) -> list[int]:
        return list(self._group.lost_ranks)

    def reconfigure(self, timeout_s: float) -> tuple[int, int]:
        from sennit.transport.meeting.membership import Terms

        self._group = self._group.reconfigure(Terms(timeout_s=timeout_s))
        return self._group.rank, self._group.world

    def close(self) -> None:
        self._group.shutdown()


class GlooGroup:
    """One process group. `GLOO_SOCKET_IFNAME` names the interfaces of all planes."""

    def __init__(self, *, rank: int, world: int, store: Path, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch = torch
        self._dist = dist
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}.torch",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def run(self, payload: Payload) -> None:
        given, got = self._torch.from_numpy(payload.given), self._torch.from_numpy(payload.got)
        match payload.operation:
            case Operation.ALLREDUCE:
                self._dist.all_reduce(got)
            case Operation.ALLTOALL:
                self._dist.all_to_all_single(got, given)
            case Operation.INCAST:
                at_root = self._dist.get_rank() == 0
                self._dist.gather(given, list(got.chunk(self._dist.get_world_size())) if at_root else None)

    def counters(self) -> dict[str, int]:
        return {}

    def describe(self) -> str:
        return f"gloo of torch {self._torch.__version__}"

    def bytes_received(self) -> int:
        return 0

    def lost_ranks(self) -> list[int]:
        return []

    def reconfigure(self, timeout_s: float) -> tuple[int, int]:
        raise RuntimeError("gloo cannot continue without a rank")

    def close(self) -> None:
        self._dist.destroy_process_group()
