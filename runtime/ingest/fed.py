# SPDX-License-Identifier: Apache-2.0
"""The source of batches that feeders send: this rank's session with them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.closing import Closing
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import PlanError, TargetUnavailable
from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import VERSION, ProtocolError, Terms, has_room, session_numbers
from sennit.offload.ingest.session import IngestError, Session
from sennit.offload.ingest.target import IngestTarget
from sennit.offload.sketch import Sketch
from sennit.runtime.backend.process_group import BACKEND_NAME, communicator
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import History
from sennit.runtime.ingest.order import numbered, terms_of
from sennit.runtime.ingest.page import IngestPage
from sennit.runtime.stream.order import StreamOrder
from sennit.runtime.stream.settings import StreamSettings
from sennit.transport.errors import ConfigError, PeerError
from sennit.transport.meeting.host import machine_identity

SLOTS: Final = 4
NETWORK: Final = Path("/proc/self/ns/net")


class Door(Closing):
    """Where one rank meets feeders. It stays open while groups change, so that feeders can wait for the next one."""

    def __init__(self, target: IngestTarget, local_rank: int) -> None:
        """Raises TargetError if the port cannot be had."""
        self.target, self.local_rank = target, local_rank
        self.listener = target.listen(local_rank)
        self.run = secrets.randbits(32)
        """The number of the run; that of rank 0 once there was a session."""

        self.facts: Facts | None = None
        """The run's facts, once they are known."""

    def close(self) -> None:
        self.listener.close()

    def shares(self) -> str:
        """Ranks with the same text here have their target in common."""
        return f"{machine_identity()} {NETWORK.stat().st_ino} {self.target}"


class FedSource:
    """The batches of one rank in one group, as they arrive. Making it is collective."""

    # Feeders send ids of tables alone.
    history: History | None = None
    integer_names: tuple[str, ...] = ()

    def __init__(
        self,
        door: Door,
        run: OrderSettings,
        stream: StreamSettings,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_elastic: bool,
        known: Preprocessing | None = None,
    ) -> None:
        """Waits until a feeder has described its data, if the door does not know them yet.

        `known`: the preprocessing of the checkpoint that the run goes on from. Feeders take that of rank 0.
        """
        self._door = door
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        told = _told(known) if door.facts is None else door.facts.preprocessing
        sessions, door.run, told = _shared([session_numbers(world_size), door.run, told])
        self._session_number = sessions[rank]
        is_ours = dist.get_backend() == BACKEND_NAME
        try:
            self._reception = door.target.reception()
        except OSError as error:
            raise ConfigError(f"--ingest {door.target}: {error}") from None
        places: list[Any] = [None] * world_size
        host, port = door.listener.getsockname()[:2]
        name = "" if self._reception is None else self._reception.name
        try:
            dist.all_gather_object(places, (host, port, door.shares(), door.local_rank, name))
        except BaseException:
            self._close_reception()
            raise
        self._mates = {local_rank: name for *_, shares, local_rank, name in places if shares == door.shares()}
        terms = Terms(
            version=VERSION,
            session=self._session_number,
            rank=rank,
            world_size=world_size,
            endpoints=[[host, port] for host, port, *_ in places],
            packet_bytes=door.target.packet_bytes(door.local_rank),
            window_packets=max(1, door.target.packets_on_the_way(door.local_rank, self._mates) // SLOTS),
            order=terms_of(run, stream),
            run=door.run,
            elastic=is_elastic,
            epoch=communicator().epoch if is_ours else 0,
            preprocessing=told,
        )
        self._page = IngestPage(rank, world_size)
        self._session = Session(
            door.listener, terms, timeout_s=timeout_s, observe=self._page.show,
            check=_check_group if is_ours else lambda: None,
        )  # fmt: skip
        try:
            self.facts = door.facts = self._agree(door.facts)
            self.order = _numbered(self.facts, run, stream)
        except BaseException as error:
            self.close(told_feeders(error), goes_on=is_elastic and bool(group_failure(error)))
            raise
        self.tables = self.facts.tables
        self.fingerprint = self.facts.fingerprint
        self.preprocessing = _preprocessing(self.facts)
        self.dense_count = len(self.facts.dense_names)
        self.label_names = self.facts.label_names

    def begin(self, number: int) -> None:
        counts = self.order.counts(0, self._world_size)
        try:
            layout = BatchLayout(plan=self.facts.plan, batch_rows=max(counts), slots=SLOTS)
            receiver = self._door.target.receiver(
                layout,
                self._door.local_rank,
                address=self._door.listener.getsockname()[0],
                mates=self._mates,
                reception=self._reception,
                session=self._session_number,
                timeout_s=self._timeout_s,
            )
        except (PlanError, TargetUnavailable, OSError) as error:
            raise ConfigError(f"--ingest {self._door.target}: {error}") from error
        finally:
            self._close_reception()
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

    def take(self, number: int) -> Batch:
        """The batch as views of the ring. Only the ids are copied, one table after the other."""
        labels, numbers, lengths, values = self._session.take(number).tensors()
        dense, weights, ends = numbers, None, self.dense_count + len(self.label_names) - 1
        if numbers.shape[1] > self.dense_count:
            dense = numbers[:, : self.dense_count].contiguous()
        if len(self.label_names) > 1:
            labels = torch.cat([labels[:, None], numbers[:, self.dense_count : ends]], 1)
        if self.facts.has_weights:
            weights = numbers[:, ends].contiguous()
        return Batch(dense=dense, labels=labels, lengths=lengths, values=torch.cat(values), sample_weights=weights)

    def scales(self, steps: int) -> None:
        return None

    def restore_scales(self, steps: int, told: object) -> None:
        pass

    def release(self, number: int) -> None:
        self._session.release(number)

    def sample(self) -> Samples | None:
        return None

    def counters(self) -> dict[str, int | float]:
        return self._session.counters()

    def history_lengths(self, count: int) -> None:
        """Feeders send no histories."""

    def program_ns(self) -> int | None:
        return self._session.program_ns()

    def sketch(self) -> Sketch | None:
        found = self._session.sketch()
        if found is not None:
            names = {self.facts.plan.sparse[n].column: table.name for n, table in enumerate(self.facts.tables)}
            found.tables = tuple(names[column] for column in found.tables)
        return found

    def close(self, failure: str | None = None, *, goes_on: bool = False) -> None:
        """Tells the feeders that the run is over, why it failed, or that it goes on in another group."""
        self._session.close(failure, goes_on=goes_on)
        self._page.close()
        self._close_reception()

    def _close_reception(self) -> None:
        """Whoever waits there hears at once that nobody comes."""
        if self._reception is not None:
            self._reception.close()

    def _agree(self, known: Facts | None) -> Facts:
        """Rank 0 tells all ranks the facts of the data, which are those of the run's first feeder."""
        mine, told = known, None
        # Other ranks wait in a collective. Its deadline must not end a run whose feeder has much to read.
        while told is None:
            if self._rank == 0 and mine is None:
                mine = self._session.wait_for_facts(self._timeout_s / 4)
            told = _shared(None if mine is None else mine.as_json())
        facts = Facts.from_json(told)
        if known is not None and (difference := facts.difference(known)) is not None:
            raise IngestError(f"the feeders had other data before the group changed: now {difference}")
        self._session.agree(facts)
        return facts


def told_feeders(error: BaseException) -> str:
    """Why a run ends, for its feeders. An interrupt has no text of its own."""
    if isinstance(error, KeyboardInterrupt):
        return "the trainer was interrupted; a run with --resume wants all feeders again"
    return str(error) or type(error).__name__


def group_failure(error: BaseException) -> str:
    """Why the group of ranks cannot be used any more; empty if the error is this rank's own."""
    return communicator().failure or (str(error) if isinstance(error, PeerError) else "")


def _check_group() -> None:
    """Raises if the group has failed, or a rank is gone. A rank that waits for records is in no operation that would
    find out."""
    group = communicator()
    if group.failure:
        raise PeerError(group.failure)
    if gone := group.find_gone_ranks():
        raise PeerError(f"rank {', '.join(map(str, gone))} is gone, found out while waiting for records")


def _numbered(facts: Facts, run: OrderSettings, stream: StreamSettings) -> StreamOrder:
    try:
        return numbered(facts.name, facts.numbering, run, stream)
    except ProtocolError as error:
        raise IngestError(str(error)) from error


def _preprocessing(facts: Facts) -> Preprocessing | None:
    if facts.preprocessing is None:
        return None
    try:
        return Preprocessing.from_json(facts.preprocessing)
    except ValueError as error:
        raise IngestError(f"what the feeder did to {facts.name} cannot be read: {error}") from error


def _told(known: Preprocessing | None) -> dict[str, Any] | None:
    """The preprocessing as JSON, if a message has room for it."""
    if known is None:
        return None
    told = known.as_json()
    return told if has_room(told) else None


def _shared(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
