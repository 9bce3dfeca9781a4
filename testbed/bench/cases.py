# SPDX-License-Identifier: Apache-2.0
"""A measured case: one collective at one size, named the same for every peer."""

from dataclasses import dataclass
from enum import StrEnum

ELEMENT_BYTES = 4  # float32 throughout, as gradients and pooled embeddings


class Collective(StrEnum):
    """The four collectives of synchronous recommendation training."""

    ALLREDUCE = "allreduce"
    ALLTOALL = "alltoall"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


IN_FLIGHT_MAX = 16


@dataclass(frozen=True)
class Case:
    """One collective at one size."""

    collective: Collective
    size_bytes: int
    """Bytes of the larger of a rank's two buffers: the input of reduce_scatter, the output of all_gather."""

    in_flight: int = 1
    """Operations in flight, at most `IN_FLIGHT_MAX`. More than one only for sennit-core and kernel-rc."""

    def elements(self, world: int) -> tuple[int, int]:
        """Returns the float32 elements that each rank sends and receives: a multiple of the world size."""
        whole = self.size_bytes // ELEMENT_BYTES // world * world
        if whole == 0:
            raise ValueError(
                f"size {self.size_bytes} B is too small for {world} ranks: at least {ELEMENT_BYTES * world} B"
            )
        part = whole // world
        match self.collective:
            case Collective.REDUCE_SCATTER:
                return whole, part
            case Collective.ALL_GATHER:
                return part, whole
            case _:
                return whole, whole
