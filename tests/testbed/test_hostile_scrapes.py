# SPDX-License-Identifier: Apache-2.0
"""Anybody may ask `sennit metrics --listen`: no request stops it, and none holds up the others."""

from __future__ import annotations

import contextlib
import errno
import io
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from sennit.runtime.telemetry import openmetrics, samples
from tests.testbed.answering_ranks import DEADLINE_S

SENNIT = (sys.executable, "-m", "sennit")


@pytest.fixture
def server() -> Iterator[openmetrics.Server]:
    made = openmetrics.server("127.0.0.1", 0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join(DEADLINE_S)


def scraped(server: openmetrics.Server, method: str = "GET") -> bytes:
    host = "[::1]" if server.address_family == socket.AF_INET6 else "127.0.0.1"
    request = urllib.request.Request(f"http://{host}:{server.server_port}/metrics", method=method)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        assert answer.headers["Content-Type"] == openmetrics.CONTENT_TYPE
        body: bytes = answer.read()
        assert int(answer.headers["Content-Length"]) > 0
        return body


def test_slow_silent_and_many_clients_hold_nobody_up(
    server: openmetrics.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(openmetrics.CLIENTS_MAX + 8)]
    for number, end in enumerate(ends):
        end.settimeout(DEADLINE_S)
        if number % 2:
            end.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    assert scraped(server).endswith(b"# EOF\n")
    # The oldest had to go.
    assert ends[0].recv(1) == b""
    # A client that goes on for ever, a byte at a time or in a header without an end, has its time and no more.
    monkeypatch.setattr(openmetrics, "CLIENT_S", 0.0)
    for begin in (b"GET /metrics HTTP/1.1\r\nX: ", b"G"):
        late = socket.create_connection(("127.0.0.1", server.server_port))
        late.settimeout(DEADLINE_S)
        late.sendall(begin)
        assert late.recv(1) == b""
        late.close()
    monkeypatch.undo()
    for end in ends:
        end.close()
    assert scraped(server).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "request_text",
    [b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"\0\xff\r\n\r\n", b"GET /metrics\r\n\r\n", b"\r\n"],
)
def test_a_request_that_is_none_ends_with_its_client(server: openmetrics.Server, request_text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_S) as end:
        try:
            end.sendall(request_text)
            end.shutdown(socket.SHUT_WR)
            while end.recv(65_536):
                pass
        except OSError as error:
            # The server may close with bytes unread, at any of these calls.
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
    assert scraped(server).endswith(b"# EOF\n")


def test_head_has_the_headers_alone(server: openmetrics.Server) -> None:
    assert scraped(server, "HEAD") == b""


@pytest.mark.parametrize("listen", ["[::1]:0", "*:0", ":0", "localhost:0"])
@pytest.mark.needs("loopback-ipv6")
def test_addresses_of_both_kinds_can_be_named(listen: str) -> None:
    process = subprocess.Popen([*SENNIT, "metrics", "--listen", listen], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        port = re.search(r":(\d+)/metrics", said)
        assert port is not None, said
        for host in (
            ("[::1]",) if listen.startswith("[") else ("127.0.0.1",) if listen[0] == "l" else ("[::1]", "127.0.0.1")
        ):
            with urllib.request.urlopen(f"http://{host}:{port[1]}/metrics", timeout=DEADLINE_S) as answer:
                assert answer.read().endswith(b"# EOF\n")
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_all_who_wait_get_one_text(server: openmetrics.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at once, the counters are read for one of them, and once more for all who came meanwhile."""
    monkeypatch.setattr(openmetrics, "CLIENT_S", DEADLINE_S)
    all_wait, goes_on = threading.Semaphore(0), threading.Event()
    reads: list[int] = []
    really = server.latest.text

    def slow() -> list[samples.Sample]:
        reads.append(1)
        assert goes_on.wait(DEADLINE_S)
        return []

    def counted(is_awaited: Callable[[], bool]) -> bytes:
        all_wait.release()
        return really(is_awaited)

    monkeypatch.setattr(samples, "read", slow)
    monkeypatch.setattr(server.latest, "text", counted)
    ends = []
    for _ in range(openmetrics.CLIENTS_MAX):
        end = socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_S)
        end.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        ends.append(end)
    for _ in ends:
        assert all_wait.acquire(timeout=DEADLINE_S)
    goes_on.set()
    for end in ends:
        assert b"# EOF" in b"".join(iter(lambda end=end: end.recv(65_536), b""))  # type: ignore[misc]
        end.close()
    # Two, but for threads that stood still between the two lines of `counted`.
    assert len(reads) <= len(ends) // 4


def test_threads_of_clients_that_had_to_go_end(server: openmetrics.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> list[samples.Sample]:
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(samples, "read", slow)
    before = threading.active_count()
    ends = []
    for _ in range(3 * openmetrics.CLIENTS_MAX):
        end = socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_S)
        end.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        ends.append(end)
    assert begun.wait(DEADLINE_S)
    # Those that went see the end of their connection once their thread has ended.
    for end in ends[: -openmetrics.CLIENTS_MAX]:
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""
    gone = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if threading.active_count() <= before + openmetrics.CLIENTS_MAX + 1:
            break
        gone.wait(0.01)
    assert threading.active_count() <= before + openmetrics.CLIENTS_MAX + 1
    goes_on.set()
    for end in ends:
        end.close()


def test_a_fault_of_ours_is_said(
    server: openmetrics.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "read", lambda: [None])
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_S) as end:
        end.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert end.recv(65_536) == b""
    said = capsys.readouterr().err
    assert said.startswith("sennit metrics: no answer to 127.0.0.1: AttributeError(")
    assert said.count("\n") == 1
    monkeypatch.undo()
    assert scraped(server).endswith(b"# EOF\n")


def test_a_text_that_takes_too_long_is_said(
    server: openmetrics.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openmetrics, "CLIENT_S", -1.0)
    assert server.latest.text(lambda: True).endswith(b"# EOF\n")
    assert re.search(r"metrics: the text, [\d,]+ bytes, took 0 s; a client has -1 s\n", capsys.readouterr().err)


class Unread(io.StringIO):
    """A pipe whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_what_nobody_reads_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Unread()):
        monkeypatch.setattr(sys, "stderr", stream)
        openmetrics.say("a fault")


REQUESTS = (
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nAccept-Encoding: gzip\r\nConnection: keep-alive\r\n\r\n",
    b"HEAD /metrics?name[]=a HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nabcde",
    b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"/", b"%00", b"\xff\xfe", b"\x1b[2J", b"HTTP/", b"HTTP/9.9"),
    *(
        b"HTTP/1.\xb2",
        b"HTTP/1.1.1",
        b"HTTP/99999999999.1",
        b"GET",
        b"DELETE",
        b"X: y\r\n",
        b" folded\r\n",
        b"?",
        b"//",
    ),
    *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Content-Length: -1\r\n", b"Expect: 100-continue\r\n"),
    b"A" * 300,
    b"N: v\r\n" * 101,
    b"L" * 65_537,
)


def mutated(request: bytes, choice: random.Random) -> bytes:
    for _ in range(choice.randint(0, 4)):
        at = choice.randrange(len(request) + 1)
        match choice.randrange(5):
            case 0:
                request = request[:at] + choice.choice(PIECES) + request[at:]
            case 1:
                request = request[:at] + bytes([choice.randrange(256)]) + request[at + 1 :]
            case 2:
                request = request[:at] + request[at + choice.randint(1, 9) :]
            case 3:
                request = request[:at]
            case _:
                request += choice.choice(REQUESTS)
    return request


def asked(port: int, request: bytes, choice: random.Random) -> None:
    """Sends a request in one of the ways in which clients go away."""
    end = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    try:
        at = choice.randrange(len(request) + 1)
        for piece in (request[:at], request[at:]):
            end.sendall(piece)
        match choice.randrange(4):
            case 0:  # RST at close
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case 1:  # tired of waiting
                end.settimeout(0.01)
                end.recv(1)
            case _:
                end.shutdown(socket.SHUT_WR)
                while end.recv(65_536):
                    pass
    except TimeoutError:
        assert end.gettimeout() == 0.01
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise
    finally:
        end.close()


# A hundred thousand in parts.
@pytest.mark.parametrize(
    ("part", "count"), [(0, 500), *(pytest.param(part, 10_000, marks=pytest.mark.long) for part in range(1, 11))]
)
def test_no_mutated_request_stops_the_server(
    server: openmetrics.Server, seed: int, part: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(openmetrics, "say", said.append)
    choice = random.Random(seed + part)
    for number in range(count):
        asked(server.server_port, mutated(choice.choice(REQUESTS), choice), choice)
        if number % 100 == 0:
            assert scraped(server).endswith(b"# EOF\n")
    assert said == []
