# SPDX-License-Identifier: Apache-2.0
"""A rank's session with feeders over loopback: hostile feeders are refused while a good one is served."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sennit.offload.admission import Verdict
from sennit.offload.batches import BatchLayout
from sennit.offload.cpu import CpuReceiver
from sennit.offload.ingest import session as session_module
from sennit.offload.ingest.connection import UNSENT_MAX_BYTES, Connection
from sennit.offload.ingest.facts import Facts, TableFacts
from sennit.offload.ingest.feeder import Feeder
from sennit.offload.ingest.protocol import LINE_MAX_BYTES, VERSION, FactsOf, Hello, Preparing, Send, Terms, encode
from sennit.offload.ingest.session import IngestError, Session
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import Columns, IdColumn, RecordStore
from tests.offload.ingest_world import PLAN, SESSION, expected
from tests.offload.whole_store import WholeStore

DEADLINE_S = 20.0
SIZES = [7, 5, 0, 9, 9]
FACTS = Facts(
    name="numbers",
    fingerprint="1",
    sample_count=sum(SIZES),
    numbering={},
    tables=(TableFacts(name="sample", rows=1 << 32, mean_length=1.0),),
    dense_names=(),
    plan=replace(PLAN, sparse=(replace(PLAN.sparse[0], rows=1 << 32),)),
)
HELLO = encode(Hello(version=VERSION, feeder="x"))


STORE = RecordStore.encode(
    PLAN.schema,
    Columns(
        labels=np.zeros(sum(SIZES), np.float32),
        dense=np.zeros((sum(SIZES), 0), np.float32),
        ids=(IdColumn(values=np.arange(sum(SIZES), dtype=np.int64)),),
    ),
)


def part_of(terms: Terms, batch: int) -> NDArray[np.int64]:
    return np.array(expected(SIZES, batch), np.int64)


class Rank:
    """A session and its port."""

    def __init__(self, timeout_s: float = DEADLINE_S) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        terms = Terms(
            version=VERSION,
            session=SESSION,
            rank=0,
            world_size=1,
            endpoints=[["127.0.0.1", self.port]],
            packet_bytes=64,
            window_packets=2,
            order={},
        )
        self.session = Session(self.listener, terms, timeout_s=timeout_s)

    def start(self) -> None:
        receiver = CpuReceiver(BatchLayout(plan=PLAN, batch_rows=max(SIZES), slots=2), session=SESSION)
        receiver.listen("127.0.0.1", self.port, receive_buffer_bytes=1 << 16)
        self.session.start(receiver, SIZES.__getitem__, first_batch=0, batch_count=len(SIZES), slots=2)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)

    def train(self) -> list[list[int]]:
        trained = []
        for number in range(len(SIZES)):
            trained.append(self.session.take(number).values[0].tolist())
            self.session.release(number)
        return trained


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    with made.listener, made.session:
        yield made


class Fed:
    """A feeder in a thread."""

    def __init__(self, port: int, facts: Facts = FACTS, part: Any = part_of) -> None:
        self.error: BaseException | None = None
        self._arguments = (port, facts, part)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        port, facts, part = self._arguments
        try:
            with (
                contextlib.closing(WholeStore(STORE, part)) as supply,
                Feeder("good", facts.as_json(), supply, timeout_s=DEADLINE_S) as feeder,
            ):
                feeder.run([("127.0.0.1", port)])
        except FeedError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def answer(rank: Rank, said: bytes) -> dict[str, Any]:
    """Returns the last line that the rank sends before it closes the connection."""
    with rank.connect() as client:
        client.sendall(said)
        heard = b""
        while chunk := client.recv(1 << 16):
            heard += chunk
    found: dict[str, Any] = json.loads(heard.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\n", "no JSON"),
        (b"\x16\x03\x01\x02\x00\x01\n", "no JSON"),
        (b"GET / HTTP/1.1\r\n", "no JSON"),
        (b"[" * 5000 + b"\n", "no JSON"),
        (encode(Hello(version=VERSION + 1, feeder="x")), f"version {VERSION + 1}; this trainer speaks {VERSION}"),
        (HELLO + HELLO, "hello out of turn"),
        (encode(FactsOf(facts={})), "facts out of turn"),
        (encode(Send(batch=0, row=0)), "send out of turn"),
        (HELLO + encode(FactsOf(facts={})), "facts: not those of a data set"),
        (HELLO + encode(FactsOf(facts=FACTS.as_json())) * 2, "facts out of turn"),
    ],
)
def test_what_is_no_feeder_is_told_so_and_a_good_one_is_served(rank: Rank, said: bytes, words: str) -> None:
    found = answer(rank, said)
    assert found["kind"] == "error"
    assert words in found["text"]
    fed = Fed(rank.port)
    assert rank.session.wait_for_facts() == FACTS
    rank.start()
    assert rank.train() == [expected(SIZES, batch) for batch in range(len(SIZES))]
    rank.session.close()
    fed.join()
    assert fed.error is None


def test_a_line_without_end_is_cut_off(rank: Rank) -> None:
    with rank.connect() as client, pytest.raises(ConnectionError) as heard:
        client.sendall(b"x" * (64 * LINE_MAX_BYTES))
    assert heard.value.errno in (errno.ECONNRESET, errno.EPIPE)  # closed while more was to come


def test_one_connection_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CONNECTIONS_MAX", 1)
    made = Rank()
    with made.listener, made.session, made.connect():
        assert answer(made, b"")["text"] == "too many connections; allowed: 1"


def test_silence_and_half_a_hello_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_S", 0.05)
    made = Rank()
    with made.listener, made.session, made.connect() as silent, made.connect() as slow:
        slow.sendall(HELLO[:9])
        for client in (silent, slow):
            assert b"no hello in time" in client.recv(4096)


def test_feeders_with_other_data_are_refused_by_name(rank: Rank) -> None:
    good = Fed(rank.port)
    rank.session.wait_for_facts()
    other = Fed(rank.port, replace(FACTS, fingerprint="2"))
    other.join()
    assert "fingerprint '2', not '1'" in str(other.error)
    rank.start()
    assert len(rank.train()) == len(SIZES)
    rank.session.close()
    good.join()
    assert good.error is None


def test_foreign_datagrams_meanwhile_change_nothing(rank: Rank) -> None:
    """Other bytes, and good packets of another session, arrive before, between and after the records."""
    fed = Fed(rank.port)
    rank.session.wait_for_facts()
    rank.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", rank.port))
        trained = []
        for number in range(len(SIZES)):
            for junk in (b"", b"x", bytes(32), bytes(5000)):
                stranger.send(junk)
            trained.append(rank.session.take(number).values[0].tolist())
            rank.session.release(number)
    assert trained == [expected(SIZES, batch) for batch in range(len(SIZES))]
    deadline_s = time.monotonic() + DEADLINE_S
    while rank.session.counters()["foreign"] < 2 * len(SIZES) and time.monotonic() < deadline_s:
        time.sleep(0)
    counted = rank.session.counters()
    assert (counted["truncated"], counted["foreign"]) == (2 * len(SIZES), 2 * len(SIZES))
    assert counted["records"] == sum(SIZES)
    assert counted.keys() >= {verdict.name.lower() for verdict in Verdict}
    rank.session.close()
    fed.join()


def test_another_feeder_goes_on_for_one_that_dies(rank: Rank) -> None:
    """The first feeder closes its connections when it is asked for the fourth batch."""

    def mortal(terms: Terms, batch: int) -> NDArray[np.int64]:
        if batch == 3:
            raise FeedError("dies here")
        return part_of(terms, batch)

    first = Fed(rank.port, part=mortal)
    rank.session.wait_for_facts()
    rank.start()
    trained = []
    for number in range(len(SIZES)):
        if number == 3:
            first.join()
            second = Fed(rank.port)
        trained.append(rank.session.take(number).values[0].tolist())
        rank.session.release(number)
    assert trained == [expected(SIZES, batch) for batch in range(len(SIZES))]
    assert rank.session.counters()["feeders_lost"] == 1
    rank.session.close()
    second.join()
    assert second.error is None


def test_a_batch_that_does_not_come_ends_at_the_deadline_and_is_named() -> None:
    made = Rank(timeout_s=0.5)
    goes_on = threading.Event()

    def slow(terms: Terms, batch: int) -> NDArray[np.int64]:
        goes_on.wait(DEADLINE_S)
        return part_of(terms, batch)

    with made.listener, made.session:
        fed = Fed(made.port, part=slow)
        made.session.wait_for_facts()
        made.start()
        with made.connect() as stranger:
            stranger.sendall(b"x\n")
            while stranger.recv(4096):
                pass
        with pytest.raises(IngestError) as raised:
            made.session.take(0)
        said = str(raised.value)
        assert "batch 0, rank 0: 0 of 7 records came, and none more within 0.5 s; feeders: good at 127.0.0.1" in said
        assert "gone: 127.0.0.1 port" in said
        assert said.endswith("(refused: a line that is no JSON); datagrams refused: none")
        made.session.close("no more")
        goes_on.set()
        fed.join()
        assert "no more" in str(fed.error)


def test_a_feeder_that_reads_no_orders_is_as_good_as_dead() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
        listener.accept()[0] as ours,
    ):
        # Without a fixed size, buffers would grow during the test.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        connection = Connection(1, ours, ("nobody", 1), deadline_s=0)
        connection.send(Hello(version=VERSION, feeder="x" * 1000))
        assert connection.flush()
        while connection.flush():  # Until nothing more fits into the socket.
            connection.send(Hello(version=VERSION, feeder="x" * 1000))
        assert not connection.flush()
        while len(connection.unsent) <= 2 * UNSENT_MAX_BYTES:
            connection.send(Hello(version=VERSION, feeder="x" * 1000))
        with pytest.raises(ConnectionError, match=r"\d+ bytes of orders unread"):
            connection.flush()


def test_a_feeder_that_says_that_it_prepares_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time that the test makes. The answer to the second line says that the first one was read."""
    now_s = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(session_module, "time", clock)
    made = Rank(timeout_s=8.0)
    with made.listener, made.session:
        now_s += 7
        assert made.session.wait_for_facts(0.0) is None
        assert answer(made, HELLO + encode(Preparing()) + b"x\n")["kind"] == "error"
        now_s += 7
        assert made.session.wait_for_facts(0.0) is None
        now_s += 2
        with pytest.raises(IngestError, match=f"no feeder came to 127.0.0.1 port {made.port} within 8 s"):
            made.session.wait_for_facts(0.0)


def test_without_feeders_it_ends_at_the_deadline() -> None:
    made = Rank(timeout_s=0.2)
    with (
        made.listener,
        made.session,
        pytest.raises(IngestError, match=f"no feeder came to 127.0.0.1 port {made.port} within 0.2 s"),
    ):
        made.session.wait_for_facts()
