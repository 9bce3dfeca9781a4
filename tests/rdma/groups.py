# SPDX-License-Identifier: Apache-2.0
"""Groups whose ranks are threads of this process: on a single processor they start faster than processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from sennit.testbed.topology.namespace import within
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind, VerbsService
from sennit.transport.meeting.store import FileStore

TIMEOUT_S: Final = 50.0
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The transport, interface and host of one rank. Ranks of the same host share memory."""

    transport: TransportKind
    interface: str
    host: str
    namespace: str = ""
    service: VerbsService = VerbsService.UC


def run(
    seats: Sequence[Seat], folder: Path, work: Callable[[Communicator], Result], *, timeout_s: float = TIMEOUT_S
) -> list[Result]:
    """Runs `work` on each rank. Returns the results in rank order."""
    store = FileStore(folder)

    def be(rank: int) -> Result:
        seat = seats[rank]
        config = Config(
            transport=seat.transport,
            interfaces=(seat.interface,),
            host_id=seat.host,
            verbs_service=seat.service,
            timeout_s=timeout_s,
        )
        # The deadline is for operations. On one processor, ranks that start beside others take seconds to meet.
        with Communicator(
            rank=rank, world=len(seats), store=store, config=config, connect_timeout_s=TIMEOUT_S
        ) as group:
            return work(group)

    def take_seat(rank: int) -> Result:
        namespace = seats[rank].namespace
        return within(namespace, be, rank) if namespace else be(rank)

    with ThreadPoolExecutor(len(seats)) as threads:
        ended = [threads.submit(take_seat, rank) for rank in range(len(seats))]
    for rank in ended:
        if (error := rank.exception()) is not None:
            # Its frames hold the rank's group, so its device. pytest keeps the error while a fixture removes the
            # device, which the kernel lets wait until the device has no user.
            traceback.clear_frames(error.__traceback__)
    return [rank.result() for rank in ended]
