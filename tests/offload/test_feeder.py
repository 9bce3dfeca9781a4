# SPDX-License-Identifier: Apache-2.0
"""A feeder against a rank that the test plays: what it sends when, and its errors about a rank that misbehaves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.ingest.feeder import LEAST_PACKETS, Feeder, Outgoing, Window
from sennit.offload.ingest.protocol import (
    VERSION,
    Apart,
    End,
    Error,
    FactsOf,
    Hello,
    Reconfigured,
    Send,
    Taken,
    Terms,
    encode,
    error,
)
from sennit.offload.ingest.record_supply import Part
from sennit.offload.ingest.trainer_search import FeedError, meet
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from sennit.offload.records import HEADER
from sennit.offload.schema import Ids, Schema
from tests.offload.fake_rank import DEADLINE_S, Rank
from tests.offload.whole_store import WholeStore

SCHEMA = Schema(ids=(Ids(name="sample"),))
COUNT, BATCH_ROWS, RECORD_BYTES, IN_PACKET = 1000, 100, 5, 8
PACKET_BYTES = HEADER.size + IN_PACKET * RECORD_BYTES


@pytest.fixture(scope="module")
def store() -> Iterator[RecordStore]:
    ids = (IdColumn(values=np.arange(COUNT)),)
    made = RecordStore.encode(
        SCHEMA, Columns(labels=np.zeros(COUNT, np.float32), dense=np.zeros((COUNT, 0), np.float32), ids=ids)
    )
    yield made
    made.close()


def part_of(terms: Terms, batch: int) -> Any:
    if batch >= COUNT // BATCH_ROWS:
        raise ValueError(f"batch {batch}; allowed: 0 to 9")
    return np.arange(BATCH_ROWS) + batch * BATCH_ROWS


@contextlib.contextmanager
def serving(rank: Rank, store: RecordStore, **changed: Any) -> Iterator[tuple[Feeder, list[BaseException]]]:
    """Runs a feeder in a thread, after its hello. The list gets the exception that ended it."""
    failures: list[BaseException] = []
    arguments = {"timeout_s": DEADLINE_S, **changed}

    def run() -> None:
        try:
            with feeder:
                feeder.run([rank.address])
        except BaseException as failure:
            failures.append(failure)

    supply = WholeStore(store, part_of)
    feeder = Feeder("one", {"name": "numbers"}, supply, **arguments)
    with contextlib.closing(supply), contextlib.closing(rank):
        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert rank.accept().feeder == "one"
            assert rank.hear() == FactsOf(facts={"name": "numbers"})
            yield feeder, failures
        finally:
            with contextlib.suppress(OSError):
                rank.control.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def rows(rank: Rank, packets: int) -> list[tuple[int, int, list[int]]]:
    """Receives packets. Returns the batch, the first row and the samples of each."""
    return [
        (batch, row, [int.from_bytes(body[at + 1 : at + 5], "little") for at in range(0, len(body), RECORD_BYTES)])
        for batch, row, body in rank.packets(packets)
    ]


def samples(batch: int, first: int) -> list[int]:
    row = batch * BATCH_ROWS + first
    return list(range(row, min(row + IN_PACKET, (batch + 1) * BATCH_ROWS)))


def test_a_window_of_packets_moves_with_what_was_taken(store: RecordStore) -> None:
    rank = Rank(packet_bytes=PACKET_BYTES)
    with serving(rank, store) as (feeder, failures):
        rank.say(Send(batch=3, row=0))
        assert rows(rank, 4) == [(3, row, samples(3, row)) for row in (0, 8, 16, 24)]
        rank.say(Taken(batch=3, row=16))
        assert rows(rank, 2) == [(3, row, samples(3, row)) for row in (32, 40)]
        # After a gap the feeder repeats everything from there, within the window, which is now half as large.
        rank.say(Send(batch=3, row=24))
        assert rows(rank, 2) == [(3, row, samples(3, row)) for row in (24, 32)]
        assert rank.nothing_more()
        rank.say(Taken(batch=3, row=BATCH_ROWS), Taken(batch=3, row=BATCH_ROWS), Taken(batch=8, row=1), End())
        assert rank.control.recv(1) == b""
    assert not failures
    assert (feeder.counters.records, feeder.counters.packets) == (64, 8)
    assert (feeder.counters.rewinds, feeder.counters.batches) == (1, 1)


def test_packets_are_sent_apart_from_when_a_rank_says_so(store: RecordStore) -> None:
    """Over a link that segments messages there is no difference to see but in the feeder's own sender."""
    rank = Rank(packet_bytes=PACKET_BYTES)
    with serving(rank, store) as (_, failures):
        rank.say(Send(batch=3, row=0))
        assert len(rows(rank, 4)) == 4
        rank.say(Apart(), Send(batch=3, row=0), Send(batch=4, row=90))
        assert rows(rank, 4) == [
            (3, 0, samples(3, 0)),
            (3, 8, samples(3, 8)),
            (4, 90, samples(4, 90)),
            (4, 98, [498, 499]),
        ]
        rank.say(End())
        assert rank.control.recv(1) == b""
    assert not failures


def test_another_feeder_can_have_sent_the_beginning(store: RecordStore) -> None:
    rank = Rank(window_packets=64, packet_bytes=PACKET_BYTES)
    with serving(rank, store) as (_, failures):
        rank.say(Send(batch=9, row=91), Send(batch=2, row=99))
        assert rows(rank, 3) == [(2, 99, [299]), (9, 91, samples(9, 91)), (9, 99, [999])]
        rank.say(End())
        assert rank.control.recv(1) == b""
    assert not failures


def test_who_does_not_listen_yet_is_sent_to_again(store: RecordStore) -> None:
    rank = Rank(listens=False, packet_bytes=PACKET_BYTES)
    with serving(rank, store) as (feeder, failures):
        rank.say(Send(batch=0, row=0))
        deadline_s = time.monotonic() + DEADLINE_S
        while not feeder.counters.refused and time.monotonic() < deadline_s:
            time.sleep(0)
            rank.say(Send(batch=0, row=0))
        rank.listen()
        rank.say(Send(batch=0, row=0))
        assert [row for _, row, _ in rows(rank, 1)] == [0]
        rank.say(End())
        assert rank.control.recv(1) == b""
    assert not failures
    assert feeder.counters.refused


def test_a_network_that_takes_nothing_is_an_error_at_the_deadline(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(packet_bytes=PACKET_BYTES)
    with serving(rank, store, timeout_s=0.05) as (feeder, failures):
        unreachable = next(number for number in range(200) if os.strerror(number) == "Network is unreachable")
        monkeypatch.setattr(feeder._ranks[0].records, "send", lambda *_: (0, 0, unreachable))
        rank.say(Send(batch=0, row=0))
        assert rank.control.recv(1) == b"", "the feeder goes"
    assert "rank 0: records cannot be sent to 127.0.0.1 port" in str(failures[0])
    assert "Network is unreachable" in str(failures[0])


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b"", "the trainer is gone: rank 0: closed the connection"),
        (encode(error("the disk is full")), "rank 0: the disk is full"),
        (b"{}\n", "rank 0: a message without a known kind"),
        (encode(Send(batch=10, row=0)), "rank 0: batch 10; allowed: 0 to 9"),
        (encode(Hello(version=VERSION, feeder="x")), "rank 0: hello out of turn"),
    ],
)
def test_a_rank_that_goes_or_talks_nonsense_is_named(store: RecordStore, last: bytes, message: str) -> None:
    rank = Rank(packet_bytes=PACKET_BYTES)
    with serving(rank, store) as (_, failures):
        rank.control.sendall(last)
        rank.control.shutdown(socket.SHUT_WR)
        while rank.control.recv(1 << 16):
            pass
    assert isinstance(failures[0], FeedError)
    assert message in str(failures[0])


def refused(answer: Callable[[socket.socket], None], timeout_s: float = 0.3) -> str:
    """Returns the feeder's error about a host that answers in this way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            listener.settimeout(0.05)
            while not ended.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as control:
                    control.settimeout(DEADLINE_S)
                    control.recv(1 << 16)
                    answer(control)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(FeedError) as raised:
                meet([listener.getsockname()], name="x", deadline_s=time.monotonic() + timeout_s)
        finally:
            ended.set()
            thread.join(DEADLINE_S)
        return str(raised.value)


def test_what_is_no_trainer_is_named() -> None:
    assert "is this a trainer?" in refused(lambda control: control.sendall(b"HTTP/1.1 400 Bad Request\r\n"))
    assert "is this a trainer?" in refused(lambda control: control.sendall(bytes(2 << 20)), 30.0)
    assert "closed the connection" in refused(lambda control: None)
    assert "busy" in refused(lambda control: control.sendall(encode(error("busy"))))
    assert "answers with end" in refused(lambda control: control.sendall(encode(End())))
    rank = Rank()
    rank.close()
    terms = replace(rank.terms, version=VERSION + 1)
    assert f"speaks {VERSION}" in refused(lambda control: control.sendall(encode(terms)))


def test_nobody_there_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(FeedError, match=f"no trainer at 127.0.0.1 port {port}: Connection refused"):
        meet([("127.0.0.1", port)], name="x", deadline_s=time.monotonic() + 0.2)
    with pytest.raises(FeedError, match=r"no trainer at no\.such\.host\.invalid port 1: "):
        meet([("no.such.host.invalid", 1)], name="x", deadline_s=time.monotonic())


def test_ranks_of_different_runs_are_not_fed(store: RecordStore) -> None:
    second = Rank(run=10, rank=1, world_size=2, endpoints=[["127.0.0.1", 1], ["127.0.0.1", 2]])
    first = Rank(run=9, world_size=2, endpoints=[["127.0.0.1", 1], list(second.address)])

    def serve() -> None:
        for rank in (first, second):
            rank.accept()

    thread = threading.Thread(target=serve)
    with contextlib.closing(first), contextlib.closing(second):
        thread.start()
        with (
            contextlib.closing(WholeStore(store, part_of)) as supply,
            Feeder("one", {}, supply, timeout_s=DEADLINE_S) as feeder,
            pytest.raises(FeedError, match="rank 1 of run 0000000a, not rank 1 of run 00000009"),
        ):
            feeder.run([first.address])
        thread.join(DEADLINE_S)


def test_records_that_no_packet_holds_are_named(store: RecordStore) -> None:
    rank = Rank(packet_bytes=64)
    wide = Schema(ids=(Ids(name="many", width_bytes=8, length=10),))
    columns = Columns(
        labels=np.zeros(1, np.float32),
        dense=np.zeros((1, 0), np.float32),
        ids=(IdColumn(values=np.zeros(10, np.int64)),),
    )
    big = RecordStore.encode(wide, columns)
    words = "record 0 has 81 bytes; allowed: 32 bytes in a packet to 127.0.0.1"
    with contextlib.closing(big), serving(rank, big) as (_, failures):
        rank.say(Send(batch=0, row=0))
        said = rank.hear()
        assert isinstance(said, Error)
        assert words in said.text
    assert isinstance(failures[0], FeedError)
    assert words in str(failures[0])


@given(data=st.data())
def test_the_window_is_never_exceeded_and_every_row_is_sent(data: st.DataObject) -> None:
    """The rank takes rows in any portions, and asks again for the rows that are missing."""
    count, in_packet, window = (
        data.draw(st.integers(1, 200)),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(1, 8)),
    )
    outgoing = Outgoing(0, Part("all", np.arange(count)), Window(window))
    taken = 0
    arrived = 0
    while taken < count:
        if not outgoing.is_sent and outgoing.packets_due > 0:
            packets = data.draw(st.integers(1, outgoing.packets_due))
            end = min(count, outgoing.next_row + packets * in_packet)
            outgoing.sent(end, -(-(end - outgoing.next_row) // in_packet))
        assert 0 <= outgoing.packets_on_the_way <= window
        arrived = max(arrived, outgoing.next_row)
        step = data.draw(st.sampled_from(["take", "again"]))
        if step == "take" and outgoing.next_row > taken:
            taken = data.draw(st.integers(taken + 1, outgoing.next_row))
            assert outgoing.taken(taken) == (taken == count)
        elif step == "again":
            assert outgoing.rewind(taken) == (taken < arrived)
            arrived = taken
    assert outgoing.is_sent


def test_the_window_halves_once_for_what_was_on_the_way_and_grows_by_a_packet_a_window() -> None:
    window = Window(32)
    outgoing = Outgoing(0, Part("all", np.arange(1000)), window)
    outgoing.sent(32, 32)
    assert outgoing.rewind(4)
    assert window.packets == 16
    outgoing.sent(20, 16)
    assert outgoing.rewind(9)  # which was still in flight
    assert window.packets == 16
    outgoing.sent(41, 16)
    assert outgoing.rewind(40)
    assert window.packets == 8
    for begin in range(40, 120, 8):
        outgoing.sent(begin + 8, 8)
        outgoing.taken(begin + 8)
    assert 14 <= window.packets <= 18
    for _ in range(20):
        window.lost()
    assert window.packets == LEAST_PACKETS
    window.taken(10_000)
    assert window.packets == 32
    assert window.following().packets == 32
    assert Window(1).packets == 1


def elastic(ranks: Sequence[Rank], *, session: int, epoch: int) -> None:
    """Gives these ranks the terms of one session of an elastic run."""
    endpoints = [list(rank.address) for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.terms = replace(
            rank.terms, rank=number, world_size=len(ranks), endpoints=endpoints, session=session + number, run=5,
            elastic=True, epoch=epoch,
        )  # fmt: skip


def welcome(rank: Rank) -> None:
    rank.accept()
    assert rank.hear() == FactsOf(facts={"name": "numbers"})


def test_a_feeder_goes_on_with_the_next_session_of_an_elastic_run(store: RecordStore) -> None:
    """A rank dies, and a stranger takes its place. The other one is served on, and then it and a newcomer."""
    first, second, third = (Rank(packet_bytes=PACKET_BYTES) for _ in range(3))
    elastic([first, second], session=9, epoch=0)
    with contextlib.closing(second), contextlib.closing(third), serving(first, store) as (feeder, failures):
        welcome(second)
        second.control.close()
        second.terms = replace(second.terms, run=6)
        second.accept()
        assert second.hear() == error(f"127.0.0.1 port {second.address[1]}: a rank of another run")
        first.say(Send(batch=3, row=90))
        assert rows(first, 2) == [(3, row, samples(3, row)) for row in (90, 98)]
        elastic([first, third], session=10, epoch=1)
        first.say(Reconfigured())
        welcome(first)
        welcome(third)
        for rank, batch in ((third, 1), (first, 2)):
            rank.say(Send(batch=batch, row=97))
            assert rows(rank, 1) == [(batch, 97, samples(batch, 97))]
        assert feeder.places == [first.address, third.address]
        # One rank is gone before it could say that the run is over.
        first.say(End())
        third.control.close()
        assert first.control.recv(1) == b""
    assert not failures


def test_a_rank_that_fails_ends_an_elastic_run_only_if_all_do(store: RecordStore) -> None:
    first, second = (Rank(packet_bytes=PACKET_BYTES) for _ in range(2))
    elastic([first, second], session=9, epoch=0)
    with contextlib.closing(second), serving(first, store) as (_, failures):
        welcome(second)
        second.say(error("loss is nan"))
        assert second.control.recv(1) == b""
        first.say(Send(batch=0, row=99))
        assert rows(first, 1) == [(0, 99, [99])]
        first.say(error("loss is inf"))
        assert first.control.recv(1) == b""
    assert str(failures[0]) == "rank 0: loss is inf"


def test_an_elastic_run_of_which_nobody_is_left_is_an_error_at_the_deadline(store: RecordStore) -> None:
    rank = Rank(packet_bytes=PACKET_BYTES)
    elastic([rank], session=9, epoch=0)
    with serving(rank, store, timeout_s=0.3) as (_, failures):
        rank.listener.close()
        rank.control.close()
    assert "no trainer at 127.0.0.1 port" in str(failures[0])
    assert str(failures[0]).endswith("; and no rank of the run answered for 0.3 s")
