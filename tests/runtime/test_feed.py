# SPDX-License-Identifier: Apache-2.0
"""`sennit feed`: records that make the same batches as memory, bit for bit; workers that die; how it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.offload.batches import BatchLayout
from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import End, Error, FactsOf, Preparing, Send, Taken
from sennit.offload.ingest.protocol import encode as encode_message
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import RecordStore
from sennit.offload.targets import Target, compile_plan
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields
from sennit.runtime.ingest.chunk_ring import ChunkRing
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.ingest.order import terms_of
from sennit.runtime.stream.settings import StreamSettings, short_stream
from sennit.runtime.stream.source import StreamSource
from tests.forked_commands import ForkedCommand
from tests.offload.fake_rank import Rank

SESSION, COUNT, BODY_BYTES = 3, 60, 1400
RUN = OrderSettings(seed=1, split="random", eval_fraction=0.1, batch_size=24, epochs=1, max_steps=None)
ORDER = terms_of(replace(RUN, batch_size=64), StreamSettings(order="shuffled"))
SYNTHETIC = ["--data", "synthetic", "--samples", "600", "--row-limit", "200"]


def raw_samples(rng: np.random.Generator, *, longest: int = 30) -> RawSamples:
    """Returns every kind of feature: rows and raw ids, with one or up to many ids a sample."""

    def lists(most: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.concatenate([[0], np.cumsum(rng.integers(0, most + 1, COUNT))])

    some, many = lists(5), lists(longest)
    always = np.arange(0, 3 * COUNT + 1, 3)
    signed = rng.integers(-(2**63), 2**63 - 1, COUNT, dtype=np.int64, endpoint=True)
    return RawSamples(
        name="made",
        dense=torch.from_numpy(rng.standard_normal((COUNT, 3)).astype(np.float32)),
        labels=torch.from_numpy(rng.integers(0, 2, COUNT).astype(np.float32)),
        dense_fields=dense_fields("abc"),
        features=(
            Feature(name="full", row_count=256, values=rng.integers(0, 256, COUNT)),
            Feature(name="row", row_count=300, values=rng.integers(0, 300, COUNT).astype(np.int32)),
            Feature(name="some rows", row_count=9, values=rng.integers(0, 9, some[-1]), offsets=some, first=2),
            Feature(name="always", row_count=70_000, values=rng.integers(0, 70_000, 3 * COUNT), offsets=always),
            Feature(name="hashed", row_count=1000, values=signed, salt=-3),
            Feature(name="small", row_count=1000, values=rng.integers(0, 99, COUNT), salt=5),
            Feature(name="many", row_count=77, values=rng.integers(0, 2**40, many[-1]), offsets=many, salt=1, first=4),
            Feature(name="none", row_count=5, values=np.zeros(0, np.int64), offsets=np.zeros(COUNT + 1, np.int64)),
        ),
    )


def stream_of(raw: RawSamples) -> FeedStream:
    return FeedStream.of(short_stream(raw, StreamSettings(order="shuffled"), RUN))


def first_of(ring: ChunkRing) -> RecordStore:
    """The chunk of the first batch."""
    ring.ask(0, 7)
    while not (found := list(ring.ready())):
        assert select.select([ring], [], [], 30)[0]
    ((holder, _, store),) = found
    assert holder == 7
    return store


def assert_same_batches(raw: RawSamples, target: Target) -> None:
    """Checks that a receiver makes the same batches from the records as ranks read from the stream."""
    fed = stream_of(raw)
    # As a trainer gets the facts.
    again = Facts.from_json(json.loads(json.dumps(fed.facts.as_json())))
    source = StreamSource(fed.stream, fed.order, fed.preprocessing, rank=0, world_size=1)
    assert [(table.name, table.rows) for table in again.tables] == [(table.name, table.rows) for table in source.tables]
    layout = BatchLayout(plan=again.plan, batch_rows=RUN.batch_size, slots=1)
    with (
        contextlib.closing(source),
        ChunkRing(fed) as ring,
        compile_plan(layout, target, session=SESSION, udp_port=4800) as receiver,
    ):
        store = first_of(ring)
        chunk = fed.order.chunk(0, 0, 1)
        for packet in store.sender(session=SESSION, body_max_bytes=BODY_BYTES).packets(chunk.places(0), 0, 0):
            receiver.deliver(packet)
        assert receiver.rows_taken(0) == RUN.batch_size
        labels, dense, lengths, values = receiver.batch(0).tensors()
        expected = source.take(0)
        assert torch.equal(labels, expected.labels)
        assert torch.equal(dense, expected.dense)
        assert torch.equal(lengths, expected.lengths)
        assert torch.equal(torch.cat(values), expected.values)


@pytest.mark.parametrize("target", [Target.NUMPY, Target.CPU])
def test_records_make_the_batches_of_memory(target: Target, rng: np.random.Generator) -> None:
    assert_same_batches(raw_samples(rng), target)


@pytest.mark.root
@pytest.mark.needs("bpf", "arena")
def test_records_make_the_batches_of_memory_in_xdp(rng: np.random.Generator) -> None:
    assert_same_batches(raw_samples(rng), Target.XDP)


def test_lists_are_cut_to_what_is_used(rng: np.random.Generator) -> None:
    fields = stream_of(raw_samples(rng, longest=1500)).facts.plan.schema.ids
    assert (fields[2].length, fields[6].length) == (2, 4)


def test_a_list_that_no_record_holds_is_named(rng: np.random.Generator) -> None:
    offsets = np.arange(COUNT + 1) * 1025
    long = Feature(name="clicks", row_count=2, values=np.zeros(offsets[-1], np.int64), offsets=offsets)
    with pytest.raises(DataError, match="table clicks: a sample with 1025 ids; a record holds at most 1024"):
        stream_of(replace(raw_samples(rng), features=(long,)))


def test_records_that_memory_does_not_hold_are_named(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = r"a chunk of made does not fit this machine's memory: \d+ records take \d+ bytes: No space"
    with ChunkRing(stream_of(raw_samples(rng))) as ring, pytest.raises(FeedError, match=words):
        first_of(ring)


@contextlib.contextmanager
def feeding(rank: Rank, *arguments: str) -> Iterator[ForkedCommand]:
    command = ["feed", *SYNTHETIC, "--to", f"127.0.0.1:{rank.address[1]}", *arguments]
    with contextlib.closing(rank), ForkedCommand("sennit", *command) as feed:
        assert rank.accept().feeder.endswith("(asks)")
        yield feed


def workers_of(feed: ForkedCommand) -> list[int]:
    found = []
    for pid in Path(f"/proc/{feed.pid}/task/{feed.pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # The process has ended meanwhile.
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def ended(feed: ForkedCommand) -> tuple[int, str]:
    """Its exit code, and what it wrote."""
    done = feed.end(30)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_is_fed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    rank = Rank(order=ORDER, window_packets=1000)
    with feeding(rank, "--json", str(path)) as feed:
        assert rank.accept().feeder.endswith("worker 0")
        facts = rank.hear()
        assert isinstance(facts, FactsOf)
        assert Facts.from_json(facts.facts).sample_count == 600
        rank.say(Send(batch=0, row=0))
        packets = rank.packets(1)
        assert packets[0][:2] == (0, 0)
        rank.say(Taken(batch=0, row=64), End())
        code, said = ended(feed)
        assert code == 0, said
        assert "fed 64 records in" in said
        assert "s of processors for a million records" in said
    report = json.loads(path.read_text())
    each = (report["user_s"] + report["system_s"]) * 1e6 / 64
    assert report["processor_s_per_million_records"] == pytest.approx(each)
    assert (report["counters"]["records"], report["counters"]["batches"], report["replaced"]) == (64, 1, 0)


@pytest.mark.slow
def test_a_trainer_is_told_why_a_feeder_does_not_come() -> None:
    rank = Rank(order=terms_of(replace(RUN, batch_size=4096), StreamSettings(order="shuffled")))
    with feeding(rank) as feed:
        while isinstance(said := rank.hear(), Preparing):
            pass
        assert isinstance(said, Error)
        assert "training samples do not fill one batch of 4096; give a smaller --batch-size" in said.text
        code, told = ended(feed)
        assert code == 1
        assert said.text in told


@pytest.mark.long
def test_records_of_a_worker_that_heard_no_end_are_counted() -> None:
    """A trainer that is done may be gone before it has told every worker."""
    packets = 13  # A batch of 64 records, five in each packet.
    rank = Rank(order=ORDER, window_packets=1000)
    with feeding(rank, "--workers", "2") as feed:
        rank.accept()
        told, rank.control = rank.control, socket.socket()
        rank.accept()
        with told, rank.control:
            told.sendall(encode_message(Send(batch=0, row=0)))
            assert {batch for batch, _, _ in rank.packets(packets)} == {0}
            told.sendall(encode_message(End()))
            deadline_s = time.monotonic() + 30
            while len(workers_of(feed)) > 1:
                assert time.monotonic() < deadline_s
            rank.say(Send(batch=1, row=0))
            assert {batch for batch, _, _ in rank.packets(packets)} == {1}
        code, said = ended(feed)
        assert code == 0, said
        assert "fed 128 records in" in said


@pytest.mark.long
def test_a_worker_that_met_no_trainer_ends_with_the_run() -> None:
    rank = Rank(order=ORDER, window_packets=1000)
    with feeding(rank, "--workers", "2", "--timeout", "600") as feed:
        rank.accept()
        assert isinstance(rank.hear(), FactsOf)
        rank.listener.close()
        rank.say(End())
        code, said = ended(feed)
        assert code == 0, said


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_twice_and_then_it_is_over() -> None:
    rank = Rank(order=ORDER)
    with feeding(rank) as feed:
        for _ in range(3):
            assert rank.accept().feeder.endswith("worker 0")
            assert isinstance(rank.hear(), FactsOf)
            (pid,) = workers_of(feed)
            os.kill(pid, signal.SIGKILL)
        code, said = ended(feed)
        assert code == 1
        assert said.count("worker 0 died with signal 9; another one takes its place") == 2
        assert "error: worker 0 died with signal 9, as 2 before it" in said


@pytest.mark.slow
def test_a_trainer_that_goes_is_named() -> None:
    rank = Rank(order=ORDER)
    with feeding(rank) as feed:
        rank.accept()
        assert isinstance(rank.hear(), FactsOf)
        rank.control.close()
        code, said = ended(feed)
        assert code == 1
        assert "error: the trainer is gone: rank 0: " in said


@pytest.mark.slow
def test_an_interrupt_ends_it_and_its_workers() -> None:
    rank = Rank(order=ORDER)
    with feeding(rank, "--workers", "2") as feed:
        rank.accept()
        assert isinstance(rank.hear(), FactsOf)
        workers = workers_of(feed)
        assert len(workers) == 2
        os.kill(feed.pid, signal.SIGINT)
        code, said = ended(feed)
        assert code == 130
        assert said.endswith("interrupted; the trainer goes on with other feeders, or waits for one\n")
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the data set is missing"),
        (["x.parquet", "--data", "flights"], "error: --data beside paths; allowed: one of the two"),
        (["--data", "criteo"], "error: data set 'criteo'; allowed: flights, movielens, adult, synthetic"),
        (
            ["--data", "synthetic-stream?days=3"],
            "error: --data synthetic-stream?days=3 is made when it is read, and not fed; allowed: `sennit make-stream`",
        ),
        (["synthetic-yambda"], "error: --data synthetic-yambda is made when it is read, and not fed; allowed: another"),
        (["absent.parquet"], "error: data set 'absent.parquet': no such file"),
        (["--data", "synthetic", "--to", "nowhere"], "error: address 'nowhere'; allowed: HOST:PORT"),
        (["--data", "synthetic", "--timeout", "0"], "error: --timeout 0.0 s; allowed: above 0"),
        (["--data", "synthetic", "--json", "."], "error: --json . cannot be written: a folder, or no permission"),
        (
            ["--data", "synthetic", "--json", "/dev/null/x.json"],
            "error: --json /dev/null/x.json cannot be written: File",
        ),
        (
            ["--data", "synthetic", "--to", "127.0.0.1:9", "--timeout", "0.2"],
            "error: no trainer at 127.0.0.1 port 9: Connection refused; start `sennit train --ingest",
        ),
    ],
)
def test_one_line_says_what_to_do(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["feed", *arguments])
    assert done.exit_code == 1
    assert message in done.stderr
