# SPDX-License-Identifier: Apache-2.0
"""Which samples of a data set a rank takes, batch by batch, so that each sample is in one slice in every world."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from sennit.runtime.sharded.slices import DEFAULT_SLICES, Slices
from sennit.transport.errors import ConfigError


class SliceSampler(Sampler[list[int]]):
    """The samples of this rank's slices, for a `DataLoader`, in place of torch's `DistributedSampler`.

    loader = DataLoader(dataset, batch_sampler=SliceSampler(dataset, 512))

    An epoch is one permutation of all samples, cut into global batches, and each of these into slices. So all worlds
    see the same batches. It is the permutation of `DistributedSampler` with the same seed. An item is the sample
    numbers of this rank in one batch.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        slices: int = DEFAULT_SLICES,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        group: dist.ProcessGroup | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`global_batch`: samples of all ranks in a batch, at least one for each of the `slices`, the model's V.

        The last batch of an epoch is smaller (`size`). It is left out with `drop_last`, and where it has fewer samples
        than slices. `group`: gives the number of ranks and this rank, unless `num_replicas` and `rank` do.

        Raises `ConfigError`. Not collective.
        """
        if num_replicas is None or rank is None:
            num_replicas, rank = dist.get_world_size(group), dist.get_rank(group)
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"rank {rank}; allowed: 0 to {num_replicas - 1}")
        self.slices = Slices(count=slices, rank=rank, world_size=num_replicas)
        if global_batch < slices:
            raise ConfigError(f"a global batch of {global_batch}; allowed: {slices} or more, a sample for each slice")
        if len(dataset) < (least := global_batch if drop_last else slices):
            raise ConfigError(f"{len(dataset)} samples make no batch; allowed: {least} or more")
        self.sample_count, self.global_batch = len(dataset), global_batch
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next epoch, as in `DistributedSampler`. All ranks must give the same."""
        self.epoch = epoch

    def size(self, number: int) -> int:
        """The samples of all ranks in batch `number` of an epoch: `global_batch` of the modules."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number}; allowed: 0 to {len(self) - 1}")
        return min(self.global_batch, self.sample_count - number * self.global_batch)

    def __len__(self) -> int:
        """The batches of an epoch."""
        whole, rest = divmod(self.sample_count, self.global_batch)
        return whole + (not self.drop_last and rest >= self.slices.count)

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            order = torch.randperm(self.sample_count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        else:
            order = torch.arange(self.sample_count)
        for number in range(len(self)):
            first, size = number * self.global_batch, self.size(number)
            own: Any = order[first : first + size][self.slices.own_samples(size)]
            yield own.tolist()
