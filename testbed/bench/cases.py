# SPDX-License-Identifier: Apache-2.0
"""What is measured: a collective at a size, in the same words for every peer."""

from dataclasses import dataclass
from enum import StrEnum

ELEMENT_BYTES = 4  # float32 throughout: what gradients and pooled embeddings are


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
    """Operations at a time, up to `IN_FLIGHT_MAX`; one only but for sennit-core and kernel-rc."""

    def elements(self, world: int) -> tuple[int, int]:
        """How many float32 a rank gives and gets; a multiple of the world size."""
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
