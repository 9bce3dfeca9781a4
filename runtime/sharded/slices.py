# SPDX-License-Identifier: Apache-2.0
"""The slices of the global batch. They belong to the model and decide bits; which rank has which belongs to the run.

The global batch is cut into V slices. What is summed over samples is summed inside each slice first, and over slices in
the canonical tree (docs/reference/plans.md, rule 1). So a sum has the same bits in every world that plays the V slices.
Fixed virtual slices are the idea of EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sennit.transport.errors import ArgumentError, ConfigError
from sennit.transport.plans.tree import Span, cover, leaves_of

DEFAULT_SLICES = 8
MAX_SLICES = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """The V slices of a global batch, and the contiguous range of them that each rank has."""

    count: int = DEFAULT_SLICES
    """V, a power of two. It belongs to the model: another V gives other bits."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_SLICES or self.count & (self.count - 1):
            raise ConfigError(f"{self.count} slices; allowed: a power of two, 1 to {MAX_SLICES:,}")
        if self.count < self.world_size:
            raise ConfigError(
                f"{self.count} slices of the global batch for {self.world_size} ranks: each rank needs one. "
                f"Give the model {1 << (self.world_size - 1).bit_length()} slices, which changes its bits, or take at "
                f"most {self.count} ranks"
            )

    def of(self, rank: int) -> Span:
        """The slices of a rank."""
        return leaves_of(rank, self.world_size, self.count)

    @property
    def own(self) -> Span:
        """The slices of this rank."""
        return self.of(self.rank)

    def nodes_of(self, rank: int) -> list[Span]:
        """The largest nodes of the tree that a rank's slices make: the partial sums that it can give."""
        return cover(self.of(rank), self.count)

    def first_sample(self, slice_number: int, global_batch: int) -> int:
        """The first sample of a slice, among the `global_batch` samples of all ranks. Sizes differ by one at most."""
        return slice_number * global_batch // self.count

    def sizes(self, span: Span, global_batch: int) -> list[int]:
        """Samples in each slice of `span`."""
        starts = [self.first_sample(number, global_batch) for number in range(span.low, span.high + 1)]
        return [end - start for start, end in itertools.pairwise(starts)]

    def samples(self, rank: int, global_batch: int) -> Span:
        """The samples of a rank, among those of all ranks."""
        span = self.of(rank)
        return Span(self.first_sample(span.low, global_batch), self.first_sample(span.high, global_batch))

    def own_samples(self, global_batch: int) -> slice:
        """The samples of this rank, as an index into those of all ranks."""
        return slice(*self.samples(self.rank, global_batch))

    def global_batch(self, local_batch: int, given: int | None = None) -> int:
        """The samples of all ranks, from those of this rank.

        Without `given`, all slices have one size. Raises `ArgumentError` if the rank's samples are not its slices.
        """
        own = self.own
        slices = own.high - own.low
        if given is None:
            if local_batch % slices:
                raise ArgumentError(
                    f"{local_batch} samples on rank {self.rank}, which has {slices} of the {self.count} slices: they "
                    f"cannot have one size. Give a multiple of {slices} samples, or `global_batch`, the samples of all "
                    "ranks"
                )
            return local_batch // slices * self.count
        samples = self.samples(self.rank, given)
        if samples.high - samples.low != local_batch:
            raise ArgumentError(
                f"{local_batch} samples on rank {self.rank}; of a global batch of {given} its slices {own.low} to "
                f"{own.high - 1} hold the samples {samples.low} to {samples.high - 1}, {samples.high - samples.low} "
                "samples"
            )
        return given

    def parts(self, sizes: Sequence[int]) -> list[slice]:
        """Slices of these sizes as ranges of a rank's samples."""
        found, start = [], 0
        for size in sizes:
            found.append(slice(start, start + size))
            start += size
        return found
