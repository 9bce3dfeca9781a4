# SPDX-License-Identifier: Apache-2.0
"""Ranks of a rendezvous as threads over an in-memory store, with endpoints that only record calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from sennit.transport.config import Config
from sennit.transport.errors import DeviceError, SennitError
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.rails import Rail
from sennit.transport.meeting.store import Store


class MemoryStore:
    """A torch-like store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int, /) -> int:
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self.changed:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
                self.changed.notify_all()
            return self.values[key]

    def delete_key(self, key: str, /) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None

    def check(self, keys: Sequence[str], /) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")


class Recorder:
    """An endpoint on a machine `room`. It can open the segments of its own room."""

    def __init__(self, rank: int, room: str, *, shm_errno: int | None = None) -> None:
        self.rank, self.room, self.shm_errno = rank, room, shm_errno
        self.ranks_here = 0
        self.ranks_of_host: list[int] = []
        self.routes: list[tuple[str, bytes]] = []
        self.tried: list[tuple[str, bytes]] = []
        self.udp: tuple[list[tuple[str, str]], dict[str, Any]] | None = None
        self.verbs: tuple[list[str], dict[str, Any]] | None = None
        self.without_aggregator = ""  # why
        self.aggregator: tuple[str, int, int] | None = None

    def shm_offer(self, ranks_here: list[int], /) -> bytes:
        assert self.rank in ranks_here
        self.ranks_of_host = ranks_here
        if self.shm_errno is not None:
            raise DeviceError("shm_open", self.shm_errno)
        return f"{self.room}/{self.rank}".encode()

    def shm_accept(self, rank: int, offer: bytes, /) -> str:
        assert offer.endswith(f"/{rank}".encode())
        return "" if offer.decode().split("/")[0] == self.room else "another room. Open the door"

    def udp_open(self, rails: list[tuple[str, str]], /, **settings: Any) -> bytes:
        self.udp = (rails, settings)
        return f"udp{self.rank}\x00\xff".encode("latin-1")

    def verbs_open(self, addresses: list[str], /, **settings: Any) -> bytes:
        self.verbs = (addresses, settings)
        return f"verbs{self.rank}".encode()

    def aggregator_open(self, address: str, port: int, /, *, key: int, limit_s: float) -> str:
        self.aggregator = (address, port, key)
        return self.without_aggregator

    def aggregator_drop(self) -> None:
        self.aggregator = None

    def offer_for(self, rank: int, /) -> bytes:
        return f"for{rank}".encode()

    def begin_trial(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        self.tried = list(routes)

    def try_network(self, limit_s: float, /) -> bool:
        return True  # test_network_trial.py covers networks that fail

    def is_tried(self, rank: int, /) -> bool:
        return True

    def is_perfect(self, rank: int, /) -> bool:
        return True

    def trial_message(self, rank: int, /) -> bytes:
        raise AssertionError(rank)

    def learn_trial(self, rank: int, message: bytes, /) -> None:
        raise AssertionError(rank)

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]:
        # The first rail pairs with the peer's first one, a second rail with none.
        address = self.udp[0][0][0] if self.udp is not None else ""
        return [(address, 50_000, f"10.0.0.{rank}", 4791, 50_001, 4791, 4096, 4096, 0, True, "")]

    def trial_payload_bytes(self, rank: int, /) -> int:
        raise AssertionError(rank)

    def trial_payload_max_bytes(self, rank: int, /) -> int:
        raise AssertionError(rank)

    def abort(self, reason: str, /) -> None:
        raise AssertionError(reason)

    def give_up(self, reason: str, /) -> None:
        raise AssertionError(reason)

    def connect(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        self.routes = list(routes)


def meet(
    endpoints: Sequence[Recorder],
    configs: Sequence[Config] | None = None,
    *,
    store: Store | None = None,
    name: str = "world",
    timeout_s: float = 60.0,
    absent: Sequence[int] = (),
    rails: Sequence[Sequence[Rail]] = (),
    notes: dict[int, tuple[str, ...]] | None = None,
    cores: Sequence[set[int]] = (),
) -> list[tuple[str, ...] | SennitError]:
    """Returns each rank's routes, or the error that it raised. `cores`: those that each rank may run on."""
    world = len(endpoints)
    shared = MemoryStore() if store is None else store
    bound = threading.local()

    def join(rank: int) -> tuple[str, ...] | SennitError:
        bound.cores = cores[rank] if cores else {0, 1}

        def make(ranks_here: int) -> Recorder:
            endpoints[rank].ranks_here = ranks_here
            return endpoints[rank]

        try:
            connection = rendezvous.connect(
                make,
                config=configs[rank] if configs else Config(),
                store=shared,
                rank=rank,
                world=world,
                name=name,
                rails=lambda: rails[rank] if rails else [Rail(interface="eth0", address=f"10.0.0.{rank}")],
                timeout_s=timeout_s,
            )
        except SennitError as error:
            return error
        assert connection.endpoint is endpoints[rank]
        if notes is not None:
            notes[rank] = connection.notes
        return connection.routes

    with patch("os.sched_getaffinity", lambda _: bound.cores), ThreadPoolExecutor(world) as pool:
        return list(pool.map(join, [rank for rank in range(world) if rank not in absent]))
