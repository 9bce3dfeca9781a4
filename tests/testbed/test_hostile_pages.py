# SPDX-License-Identifier: Apache-2.0
"""Pages of counters are anybody's: no file and no byte of one stops those who read them."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console

from sennit.runtime.telemetry import openmetrics, samples, top
from sennit.transport import accounts, counters
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


RESERVED = ("_total", "_created", "_bucket", "_count", "_sum", "_gcount", "_gsum", "_info")
# Names that meet those of sound pages, or of what is exported.
MEETING = sorted(
    {word + end for words in WORDS.values() for word in words for end in ("", *RESERVED)}
    | {name + end for name in samples.STANDARD_NAMES.values() for end in ("", *RESERVED)}
    | {"none", "pages_left_out", "pages_left_out_total"}
)


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


def record(kind: int, identity: int, payload: bytes, peer: int = counters.NONE, path: int = counters.NONE) -> bytes:
    return counters.RECORD.pack(counters.RECORD.size + len(payload), kind, identity, peer, path) + payload


def names_record(identity: int, group: str, words: list[str]) -> bytes:
    text = "\0".join((group, *words, "")).encode()
    return record(counters.NAMES, identity, text + bytes(-len(text) % 8))


def page_with(body: bytes) -> bytes:
    return counters.HEADER.pack(counters.MAGIC, counters.HEADER.size + len(body), 0, 2, 1, 1) + body


def body_of(page: bytes) -> bytes:
    return page[counters.HEADER.size : struct.unpack_from("=Q", page, counters.USED_BYTES_OFFSET)[0]]


def page_of_names(choice: random.Random) -> bytes:
    """A page without a fault, with names that are made to meet those of other pages."""
    body = b""
    for identity in range(choice.randint(1, 3)):
        words = choice.sample(MEETING, choice.randint(1, 4))
        body += names_record(identity, choice.choice(sorted(WORDS)), words)
        body += record(counters.COUNTERS, identity, struct.pack(f"={len(words)}Q", *range(len(words))), 2, 3)
    return page_with(body)


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


def exported(text: str) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    """What Prometheus takes of a text; ValueError if it would refuse it."""
    return {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def look(folder: Path, sound: Path, choice: random.Random) -> int:
    """What `top`, `metrics` and both exporters do with the pages of a folder. Returns how many were pages.

    Every counter of the sound page must be there, with its own type.
    """
    found = list(counters.pages(folder))
    looked = next(top.looks(1.0, folder))
    tables = top.ranks_table(looked.ranks), top.paths_table(looked.ranks), top.ingests_table(looked.ingests)
    if choice.randrange(8) == 0:  # takes longer than all the rest
        Console(file=io.StringIO(), width=160).print(*tables)
    assert counted(sound) <= exported(openmetrics.render(samples.of_pages(found)))
    return len(found)


def counted(sound: Path) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    found = exported(openmetrics.render(samples.of_pages([counters.read(sound)])))
    assert len(found) == sum(map(len, (WORDS["engine"], WORDS["flow"], WORDS["path"])))
    return found


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: a file may have more names there than elsewhere, and large ones cost less."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hostile-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# A million in parts, because each has a limit, on a busy machine too.
@pytest.mark.parametrize(
    ("part", "count"), [(0, 1_000), *(pytest.param(part, 20_000, marks=pytest.mark.long) for part in range(1, 51))]
)
def test_no_mutated_page_stops_a_reader(memory: Path, seed: int, part: int, count: int) -> None:
    otlp = pytest.importorskip("sennit.runtime.telemetry.otlp", reason="the OpenTelemetry SDK is not installed")
    choice = random.Random(seed + part)
    contents = [sound_page(memory, groups) for groups in (["engine", "flow", "path", "path"], ["ingest"])]
    # Its name comes last, and it is of the same user, or of root among another user's.
    sound = memory / f"sennit.counters-{'f' * 16}"
    sound.write_bytes(sound_page(memory, ["engine", "flow", "path"]))
    exporter = otlp.Exporter("http://127.0.0.1:1/v1/metrics")
    read = 0
    for begin in range(0, count, A_ROUND):
        for number in range(min(A_ROUND, count - begin)):
            file = memory / f"sennit.counters-{number:016x}"
            content = page_of_names(choice) if choice.randrange(4) == 0 else choice.choice(contents)
            if choice.randrange(500) == 0:
                content = page_with(body_of(content) * choice.randint(2, 200))
            file.write_bytes(content if choice.randrange(8) == 0 else mutated(content, choice))
            if os.geteuid() == 0 and choice.randrange(2):
                os.chown(file, NOBODY, NOBODY)
        read += look(memory, sound, choice) - 1
    # Enough of them are still pages, and reach what is behind the reader.
    assert count // 10 < read < count
    (memory / "sennit.counters-0000000000000000").write_bytes(contents[0].replace(bytes([1] + [0] * 7), b"\xff" * 8))
    assert not exporter.send(samples.of_pages(counters.pages(memory)))  # nobody listens there
    exporter.close()


@pytest.mark.root
def test_names_of_another_user_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name alone, in the file that comes first."""
    sound = tmp_path / f"sennit.counters-{'f' * 16}"
    sound.write_bytes(sound_page(tmp_path, ["engine", "flow", "path"]))
    file = tmp_path / "sennit.counters-0000000000000000"
    os.close(os.open(file, os.O_CREAT))
    os.chown(file, NOBODY, NOBODY)
    for word in MEETING:
        file.write_bytes(page_with(names_record(1, "engine", [word]) + record(counters.COUNTERS, 1, bytes(8))))
        found = list(counters.pages(tmp_path))
        assert len(found) == (1 if word.endswith(RESERVED) else 2), word
        assert counted(sound) <= exported(openmetrics.render(samples.of_pages(found))), word
    # Nor would they if readers took such names.
    monkeypatch.setattr(counters, "_RESERVED", ("_none_has_this",))
    file.write_bytes(
        page_with(names_record(1, "engine", MEETING) + record(counters.COUNTERS, 1, bytes(8 * len(MEETING))))
    )
    assert look(tmp_path, sound, random.Random(1)) == 2


def test_a_writer_is_told_of_a_name_that_readers_refuse(tmp_path: Path) -> None:
    page = CounterPage(0, 1, tmp_path)
    with pytest.raises(ValueError, match="blocks_count"):
        page.add("engine", ["blocks_count"])
    page.close()


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
    used = struct.unpack_from("=Q", file.read_bytes(), counters.USED_BYTES_OFFSET)[0]
    for limit, least in (("FOREIGN_MAX_BYTES", used), ("FOREIGN_MAX_VALUES", 8), ("FOREIGN_MAX_PAGES", 1)):
        monkeypatch.setattr(counters, limit, least)
        assert counters.look(tmp_path).left_out == {}
        monkeypatch.setattr(counters, limit, least - 1)
        assert counters.look(tmp_path) == counters.Look(pages=[], left_out={NOBODY: 1})
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
    seen = r" 6 +5 +1 | unknown +0 +1 " if arguments[0] == "top" else r"sennit_(state|stage_total)\{.*\} 6\.0\n"
    assert len(re.findall(seen, done.stdout)) == 2, done.stdout


def given(folder: Path, number: int, content: bytes, user: int = NOBODY) -> Path:
    """A file of another user."""
    file = folder / f"sennit.counters-{number:016x}"
    file.write_bytes(content)
    os.chown(file, user, user)
    return file


def path_blocks(count: int) -> bytes:
    return names_record(1, "path", ["a"]) + b"".join(
        record(counters.COUNTERS, 1, bytes(8), number & 0xFFFF, number >> 16) for number in range(count)
    )


WIDE = [f"w{number}" for number in range(900)]
COUNTER = record(counters.COUNTERS, 1, bytes(8), 1, 1)
SHAPES = {
    "values": lambda: names_record(1, "engine", WIDE) + record(counters.COUNTERS, 1, bytes(8 * len(WIDE)), 1) * 9_999,
    "names": lambda: names_record(1, "engine", WIDE) * 9_999,
    "a name": lambda: (names_record(1, "engine", ["a" * 64]) + COUNTER) * 150_000,
    "blocks": lambda: names_record(1, "path", ["a"]) + COUNTER * 700_000,
    "nothing": lambda: record(7, 1, b"") * 1_100_000,
    "one name": lambda: record(counters.NAMES, 1, b"a\0" * (1 << 23)),
    "tables": lambda: b"".join(names_record(1, f"ids_{n}", ["a"]) + COUNTER for n in range(60_000)),
}


@pytest.mark.root
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most_bytes", [counters.FOREIGN_MAX_BYTES, 1 << 24])
def test_a_large_page_of_another_user_costs_what_it_may(memory: Path, shape: str, most_bytes: int) -> None:
    """Whole, and cut to what root reads of others."""
    body = SHAPES[shape]()[: most_bytes - counters.HEADER.size]
    given(memory, 0, page_with(body))
    sound = memory / f"sennit.counters-{'f' * 16}"
    sound.write_bytes(sound_page(memory, ["engine", "flow", "path"]))
    seen = counters.look(memory)
    assert seen.pages[0].file == sound
    values = sum(len(block.values) for page in seen.pages[1:] for block in page.blocks)
    assert values <= counters.FOREIGN_MAX_VALUES
    assert len(seen.left_out) + len(seen.pages) <= 2
    looked = next(top.looks(1.0, memory))
    tables = [top.ranks_table(looked.ranks), top.paths_table(looked.ranks), top.ids_table(looked.ids)]
    assert sum(table.row_count for table in tables) <= 2 + 2 * top.FOREIGN_MAX_ROWS


@pytest.mark.root
def test_pages_within_the_limit_are_read_and_their_rows_limited(memory: Path) -> None:
    blocks = 40_000
    given(memory, 0, page_with(path_blocks(blocks)))
    given(memory, 1, page_with(path_blocks(3)), NOBODY - 1)
    (memory / f"sennit.counters-{'f' * 16}").write_bytes(sound_page(memory, ["engine", "flow", "path"]))
    looked = next(top.looks(1.0, memory))
    assert looked.left_out == {}
    table = top.paths_table(looked.ranks)
    # Own ones, those of the user with few, and as many more as there may be.
    assert table.row_count == 1 + top.FOREIGN_MAX_ROWS
    assert list(table.columns[2].cells).count("65535") == 0
    assert top.left_out_text({NOBODY: 3_000, 0: 1}) == "not read: 3,001 pages of other users, most of nobody"
    assert table.caption == f"not shown: {blocks + 3 - top.FOREIGN_MAX_ROWS:,} rows of other users, most of nobody"


@pytest.mark.root
def test_names_beyond_the_limit_are_not_opened(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = given(memory, 0, b"")
    into = os.open(memory, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(1, 100_000):
        os.link(linked, f"sennit.counters-{number:016x}", dst_dir_fd=into)
    for number in range(1 << 32, (1 << 32) + 2_000):
        given(memory, number, b"")
    os.close(into)
    sound = memory / f"sennit.counters-{'f' * 16}"
    sound.write_bytes(sound_page(memory, ["engine"]))
    opened: list[Path] = []
    really = os.open

    def counted(file: Path, flags: int) -> int:
        opened.append(file)
        return really(file, flags)

    monkeypatch.setattr(os, "open", counted)
    seen = counters.look(memory)
    assert [page.file for page in seen.pages] == [sound]
    assert len(opened) == 1 + counters.FOREIGN_MAX_PAGES
    assert seen.left_out == {NOBODY: 2_001 - counters.FOREIGN_MAX_PAGES}
    assert not [file for file in opened if file.is_symlink()]


@pytest.mark.root
def test_a_file_that_grows_after_it_was_listed_is_read_as_far_as_it_may(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = given(memory, 0, page_with(b""))
    really, read = counters._open, Counter[str]()

    def grown(opened: Path) -> tuple[int, os.stat_result]:
        file.write_bytes(page_with(SHAPES["nothing"]()))
        return really(opened)

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        read["bytes"] += size
        return really_pread(descriptor, size, offset)

    really_pread = os.pread
    monkeypatch.setattr(counters, "_open", grown)
    monkeypatch.setattr(os, "pread", counted)
    assert counters.look(memory).left_out == {NOBODY: 1}
    assert read["bytes"] <= counters.FOREIGN_MAX_BYTES


@pytest.mark.root
def test_one_user_leaves_the_others_their_share(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one who has many numbers."""
    subordinates = memory / "subuid"
    subordinates.write_text(f"somebody:50:1\n# a comment\n{NOBODY}:100000:65536\nmore:x:y\n")
    monkeypatch.setattr(accounts.Accounts.__init__, "__defaults__", (subordinates,))
    many = page_with(path_blocks(30_000))
    for number in range(64):
        given(memory, number, many, 100_000 + number)
    honest = given(memory, 1 << 60, page_with(path_blocks(45_000)), 1000)
    seen = counters.look(memory)
    assert {page.account for page in seen.pages} == {NOBODY, 1000}
    assert honest in {page.file for page in seen.pages}
    # Half of what there is, and what the other one did not need: one page.
    assert seen.left_out == {NOBODY: 63}


def test_who_answers_for_a_user(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    known = accounts.Accounts(file)
    assert known.of(100_000) == 100_000  # no such file
    file.write_text("root:200000:10\n1234:100000:65536\nnobody_has_this_name:300000:5\n\nodd\nodd:-1:3\n")
    known = accounts.Accounts(file)
    asked = (99_999, 100_000, 165_535, 165_536, 200_009, 200_010, 300_004)
    assert [known.of(user) for user in asked] == [99_999, 1234, 1234, 165_536, 0, 200_010, 300_000]


def test_what_is_split_goes_to_those_who_need_it() -> None:
    assert counters.shares({1: 5, 2: 100, 3: 100}, 65) == {1: 5, 2: 30, 3: 30}
    assert counters.shares({1: 5, 2: 6}, 100) == {1: 5, 2: 6}
    assert counters.shares({}, 100) == {}
