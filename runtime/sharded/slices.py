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

    def own_sizes(self, local_batch: int, global_batch: int | None = None) -> list[int]:
        """The samples in each slice of this rank, as far as it can tell without the other ranks.

        Without `global_batch`, the samples of all ranks, its slices share its samples: sizes differ by one at most.
        Raises `ArgumentError` if its samples are neither those of its slices, nor as many as any other rank has.
        """
        own = self.own
        if global_batch is not None:
            samples = self.samples(self.rank, global_batch)
            if samples.high - samples.low == local_batch:
                return self.sizes(own, global_batch)
            if local_batch * self.world_size != global_batch:
                raise ArgumentError(
                    f"{local_batch} samples on rank {self.rank}; of a global batch of {global_batch} its slices "
                    f"{own.low} to {own.high - 1} hold the samples {samples.low} to {samples.high - 1}, "
                    f"{samples.high - samples.low} samples; allowed: these, or equally many on all ranks"
                )
        return _shared(local_batch, own.high - own.low)

    def batch_of(self, of_rank: Sequence[int], global_batch: int | None = None) -> GlobalBatch:
        """The global batch of which each rank has so many samples. `global_batch`: what the ranks say that it has.

        Without it, no rank could cut its samples by slices that differ in size. Raises `ArgumentError` if ranks have
        neither the samples of their slices, nor equally many.
        """
        total = sum(of_rank)
        if global_batch not in (None, total):
            raise ArgumentError(f"a global batch of {global_batch} samples, but all ranks together give {total}")
        by_slice = [span.high - span.low for span in (self.samples(rank, total) for rank in range(self.world_size))]
        is_by_slice, is_equal = by_slice == list(of_rank), len(set(of_rank)) <= 1
        if is_by_slice and not is_equal and global_batch is None and total % self.count:
            raise ArgumentError(
                f"slices of {(least := total // self.count)} and {least + 1} samples without a global_batch; allowed: "
                f"with global_batch {total}, equally many samples on all ranks, or slices of one size"
            )
        if not is_by_slice and not is_equal:
            rank = next(rank for rank, count in enumerate(of_rank) if count != of_rank[0])
            raise ArgumentError(
                f"{of_rank[0]} samples on rank 0, {of_rank[rank]} on rank {rank}; allowed: equally many on all ranks, "
                f"or those of their slices, which of {total} samples are {by_slice[0]} and {by_slice[rank]}"
            )
        return GlobalBatch(slices=self, of_rank=tuple(of_rank), is_by_slice=is_by_slice)

    def parts(self, sizes: Sequence[int]) -> list[slice]:
        """Slices of these sizes as ranges of a rank's samples."""
        found, start = [], 0
        for size in sizes:
            found.append(slice(start, start + size))
            start += size
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """How many samples each rank gives, and how many are in each of its slices (`Slices.batch_of`)."""

    slices: Slices
    of_rank: tuple[int, ...]
    is_by_slice: bool
    """Whether all slices differ by one sample at most, so that a sample is in one slice in every world. If not, ranks
    have equally many samples, and slices of one rank differ by one at most."""

    @property
    def size(self) -> int:
        """The samples of all ranks."""
        return sum(self.of_rank)

    def sizes(self, rank: int) -> list[int]:
        """Samples in each slice of a rank."""
        span = self.slices.of(rank)
        if self.is_by_slice:
            return self.slices.sizes(span, self.size)
        return _shared(self.of_rank[rank], span.high - span.low)


def _shared(samples: int, slices: int) -> list[int]:
    """The samples of a rank in each of its slices. Where ranks have equally many slices, they are those of the rule."""
    return [(number + 1) * samples // slices - number * samples // slices for number in range(slices)]
