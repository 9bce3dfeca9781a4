# SPDX-License-Identifier: Apache-2.0
"""Rounds over a tree of ranks of more than one level: ranks as threads over an in-memory store."""

from __future__ import annotations

import base64
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from sennit.transport import errors
from sennit.transport.errors import ConfigError, MismatchError, PeerError, SennitError
from sennit.transport.meeting import exchanges as exchanges_module
from sennit.transport.meeting import rank_records
from sennit.transport.meeting.exchanges import Exchanges
from sennit.transport.meeting.host import Process
from sennit.transport.meeting.rank_records import Record
from tests.transport.meeting import MemoryStore

# Ranks 32 and 64 have blocks of their own.
WORLD = 70


def meet(exchanges: Exchanges, rank: int, greet: Callable[[int], Record] = lambda rank: {}) -> list[Record]:
    """The first two rounds. Returns the first one's records."""
    hello, offers = exchanges.meet(lambda: greet(rank), lambda listed: {"ranks": len(listed), "rank": rank})
    assert offers == [{"ranks": len(hello), "rank": peer} for peer in range(len(hello))]
    return hello


def run(
    body: Callable[[Exchanges, int], Any],
    *,
    world: int = WORLD,
    timeout_s: float = 60.0,
    absent: Collection[int] = (),
    store: MemoryStore | None = None,
    greet: Callable[[int], Record] = lambda rank: {},
) -> list[Any]:
    """Returns what `body` returns on each rank that is there, or the error that it raises."""
    shared = MemoryStore() if store is None else store

    def join(rank: int) -> Any:
        exchanges = Exchanges(shared, name="group", rank=rank, world=world, timeout_s=timeout_s, watch=None)
        try:
            meet(exchanges, rank, greet)
            return body(exchanges, rank)
        except SennitError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(join, [rank for rank in range(world) if rank not in absent]))


@pytest.mark.parametrize("world", [2, 3, 5, 32, 33, WORLD])
def test_everybody_learns_everything_and_each_gets_its_parcels(world: int) -> None:
    def body(exchanges: Exchanges, rank: int) -> Any:
        records = exchanges.exchange("round", lambda: {"square": rank * rank})
        parcels = {peer: f"{rank}>{peer}".encode() * (peer % 3) for peer in range(world)}
        squares = [record["square"] for record in records]
        return squares, exchanges.swap("parcels", lambda: parcels)

    for rank, (squares, parcels) in enumerate(run(body, world=world)):
        assert squares == [peer * peer for peer in range(world)]
        assert parcels == [f"{peer}>{rank}".encode() * (rank % 3) for peer in range(world)]


class Impatient(MemoryStore):
    """A store whose answers take longer than a `wait` of a moment."""

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
        raise RuntimeError("wait timeout")


def test_whoever_watches_looks_and_leaves_the_store_its_time() -> None:
    store, watched = Impatient(), list[int]()

    def join(rank: int) -> Any:
        exchanges = Exchanges(
            store, name="group", rank=rank, world=3, timeout_s=60.0, watch=lambda: watched.append(rank)
        )
        meet(exchanges, rank)
        return exchanges.exchange("round", lambda: {"rank": rank})

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(join, range(3))) == [[{"rank": rank} for rank in range(3)]] * 3
    assert watched


def processes(monkeypatch: pytest.MonkeyPatch, names: dict[int, str]) -> None:
    """Threads whose processes are on these hosts, where the others cannot see them. By the number in their name."""

    def ours() -> Process:
        number = int(threading.current_thread().name)
        return Process(host_name=names[number], pid=100 + number, space=names[number], began_ticks=1)

    monkeypatch.setattr(Process, "ours", ours)


def start(number: int, join: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=join, name=str(number), daemon=True)
    thread.start()
    return thread


def test_two_processes_of_two_hosts_with_one_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can see whether the first still lives, so the second takes its place. The first says who took it."""
    processes(monkeypatch, {0: "left", 1: "left", 2: "right"})
    store, results = MemoryStore(), dict[int, Any]()

    def join(number: int) -> None:
        exchanges = Exchanges(store, name="group", rank=min(number, 1), world=2, timeout_s=120.0, watch=None)
        try:
            results[number] = meet(exchanges, min(number, 1))
        except SennitError as error:
            results[number] = error

    first = start(1, lambda: join(1))
    store.wait(["sennit/group/hello/1"], timedelta(seconds=60))
    first_record = store.get("sennit/group/hello/1")
    second = start(2, lambda: join(2))
    with store.changed:
        assert store.changed.wait_for(lambda: store.get("sennit/group/hello/1") != first_record, 60)
    others = [second, start(0, lambda: join(0))]
    for thread in [first, *others]:
        thread.join(60)
    assert "two processes say that they are rank 1 of 2: process 102 on right, and process 101 on left" in str(
        results[1]
    )
    assert [type(results[number]) for number in (0, 2)] == [list, list]


def test_a_rank_whose_place_another_host_has_in_the_run_says_so_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes(monkeypatch, {0: "left", 1: "left", 2: "right"})
    store, results = MemoryStore(), dict[int, Any]()

    def join(number: int, timeout_s: float) -> None:
        exchanges = Exchanges(store, name="group", rank=min(number, 1), world=2, timeout_s=timeout_s, watch=None)
        try:
            results[number] = meet(exchanges, min(number, 1))
        except SennitError as error:
            results[number] = error

    for thread in [start(number, functools.partial(join, number, 60.0)) for number in range(2)]:
        thread.join(60)
    start(2, lambda: join(2, 0.3)).join(60)
    assert [type(results[number]) for number in (0, 1)] == [list, list]
    assert isinstance(results[2], errors.TimeoutError)
    assert (
        "Rank 0 has begun a run with process 101 on left as rank 1, not with process 102 on right: does another "
        "process have this rank number?" in str(results[2])
    )


@pytest.mark.parametrize("culprit", [0, 1, 32, 40])
def test_the_reason_of_one_rank_reaches_everybody(culprit: int) -> None:
    def body(exchanges: Exchanges, rank: int) -> Any:
        def make() -> dict[str, Any]:
            if rank == culprit:
                raise ConfigError("no room")
            return {}

        return exchanges.exchange("round", make)

    for rank, result in enumerate(run(body)):
        if rank == culprit:
            assert isinstance(result, ConfigError)
        else:
            assert isinstance(result, PeerError)
            assert result.rank == culprit
            assert f"rank {culprit} could not join group: ConfigError: no room" in str(result)


@pytest.mark.parametrize("culprit", [0, 40])
def test_the_reason_of_a_rank_without_parcels_reaches_everybody(culprit: int) -> None:
    def body(exchanges: Exchanges, rank: int) -> Any:
        def make() -> dict[int, bytes]:
            if rank == culprit:
                raise ConfigError("no room")
            return {}

        return exchanges.swap("parcels", make)

    for rank, result in enumerate(run(body)):
        assert isinstance(result, ConfigError if rank == culprit else PeerError)
        assert "no room" in str(result)


@pytest.mark.parametrize(
    ("damaged", "finders", "deceived"),
    # 70 ranks are rows of 9. Of row 0, rank 2 sorts what is for row 2.
    [("5/for/2", {2}, range(18, 27)), ("0/to/20", {20}, range(20, 21))],
)
def test_a_rank_that_finds_a_damaged_parcel_tells_those_who_wait_for_it(
    damaged: str, finders: set[int], deceived: range
) -> None:
    class DamagingStore(MemoryStore):
        def set(self, key: str, value: str, /) -> None:
            super().set(key, "no parcels" if key.endswith(f"/parcels/{damaged}") and '"failed"' not in value else value)

    def body(exchanges: Exchanges, rank: int) -> Any:
        try:
            return exchanges.swap("parcels", dict)
        except MismatchError:
            with pytest.raises(MismatchError, match="no parcels"):
                exchanges.look(rank)
            raise

    failed = {rank for rank, result in enumerate(run(body, store=DamagingStore())) if isinstance(result, MismatchError)}
    assert failed >= finders | set(deceived)


def test_the_reason_of_rank_0_in_the_first_round_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges_module, "OLD_RECORD_S", 0.0)

    def greet(rank: int) -> dict[str, Any]:
        if rank == 0:
            raise ConfigError("no room")
        return {}

    results = run(lambda exchanges, rank: None, greet=greet)
    assert isinstance(results[0], ConfigError)
    for result in results[1:]:
        assert isinstance(result, PeerError)
        assert "rank 0 could not join group: ConfigError: no room" in str(result)


@pytest.mark.parametrize("culprit", [1, 32, 40])
def test_the_reason_of_a_rank_reaches_everybody_though_rank_0_is_missing(
    culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges_module, "OLD_RECORD_S", 0.0)

    def greet(rank: int) -> dict[str, Any]:
        if rank == culprit:
            raise ConfigError("no room")
        return {}

    for result in run(lambda exchanges, rank: None, greet=greet, absent=[0]):
        assert isinstance(result, PeerError | ConfigError)
        assert "no room" in str(result)


def test_a_failure_of_an_earlier_run_in_place_of_rank_0_ends_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 failed while rank 0 was missing. Over the same store all come again, rank 0 the last."""
    monkeypatch.setattr(exchanges_module, "OLD_RECORD_S", 0.0)
    store = MemoryStore()

    def fail(rank: int) -> dict[str, Any]:
        if rank == 1:
            raise ConfigError("no room")
        return {}

    for result in run(lambda exchanges, rank: None, greet=fail, absent=[0], store=store, world=34):
        assert "no room" in str(result)
    monkeypatch.setattr(exchanges_module, "OLD_RECORD_S", 3.0)

    def come_last(rank: int) -> dict[str, Any]:
        if rank == 0:
            time.sleep(4)  # what rank 1 has left is no record of just now any more
        return {}

    found = run(lambda exchanges, rank: "joined", greet=come_last, store=store, world=34)
    assert found == ["joined"] * 34


def test_a_reason_that_nobody_reads_is_told_at_the_deadline() -> None:
    """Rank 32 waits for rank 40, and so it does not read what rank 41 has left."""

    def greet(rank: int) -> dict[str, Any]:
        if rank == 41:
            raise ConfigError("no room")
        return {}

    for result in run(lambda exchanges, rank: None, greet=greet, absent=[40], timeout_s=2.0):
        if isinstance(result, errors.TimeoutError):
            assert "no word from rank 40 of 70 after 2 s" in str(result)
            assert str(result).endswith(". In the store is: rank 41 could not join group: ConfigError: no room")
        else:
            assert isinstance(result, ConfigError)


@pytest.mark.parametrize("stranger", [1, 32, 40])
def test_a_record_of_another_form_is_refused_by_everybody(stranger: int) -> None:
    def body(exchanges: Exchanges, rank: int) -> Any:
        return exchanges.exchange("round", lambda: {"number": "one" if rank == stranger else 1})

    for rank, result in enumerate(run(body)):
        # Rank 32 reads others' records itself, and finds them as strange as they find its own.
        assert isinstance(result, MismatchError), (rank, result)
        assert "no valid number" in str(result)


def test_absent_ranks_are_named_and_those_who_wait_for_them_are_not() -> None:
    for result in run(lambda exchanges, rank: None, absent=[40, 69], timeout_s=2.0):
        assert isinstance(result, errors.TimeoutError)
        assert "round hello: no word from ranks 40, 69 of 70 after 2 s" in str(result)


def test_another_version_is_told_to_everybody() -> None:
    store = MemoryStore()
    store.set("sennit/group/hello/40", json.dumps({"version": 99, "wire": 1, "package": "9.9"}))
    results = run(lambda exchanges, rank: None, absent=[40], store=store)
    for result in results:
        assert isinstance(result, MismatchError)
        assert "rank 40 speaks protocol version 99" in str(result)


def test_what_an_earlier_run_left_does_not_count() -> None:
    store = MemoryStore()

    def body(exchanges: Exchanges, rank: int) -> Any:
        return len(exchanges.exchange("round", lambda: {"rank": rank}))

    for world in (WORLD, WORLD, 40, WORLD):
        assert run(body, world=world, store=store) == [world] * world
    # A failure, too: it was told to the ranks of that run.
    failed = run(lambda exchanges, rank: exchanges.exchange("round", lambda: {"a": rank if rank else ""}), store=store)
    assert all(isinstance(result, MismatchError) for result in failed)
    assert run(body, store=store) == [WORLD] * WORLD


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'"', b"[]", b"c$", rank_records.pack([{"a": 1}]).encode()[:-3]])
def test_damaged_blocks_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (any text)
        rank_records.unpack(data)


def encoded(raw: bytes) -> bytes:
    return base64.b85encode(raw)


@pytest.mark.parametrize(
    "data",
    [
        b'"',
        b"",
        *map(encoded, (b"\x01", b"\x01\x02", b"\x01\x02\0abc", b"\x01\x02\0abcde", b"\0\x01\0", b"\0\x01\0\x01\0a")),
    ],
)
def test_damaged_parcels_are_refused(data: bytes) -> None:
    assert rank_records.unpack_parcels(encoded(b"\x01\x02\0abcd"), 2) == [b"ab", b"cd"]
    with pytest.raises(ValueError):  # noqa: PT011  (any text)
        rank_records.unpack_parcels(data, 2)


def test_blocks_and_parcels_hold_what_was_put_in() -> None:
    records = [{"a": rank, "b": ["x"] * rank} for rank in range(5)]
    assert rank_records.unpack(rank_records.pack(records).encode()) == records
    for parcels in ([b"", b"1", bytes(254), bytes(255), bytes(65_535)], [b""] * 3, [b"12345678", b"abcdefgh"], [b"1"]):
        assert rank_records.unpack_parcels(rank_records.pack_parcels(parcels).encode(), len(parcels)) == parcels


@pytest.mark.parametrize("world", [1, 2, 3, 31, 32, 33, 65, 1_024, 1_057, 32_769])
def test_every_rank_is_in_one_block_of_each_level(world: int) -> None:
    for rank in (0, *range(rank_records.FAN_IN, world, rank_records.FAN_IN)):
        below = [peer for child in rank_records.children_of(rank, world) for peer in rank_records.subtree(child, world)]
        assert [rank, *below] == list(rank_records.subtree(rank, world))
    assert list(rank_records.subtree(0, world)) == list(range(world))
    assert all(
        not rank_records.children_of(rank, world) for rank in range(1, min(world, 70)) if rank % rank_records.FAN_IN
    )
