# SPDX-License-Identifier: Apache-2.0
"""OpenMPI in a benchmark worker, through mpi4py's buffer interface; started by `mpirun`."""

import functools
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.transport.library import mean_seconds

Array = np.ndarray[tuple[int], np.dtype[np.float32]]


class OpenMpiLibrary:
    """One MPI rank. `peer` is always "openmpi"; the group is COMM_WORLD."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self._buffers: dict[Case, tuple[Array, Array]] = {}

    def join(self, peer: str) -> None:
        """COMM_WORLD exists since MPI_Init."""

    def allocate(self, case: Case) -> None:
        if case not in self._buffers:
            self._buffers.clear()
            given, got = case.elements(self._world.Get_size())
            self._buffers[case] = np.full(given, 0.0, np.float32), np.full(got, 0.0, np.float32)

    def run(self, peer: str, case: Case, iterations: int) -> float:
        self.allocate(case)
        return mean_seconds(self._operation(case, *self._buffers[case]), iterations)

    def _operation(self, case: Case, given: Array, got: Array) -> Callable[[], None]:
        match case.collective:
            case Collective.ALLREDUCE:
                return functools.partial(self._world.Allreduce, MPI.IN_PLACE, given)
            case Collective.ALLTOALL:
                return functools.partial(self._world.Alltoall, given, got)
            case Collective.REDUCE_SCATTER:
                return functools.partial(self._world.Reduce_scatter_block, given, got)
            case Collective.ALL_GATHER:
                return functools.partial(self._world.Allgather, given, got)

    def verify(self, peer: str, case: Case) -> None:
        """Checks the sum or the last block only: the peer is not under test."""
        given_count, got_count = case.elements(self._world.Get_size())
        given = np.full(given_count, float(self.rank), np.float32)
        got = np.full(got_count, -1.0, np.float32)
        self._operation(case, given, got)()
        size = self._world.Get_size()
        last, expected = float(got[-1]), float(size - 1)
        if case.collective is Collective.ALLREDUCE:
            last = float(given[-1])
        if case.collective in (Collective.ALLREDUCE, Collective.REDUCE_SCATTER):
            expected = float(sum(range(size)))
        if last != expected:
            raise RuntimeError(f"openmpi {case.collective} of {case.size_bytes} bytes: got {last}, expected {expected}")

    def stop(self) -> None:
        """MPI_Finalize runs at exit."""
