# SPDX-License-Identifier: Apache-2.0
"""What a step of tables asks of its exchanges between ranks: ids go to owners, results come back, gradients go again.

Two classes do it: `PooledExchange` answers with sums of bags, `RowExchange` with rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.spec import Pooling
from sennit.runtime.sharded.engines import Engines, Settings
from sennit.runtime.sharded.features import Outgoing
from sennit.runtime.sharded.shards import Announced, Shards
from sennit.runtime.sharded.slices import GlobalBatch
from sennit.runtime.sharded.tables import Shard
from sennit.runtime.sharded.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """The ids of a batch that came to this rank as an owner, and what it needs for the answers of both directions."""

    announced: Announced
    """The ids as lookups of this rank's shards."""


class Ready(NamedTuple):
    """A rank's ids in the order of the wire, before they are sent."""

    counts: list[int]
    """How many ids go to each rank. The rank has to know it before they come."""

    send: Callable[[Sequence[int], GlobalBatch], Arrived]
    """Sends the ids. Arguments: how many each rank sends to this one, and the samples of all ranks. Collective."""


class Given(NamedTuple):
    """The gradients of a lookup."""

    announced: Announced
    """What was looked up."""

    batch: Batch
    """The blocks that rows are updated from."""

    gradient: Tensor
    """Float32, flat: the gradient of the blocks' results."""


ArrivedT = TypeVar("ArrivedT", bound=Arrived)


class Exchange(ABC, Generic[ArrivedT]):
    """Lookups of some features, whose tables are in one engine. Exchanges are collective among the peers."""

    poolings: ClassVar[tuple[Pooling, ...]]
    """What the tables may do with the rows of a bag."""

    def __init__(
        self,
        settings: Settings,
        shards: Shards,
        number_of: Mapping[Shard, int],
        features: Sequence[int],
        peers: Sequence[int],
        wire: Wire,
    ) -> None:
        """`number_of`: this rank's shards in the engine. `features`: their numbers in the model, rising. `peers`: the
        ranks of the `wire`."""
        self._tables, self._slices, self._wire = settings.tables, settings.slices, wire
        self._shards, self._number_of, self._device = shards, number_of, shards.engine.device
        self._features = list(features)
        self._peers, self._me = list(peers), list(peers).index(settings.slices.rank)

    @classmethod
    def of(cls, engines: Engines) -> list[Self]:
        """The exchanges of the tables of `engines`: of those in shards; and of replicated ones, if there are any.

        A rank has replicated tables for itself: no other rank is a peer.
        """
        settings, rank = engines.here, engines.here.slices.rank
        everyone = range(settings.slices.world_size)
        found = [cls(settings, engines.sharded, engines.number_of, engines.features, everyone, settings.wire)]
        if engines.replicated_features:
            alone = Wire(rank=0, world_size=1, group=None)
            features = engines.replicated_features
            found.append(cls(settings, engines.replicated, engines.replica_of, features, (rank,), alone))
        return found

    @staticmethod
    @abstractmethod
    def result_rows(outgoing: Outgoing) -> list[int]:
        """The rows of the result of each feature of the model."""

    @abstractmethod
    def ready(self, outgoing: Outgoing, sizes: Sequence[int]) -> Ready:
        """Puts this rank's ids in the order of the wire. Not collective. Raises `ArgumentError` for ids it refuses.

        `sizes`: samples in each slice of this rank.
        """

    def fetch(self, arrived: ArrivedT) -> None:
        """Waits for the rows of what arrived. Not collective."""
        self._shards.fetch(arrived.announced)

    @abstractmethod
    def results(self, arrived: ArrivedT) -> dict[int, Tensor]:
        """The float32 result of each feature, [rows, dim], by its number."""

    @abstractmethod
    def give(self, arrived: ArrivedT, gradients: Mapping[int, Tensor]) -> tuple[Given, dict[int, Tensor]]:
        """Sends the gradients of `results` to the owners of rows.

        Returns those for this rank's rows; and the gradients of this rank's weights, [ids] by feature, if they require
        some.
        """

    def settle(self, arrived: ArrivedT) -> None:
        """All ranks have fetched the rows of the batch."""
        self._shards.settle(arrived.announced)

    def release(self, arrived: ArrivedT) -> None:
        """Ends a step without an update. Not collective."""
        self._shards.release(arrived.announced, is_dirty=False)
