# SPDX-License-Identifier: Apache-2.0
"""The native core in a benchmark worker, without torch: plans run back to back with no Python in between."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from sennit.testbed.bench.cases import ELEMENT_BYTES, Case, Collective
from sennit.testbed.bench.transport.library import BETWEEN, CODED, mean_seconds_in_flight
from sennit.transport import algorithms
from sennit.transport.choice.costs import Collective as selected
from sennit.transport.codecs import COLLECTIVE_CODECS, Codec
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm
from sennit.transport.meeting.store import FileStore
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Plan
from sennit.transport.symmetric import symmetric_empty

# The peer that runs the same plans on symmetric memory.
SYMMETRIC = "core-symmetric"

# The largest relative error of a result with a codec: MX4 has steps of a quarter.
CODED_ERROR = 0.25

Array = np.ndarray[tuple[int], np.dtype[np.float32]]


def codec_of(peer: str) -> Codec | None:
    """The codec of a peer, to nearest."""
    everywhere = peer.removesuffix(BETWEEN)
    if everywhere not in CODED:
        return None
    return Codec(kind=COLLECTIVE_CODECS[everywhere.removeprefix("core-")], between_hosts=peer.endswith(BETWEEN))


class CoreLibrary:
    """One rank of a group that meets in a folder instead of a torch store."""

    def __init__(self, rank: str, world: str, store_path: str) -> None:
        self.rank = int(rank)
        self.world = int(world)
        self._store_path = store_path
        self._group: Communicator | None = None
        self._buffers: dict[Case, tuple[Array, Array]] = {}
        self._symmetric: dict[Case, tuple[Array, Array]] = {}

    @property
    def _joined(self) -> Communicator:
        if self._group is None:
            raise RuntimeError("the group was not joined")
        return self._group

    def join(self, peer: str) -> None:
        if self._group is not None:
            return
        self._group = Communicator(rank=self.rank, world=self.world, store=FileStore(self._store_path), timeout_s=60.0)

    def allocate(self, case: Case) -> None:
        if case not in self._buffers:
            self._buffers.clear()
            self._symmetric.clear()
            given, got = case.elements(self.world)
            self._buffers[case] = np.full(given, 0.0, np.float32), np.full(got, 0.0, np.float32)

    def run(self, peer: str, case: Case, iterations: int) -> float:
        self.allocate(case)
        if case.in_flight > 1:
            return mean_seconds_in_flight(self._start(case), case.in_flight, iterations)
        buffers = self._in_symmetric_memory(case) if peer == SYMMETRIC else self._buffers[case]
        return statistics.fmean(self._time(peer, case, *buffers, iterations))

    def _in_symmetric_memory(self, case: Case) -> tuple[Array, Array]:
        if case not in self._symmetric:
            given, got = (symmetric_empty(count) for count in case.elements(self.world))
            given.fill(0.0)
            got.fill(0.0)
            self._symmetric[case] = given, got
        return self._symmetric[case]

    def _time(self, peer: str, case: Case, given: Array, got: Array, iterations: int) -> list[float]:
        in_place = case.collective is Collective.ALLREDUCE
        buffers = [given] if in_place else [given, got]
        flat = [buffer.view(np.uint8) for buffer in buffers]
        codec = codec_of(peer)
        if codec is not None:
            compile_plan, counts = self._compile_coded(case, codec)
            return self._joined.time_plan((codec, case), compile_plan, flat, iterations, counts)
        return self._joined.time_plan(case, self._compile(case), flat, iterations, self._counts(case))

    def _start(self, case: Case) -> Callable[[], Callable[[], object]]:
        """Posts an operation. Returns a function that waits for it."""
        given, got = self._buffers[case]
        # Each operation in flight has its own output buffer.
        places = itertools.cycle([got, *(np.zeros_like(got) for _ in range(case.in_flight - 1))])
        compile_plan, counts = self._compile(case), self._counts(case)

        def start() -> Callable[[], object]:
            buffers = [given.view(np.uint8), next(places).view(np.uint8)]
            return self._joined.post(case, compile_plan, buffers, counts=counts).wait

        return start

    def _counts(self, case: Case) -> list[int]:
        """What the plan takes when it is posted: elements for each rank, or of it."""
        parts = [max(case.elements(self.world)) // self.world] * self.world
        match case.collective:
            case Collective.ALLTOALL:
                return parts * 2
            case Collective.ALL_GATHER:
                return parts
            case _:
                return []

    def _compile(self, case: Case) -> Callable[[], Plan]:
        given, got = case.elements(self.world)
        world, rank, parts = self.world, self.rank, (max(given, got) // self.world,) * self.world
        selection = self._joined.selection
        match case.collective:
            case Collective.ALLREDUCE:
                return lambda: selection.allreduce(
                    world=world, rank=rank, elements=given, dtype=Dtype.F32, op=ReduceOp.SUM
                )
            case Collective.ALLTOALL:
                return lambda: algorithms.alltoall(world=world, rank=rank, item_bytes=ELEMENT_BYTES)
            case Collective.REDUCE_SCATTER:
                return lambda: selection.reduce_scatter(
                    world=world, rank=rank, counts=parts, dtype=Dtype.F32, op=ReduceOp.SUM
                )
            case Collective.ALL_GATHER:
                staged = selection.of_parts(selected.ALLGATHER, got * ELEMENT_BYTES) is not Algorithm.DIRECT
                return lambda: selection.allgather(world=world, rank=rank, item_bytes=ELEMENT_BYTES, staged=staged)

    def _compile_coded(self, case: Case, codec: Codec) -> tuple[Callable[[], Plan], list[int]]:
        """The compiler of the plan of a case, and the counts that the plan takes when it is posted."""
        given, got = case.elements(self.world)
        parts, dtype, coding = [max(given, got) // self.world] * self.world, Dtype.F32, codec.coding(Dtype.F32)
        common: dict[str, Any] = {"world": self.world, "rank": self.rank, "dtype": dtype, "coding": coding}
        sums: dict[str, Any] = {**common, "op": ReduceOp.SUM}
        hosts = self._joined.selection.hosts
        match case.collective:
            case Collective.ALLREDUCE if codec.between_hosts:
                return lambda: algorithms.allreduce_between_hosts(elements=given, hosts=hosts, **sums), []
            case Collective.ALLREDUCE:
                return lambda: algorithms.allreduce_coded(elements=given, **sums), []
            case Collective.REDUCE_SCATTER if codec.between_hosts:
                return lambda: algorithms.reduce_scatter_between_hosts(counts=parts, hosts=hosts, **sums), []
            case Collective.REDUCE_SCATTER:
                pieces = algorithms.coded_pieces(parts, coding)
                counts = algorithms.reduce_scatter_counts(self.rank, parts, pieces, dtype, coding)
                return lambda: algorithms.reduce_scatter_coded(pieces=pieces, **sums), counts
            case Collective.ALLTOALL:
                counts = algorithms.alltoall_counts(self.rank, parts, parts, dtype, coding)
                if codec.between_hosts:
                    return lambda: algorithms.alltoall_between_hosts(hosts=hosts, **common), counts
                return lambda: algorithms.alltoall_coded(**common), counts
            case Collective.ALL_GATHER:
                counts = algorithms.allgather_counts(parts, dtype, coding)
                if codec.between_hosts:
                    return lambda: algorithms.allgather_between_hosts(hosts=hosts, **common), counts
                return lambda: algorithms.allgather_coded(**common), counts

    def verify(self, peer: str, case: Case) -> None:
        """Checks the last element only: the core has its own tests."""
        given_count, got_count = case.elements(self.world)
        given, got = np.empty(given_count, np.float32), np.empty(got_count, np.float32)
        if peer == SYMMETRIC:
            given, got = symmetric_empty(given_count), symmetric_empty(got_count)
        given.fill(float(self.rank))
        got.fill(-1.0)
        self._time(peer, case, given, got, 1)
        last = float(given[-1] if case.collective is Collective.ALLREDUCE else got[-1])
        reduces = case.collective in (Collective.ALLREDUCE, Collective.REDUCE_SCATTER)
        expected = float(sum(range(self.world)) if reduces else self.world - 1)
        if abs(last - expected) > (CODED_ERROR * expected if codec_of(peer) else 0.0):
            raise RuntimeError(f"{peer} {case.collective} of {case.size_bytes} bytes: got {last}, expected {expected}")

    def stop(self) -> None:
        self._joined.shutdown()
