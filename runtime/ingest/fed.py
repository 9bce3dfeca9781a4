# SPDX-License-Identifier: Apache-2.0
"""The source of batches that feeders send: this rank's session with them."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.offload.batches import BatchLayout
from sennit.offload.errors import PlanError, TargetUnavailable
from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import VERSION, Terms
from sennit.offload.ingest.session import IngestError, Session
from sennit.offload.ingest.target import IngestTarget
from sennit.offload.sketch import Sketch
from sennit.runtime.data.combined import CombinedBatch
from sennit.runtime.data.order import Order, OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.ingest.page import IngestPage
from sennit.transport.errors import ConfigError

SLOTS: Final = 4


class FedSource:
    """The batches of one rank, as they arrive. Making it is collective."""

    def __init__(
        self,
        target: IngestTarget,
        settings: OrderSettings,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        local_ranks: int,
        timeout_s: float,
    ) -> None:
        """Waits until a feeder has described its data."""
        self._target = target
        self._rank, self._world_size = rank, world_size
        self._local_rank, self._local_ranks = local_rank, local_ranks
        self._timeout_s = timeout_s
        listener = self._target.listen(local_rank)
        self._session_number = _shared(secrets.randbits(32) if rank == 0 else None)
        endpoints: list[Any] = [None] * world_size
        dist.all_gather_object(endpoints, [*listener.getsockname()[:2]])
        terms = Terms(
            version=VERSION,
            session=self._session_number,
            rank=rank,
            world_size=world_size,
            endpoints=endpoints,
            packet_bytes=self._target.packet_bytes(local_rank),
            window_packets=max(1, self._target.packets_on_the_way(local_ranks) // SLOTS),
            order=asdict(settings),
        )
        self._page = IngestPage(rank, world_size)
        self._session = Session(listener, terms, timeout_s=timeout_s, observe=self._page.show)
        try:
            self.facts = self._agree()
            self.order: Order = settings.order(self.facts.name, self.facts.sample_count)
        except BaseException as error:
            self.close(str(error))
            raise
        self.tables = self.facts.tables
        self.fingerprint = self.facts.fingerprint
        self.preprocessing = _preprocessing(self.facts)
        self.dense_count = len(self.facts.dense_names)

    def begin(self, number: int) -> None:
        counts = self.order.counts(0, self._world_size)
        try:
            layout = BatchLayout(plan=self.facts.plan, batch_rows=max(counts), slots=SLOTS)
            receiver = self._target.receiver(
                layout,
                self._local_rank,
                local_ranks=self._local_ranks,
                session=self._session_number,
                timeout_s=self._timeout_s,
            )
        except (PlanError, TargetUnavailable, OSError) as error:
            raise ConfigError(f"--ingest {self._target}: {error}") from error
        # After these releases, the ring expects batches from `number` on.
        for released in range(max(0, number - SLOTS), number):
            receiver.release(released)
        self._session.start(
            receiver,
            lambda batch: self.order.counts(batch, self._world_size)[self._rank],
            first_batch=number,
            batch_count=self.order.batch_count,
            slots=SLOTS,
        )

    def take(self, number: int) -> CombinedBatch:
        """The batch as views of the ring. Only the ids are copied, one table after the other."""
        labels, dense, lengths, values = self._session.take(number).tensors()
        return CombinedBatch(dense=dense, labels=labels, lengths=lengths, values=torch.cat(values))

    def release(self, number: int) -> None:
        self._session.release(number)

    def counters(self) -> dict[str, int | float]:
        return self._session.counters()

    def sketch(self) -> Sketch | None:
        found = self._session.sketch()
        if found is not None:
            names = {self.facts.plan.sparse[n].column: table.name for n, table in enumerate(self.facts.tables)}
            found.tables = tuple(names[column] for column in found.tables)
        return found

    def close(self, failure: str | None = None) -> None:
        """Tells the feeders that the run is over, or why it failed."""
        self._session.close(failure)
        self._page.close()

    def _agree(self) -> Facts:
        """Rank 0 tells all ranks the facts of the data, which are those of its first feeder."""
        mine = self._session.wait_for_facts().as_json() if self._rank == 0 else None
        facts = Facts.from_json(_shared(mine))
        self._session.agree(facts)
        return facts


def _preprocessing(facts: Facts) -> Preprocessing | None:
    if facts.preprocessing is None:
        return None
    try:
        return Preprocessing.from_json(facts.preprocessing)
    except ValueError as error:
        raise IngestError(f"what the feeder did to {facts.name} cannot be read: {error}") from error


def _shared(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
