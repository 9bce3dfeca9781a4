# SPDX-License-Identifier: Apache-2.0
"""What a rank needs in a group of 1,024 ranks, 8 on each of 128 hosts: bytes of the store, and memory.

The real rendezvous runs here, as threads, with offers as large as real ones: of 1,024 ranks in the long tests, of 256
in the others. `pytest -rP` shows figures.
"""

from __future__ import annotations

import functools
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from sennit.transport import _core
from sennit.transport.config import Config
from sennit.transport.meeting import exchanges, rank_records, rendezvous
from sennit.transport.meeting.rails import Rail
from tests.extent import briefly
from tests.transport.meeting import Recorder

WORLD, RANKS_A_HOST = 1_024, 8
LESS = 256
# Rank 0 of 1,024 reads and writes 214,000 bytes; 188,000 before a group met in three rounds in place of four.
STORE_MAX_BYTES = 220_000
READ_MAX_BYTES_A_PEER = 100
MEMORY_MAX_BYTES = 64 << 20
PEER_MAX_BYTES = 40 << 10
# The offer's table in docs/reference/wire.md: where the fields lie that differ from rank to rank.
OFFER_RANK_AT, OFFER_RAIL_AT = 16, 52
OFFER_PAYLOAD_AT = OFFER_RAIL_AT + 6
# A thread that waits for the interpreter wakes up this often to ask for it. A thousand threads at the usual 5 ms take
# more processor time for that than for their work.
SWITCH_S = 1.0
RAIL = struct.Struct("<BBBBHI16s")
PATHS = 8
UDP = {"path_count": PATHS, "path_policy": "round_robin", "congestion": "fixed", "window_bytes": 2 << 20}


class CountingStore:
    """One rank's view of a store in memory. Waiters sleep until the last of their keys is there."""

    class Shared:
        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}
            self.waiting: dict[str, list[threading.Event]] = {}
            self.lock = threading.Lock()

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.read_bytes = self.written_bytes = self.requests = 0

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str, /) -> None:
        self.requests += 1
        self.written_bytes += len(value)
        with self._shared.lock:
            self._shared.values[key] = value.encode()
            for event in self._shared.waiting.pop(key, ()):
                event.set()

    def multi_set(self, keys: Sequence[str], values: Sequence[str], /) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)
        self.requests -= len(keys) - 1

    def get(self, key: str, /) -> bytes:
        self.requests += 1
        value = self._shared.values[key]
        self.read_bytes += len(value)
        return value

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        values = [self.get(key) for key in keys]
        self.requests -= len(keys) - 1
        return values

    def check(self, keys: Sequence[str], /) -> bool:
        self.requests += 1
        return all(key in self._shared.values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._shared.lock:
            total = int(self._shared.values.get(key, b"0")) + amount
            self._shared.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert expected == ""
        if key in self._shared.values:  # a request that reads what is there
            return self.get(key)
        self.set(key, desired)
        return desired.encode()

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        self.requests += 1
        for key in keys:
            event = threading.Event()
            with self._shared.lock:
                if key in self._shared.values:
                    continue
                self._shared.waiting.setdefault(key, []).append(event)
            if not event.wait(timeout.total_seconds()):
                raise RuntimeError(f"no {key}")


class Rank(Recorder):
    """A rank whose offers differ from others' where those of real ranks do."""

    def __init__(self, rank: int, offer: bytes, pair_bytes: int) -> None:
        super().__init__(rank, f"host-{rank // RANKS_A_HOST}")
        own = random.Random(rank)
        address = random.Random(-1 - rank // RANKS_A_HOST).randbytes(16)
        blob = bytearray(offer)
        struct.pack_into("<I", blob, OFFER_RANK_AT, rank)
        RAIL.pack_into(blob, OFFER_RAIL_AT, 6, 64, 0, 0, own.randrange(1 << 16), 4096, address)
        blob[-2 * PATHS :] = own.randbytes(2 * PATHS)
        self._blob, self._own, self._pair_bytes = bytes(blob), own, pair_bytes
        self._segment = own.randbytes(8)

    def shm_offer(self, ranks_here: list[int], /) -> bytes:
        self.ranks_of_host = ranks_here
        return self._segment

    def shm_accept(self, rank: int, offer: bytes, /) -> str:
        return "" if rank in self.ranks_of_host else "it is far away"

    def udp_open(self, rails: list[tuple[str, str]], /, **settings: object) -> bytes:
        return self._blob

    def aggregator_open(self, address: str, port: int, /, *, key: int, limit_s: float) -> str:
        raise AssertionError(address)

    def aggregator_drop(self) -> None:
        raise AssertionError

    def offer_for(self, rank: int, /) -> bytes:
        return self._own.randbytes(self._pair_bytes)

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]:
        return []


@pytest.fixture
def rare_switches() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    yield
    sys.setswitchinterval(usual_s)


def real_offer(world: int) -> tuple[bytes, int]:
    """Returns a real offer to all, and how many bytes go to each peer besides."""
    core = _core.Communicator(0, world, timeout_s=1.0, seed=1)
    offer = core.udp_open([("127.0.0.1", "")], **UDP)  # type: ignore[arg-type]
    return offer, len(core.offer_for(1))


@pytest.mark.usefixtures("rare_switches")
@pytest.mark.parametrize("world", briefly([LESS, WORLD], [LESS]))
def test_the_store_of_many_ranks(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, pair_bytes = real_offer(world)
    # All ranks read the same blocks, and they are one process here.
    monkeypatch.setattr(exchanges, "unpack", functools.lru_cache(rank_records.unpack))
    # A rank that takes its turn late reads nothing again meanwhile, as no earlier run was here.
    monkeypatch.setattr(exchanges, "REREAD_S", 600.0)
    shared = CountingStore.Shared()
    stores = [CountingStore(shared) for _ in range(world)]

    def join(rank: int) -> tuple[str, ...]:
        host = random.Random(rank // RANKS_A_HOST).randbytes(16).hex()
        return rendezvous.connect(
            lambda _: Rank(rank, offer, pair_bytes),
            config=Config(host_id=host),
            store=stores[rank],
            rank=rank,
            world=world,
            rails=lambda: [Rail(interface="eth0", address=f"10.0.0.{rank % 256}")],
            timeout_s=600.0,
        ).routes

    with ThreadPoolExecutor(world) as pool:
        routes = list(pool.map(join, range(world)))
    for rank in (0, 8, world - 1):
        near = range(rank // RANKS_A_HOST * RANKS_A_HOST, (rank // RANKS_A_HOST + 1) * RANKS_A_HOST)
        assert routes[rank] == tuple(
            "self" if peer == rank else "shm" if peer in near else "udp" for peer in range(world)
        )
    read = [store.read_bytes for store in stores]
    both = [store.read_bytes + store.written_bytes for store in stores]
    median, most = sorted(read)[world // 2], max(both)
    requests = max(store.requests for store in stores)
    print(
        f"{world} ranks: a rank reads {median / world:.0f} bytes of the store a peer (median), reads and writes at "
        f"most {most:,} bytes in {requests} requests; the offer has {len(offer)} bytes for all and {pair_bytes} a peer"
    )
    assert median <= READ_MAX_BYTES_A_PEER * world
    assert most <= STORE_MAX_BYTES


CONNECT = """
import random, struct, sys
from pathlib import Path
from sennit.transport import _core

WORLD, RANKS_A_HOST, RANK_AT, PATHS, PAYLOAD_AT, PAYLOAD = (int(word) for word in sys.argv[1:])

def anonymous_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Anonymous:", "Shared_Dirty:")))

before = anonymous_bytes()
core = _core.Communicator(0, WORLD, timeout_s=1.0, seed=1)
core.shm_offer(list(range(RANKS_A_HOST)))
offer = core.udp_open(
    [("127.0.0.1", "")], path_count=PATHS, path_policy="round_robin", congestion="fixed", window_bytes=2 << 20
)
routes = [("self", b"")]
for peer in range(1, WORLD):
    blob = bytearray(offer)
    struct.pack_into("<I", blob, RANK_AT, peer)
    if PAYLOAD:  # which counts between hosts: at an address that no interface has
        struct.pack_into("<I4s", blob, PAYLOAD_AT, PAYLOAD, bytes([127, 0, 0, 2]))
    routes.append(("udp", bytes(blob) + struct.pack("<II", 7, 16 * peer)))
core.connect(routes)
print(anonymous_bytes() - before)
"""


@pytest.mark.parametrize(
    ("world", "payload"), [(WORLD, 0), (64, 1_024)], ids=["1024 ranks", "64 ranks, an MTU of 1,500 bytes"]
)
def test_the_memory_of_a_rank_that_has_met_its_peers(world: int, payload: int) -> None:
    """All peers are reached over udp, and it has talked to none. It has a segment for the ranks of its host besides."""
    numbers = (world, RANKS_A_HOST, OFFER_RANK_AT, PATHS, OFFER_PAYLOAD_AT, payload)
    arguments = [str(number) for number in numbers]
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    core = _core.Communicator(0, world, timeout_s=1.0, seed=1)
    before = shared_memory_bytes()
    core.shm_offer(list(range(RANKS_A_HOST)))
    segment_bytes = shared_memory_bytes() - before
    own_bytes = int(done.stdout)
    print(f"{world} ranks: {own_bytes / 2**20:.1f} MiB of a rank's own, {segment_bytes / 2**20:.1f} MiB shared memory")
    assert 0 < segment_bytes < 8 << 20
    assert own_bytes + segment_bytes <= MEMORY_MAX_BYTES
    assert own_bytes / (world - 1) <= PEER_MAX_BYTES


def shared_memory_bytes() -> int:
    """Returns how much this process's segments in /dev/shm hold."""
    return sum(
        os.fstat(int(number)).st_blocks * 512
        for number in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{number}")
        and os.readlink(f"/proc/self/fd/{number}").startswith("/dev/shm/sennit-")
    )
