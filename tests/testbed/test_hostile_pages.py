# SPDX-License-Identifier: Apache-2.0
"""Pages of counters are anybody's: no file and no byte of one stops those who read them."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console

from sennit.runtime.telemetry import openmetrics, samples, top
from sennit.transport import counters
from sennit.transport.counter_page import CounterPage
from tests.testbed.answering_ranks import DEADLINE_S

SENNIT = (sys.executable, "-m", "sennit")
A_ROUND = 250
NOBODY = 65534
ODD = (0, 1, 7, 23, 24, 64, (1 << 16) - 1, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
WORDS = {
    "engine": ["operations_posted", "operations_completed", "operation_time_us", "operations_failed"],
    "flow": ["data_bytes_sent", "data_packets_sent", "retransmitted_packets", "rtt_us", "window_packets"],
    "path": ["data_packets_sent", "retransmitted_packets", "lost_packets", "ecn_marked_packets", "rtt_us", "state"],
    "ingest": ["ingest_records", "ingest_batches", "ingest_batches_ready", "ingest_feeders_lost"],
}


def sound_page(folder: Path, groups: list[str]) -> bytes:
    page = CounterPage(1, 4, folder)
    for group in groups:
        peer, path = (2, 3) if group == "path" else (2, None) if group == "flow" else (None, None)
        page.add(group, WORDS[group], peer=peer, path=path)[:] = range(1, len(WORDS[group]) + 1)
    assert page.path is not None
    content = page.path.read_bytes()
    page.close()
    used = struct.unpack_from("=Q", content, counters.USED_BYTES_OFFSET)[0]
    return content[: used + 64]


def mutated(content: bytes, choice: random.Random) -> bytes:
    """A page with a few fields, letters or records that are wrong."""
    page = bytearray(content)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(page) - 8) // 8 * 8
        match choice.randrange(7):
            case 0:
                struct.pack_into("=Q", page, at, choice.choice(ODD))
            case 1:
                struct.pack_into("=I", page, at, choice.choice(ODD) & 0xFFFFFFFF)
            case 2:
                page[choice.randrange(len(page))] = choice.randrange(256)
            case 3:
                struct.pack_into("=Q", page, choice.choice((8, 16, 24, 32)), choice.choice(ODD))
            case 4:  # a letter of a name
                letters = [place for place, letter in enumerate(page) if 97 <= letter <= 122]
                page[choice.choice(letters or [0])] = choice.choice(b'"\\\n{} \x00\x1b[A\xc3')
            case 5:
                del page[at : at + choice.choice((4, 8, 24, 72))]
            case _:
                page[at:at] = page[64 : 64 + choice.choice((8, 24, 96, 200))]
        if len(page) < 80:
            break
    return bytes(page)


def look(folder: Path) -> int:
    """What `top`, `metrics` and both exporters do with the pages of a folder. Returns how many were pages."""
    found = list(counters.pages(folder))
    looked = next(top.looks(1.0, folder))
    Console(file=io.StringIO(), width=160).print(
        top.ranks_table(looked.ranks), top.paths_table(looked.ranks), top.ingests_table(looked.ingests)
    )
    text = openmetrics.render(samples.of_pages(found))
    list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    return len(found)


# A million in parts, because each has a limit, on a busy machine too.
@pytest.mark.parametrize(
    ("part", "count"), [(0, 1_500), *(pytest.param(part, 20_000, marks=pytest.mark.long) for part in range(1, 51))]
)
def test_no_mutated_page_stops_a_reader(tmp_path: Path, seed: int, part: int, count: int) -> None:
    otlp = pytest.importorskip("sennit.runtime.telemetry.otlp", reason="the OpenTelemetry SDK is not installed")
    choice = random.Random(seed + part)
    sound = [sound_page(tmp_path, groups) for groups in (["engine", "flow", "path", "path"], ["ingest"])]
    exporter = otlp.Exporter("http://127.0.0.1:1/v1/metrics")
    read = 0
    for begin in range(0, count, A_ROUND):
        for number in range(min(A_ROUND, count - begin)):
            file = tmp_path / f"sennit.counters-{number:016x}"
            file.write_bytes(mutated(choice.choice(sound), choice))
        read += look(tmp_path)
    # Enough of them are still pages, and reach what is behind the reader.
    assert count // 10 < read < count
    (tmp_path / "sennit.counters-0000000000000000").write_bytes(sound[0].replace(bytes([1] + [0] * 7), b"\xff" * 8))
    assert not exporter.send(samples.of_pages(counters.pages(tmp_path)))  # nobody listens there
    exporter.close()


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    content = sound_page(tmp_path, ["engine"])
    file = tmp_path / "sennit.counters-00000000000000aa"
    for forged in (b'operations"} 1\nx', b"operations_post\xc3\xa9", b"operations\x1b[31mre"):
        file.write_bytes(content.replace(b"operations_posted", forged.ljust(17, b"a")))
        with pytest.raises(counters.PageError, match="damaged"):
            counters.read(file)
        assert list(counters.pages(tmp_path)) == []
    file.write_bytes(content.replace(b"operations_posted", b"operations_failed"))  # twice
    with pytest.raises(counters.PageError, match="twice"):
        counters.read(file)


def test_labels_and_doubles_leave_a_sound_exposition() -> None:
    """Prometheus refuses everything where one sample comes twice or a label is open."""
    evil = samples.Sample(name="sennit_a", is_gauge=False, labels={"group": 'x"} 1\n# EOF\n'}, value=1)
    same_family = samples.Sample(name="sennit_a_total", is_gauge=False, labels={"rank": "0"}, value=2)
    found = [evil, evil, same_family, same_family]
    (family,) = text_string_to_metric_families(openmetrics.render(found))  # type: ignore[no-untyped-call]
    assert [(sample.labels, sample.value) for sample in family.samples] == [(evil.labels, 1.0), ({"rank": "0"}, 2.0)]


@pytest.mark.parametrize("used", [0, 63, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_a_size_that_is_none_is_refused(tmp_path: Path, used: int) -> None:
    content = bytearray(sound_page(tmp_path, ["engine"]))
    struct.pack_into("=Q", content, counters.USED_BYTES_OFFSET, used)
    file = tmp_path / "sennit.counters-00000000000000ab"
    file.write_bytes(content)
    with pytest.raises(counters.PageError, match=f"{used} bytes; allowed: 64..{len(content)}"):
        counters.read(file)
    # A hole of many bytes is not read either.
    os.truncate(file, 1 << 40)
    with pytest.raises(counters.PageError, match=r"allowed|damaged"):
        counters.read(file)


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    page = CounterPage(0, 1, tmp_path)
    assert page.path is not None
    names = [tmp_path / f"sennit.counters-{number:016x}" for number in range(4)]
    os.mkfifo(names[0])
    names[1].mkdir()
    names[2].symlink_to(page.path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(names[3]))
        # A second name that readers would take for the number of the same page.
        (tmp_path / f"sennit.counters-x-{page.path.name[-16:]}").hardlink_to(page.path)
        assert [found.file for found in counters.pages(tmp_path)] == [page.path]
    with pytest.raises(counters.PageError, match="no ordinary file"):
        counters.read(names[0])
    page.close()


@pytest.mark.root
def test_pages_of_others_are_shown_as_theirs_and_only_to_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sennit.counters-00000000000000ac"
    file.write_bytes(sound_page(tmp_path, ["engine"]))
    (own,) = counters.pages(tmp_path)
    assert "user" not in next(samples.of_pages([own])).labels
    os.chown(file, NOBODY, NOBODY)
    (theirs,) = counters.pages(tmp_path)
    assert theirs.owner == NOBODY
    assert next(samples.of_pages([theirs])).labels["user"] == f"{NOBODY}"
    Console(width=160).print(top.ranks_table(next(top.looks(1.0, tmp_path)).ranks))
    assert re.search(r" 1/4 +of nobody gone ", capsys.readouterr().out)
    monkeypatch.setattr(counters, "FOREIGN_MAX_BYTES", file.stat().st_size - 1)
    assert list(counters.pages(tmp_path)) == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert list(counters.pages(tmp_path)) == []


@pytest.mark.root
@pytest.mark.parametrize("arguments", [["top", "--once", "--paths"], ["metrics"]])
def test_the_commands_show_the_sound_page_among_hostile_ones(tmp_path: Path, arguments: list[str]) -> None:
    """In a /dev/shm of its own, because such files stop readers of older versions."""
    path = sound_page(tmp_path, ["path"])
    pages = [
        sound_page(tmp_path, ["engine", "flow", "path"]),
        path[:8] + b"\xff" * 200,
        path.replace(b"\0state\0", b"\0stage\0").replace(b"\0rtt_us\0", b"\0rtt_ns\0"),
    ]
    for number, content in enumerate(pages, 1):
        (tmp_path / f"sennit.counters-{number:016x}").write_bytes(content)
    script = (
        'mount -t tmpfs tmpfs /dev/shm && mkfifo /dev/shm/sennit.counters-0000000000000000 && cp "$0"/* /dev/shm &&'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{script} exec "$@"', str(tmp_path), *SENNIT, *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    # The sound page, whose path is in state 6, and the one without a state.
    seen = r" 6 +5 +1 | None +0 +1 " if arguments[0] == "top" else r"sennit_(state|stage_total)\{.*\} 6\.0\n"
    assert len(re.findall(seen, done.stdout)) == 2, done.stdout


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
