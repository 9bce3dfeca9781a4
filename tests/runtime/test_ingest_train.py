# SPDX-License-Identifier: Apache-2.0
"""`sennit train --ingest cpu://…` over loopback gives the weights of a run from memory. Wrong options are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sennit.ebpf import kernel_features
from sennit.offload.batches import BatchLayout
from sennit.offload.ingest import session
from sennit.offload.ingest.feeder import Feeder
from sennit.offload.ingest.protocol import Terms
from sennit.offload.ingest.target import IngestTarget
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.sketch import Sketch, sampled_rows
from sennit.offload.xdp_source import generate
from sennit.runtime.data import sources
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.address import Address
from sennit.runtime.ingest.chunk_ring import ChunkRing
from sennit.runtime.ingest.fed import Door, FedSource
from sennit.runtime.ingest.feed import Asking
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.model.sharding_settings import sharding_of
from sennit.runtime.stream.order import StreamOrder
from sennit.runtime.stream.settings import StreamSettings, open_source
from sennit.runtime.training.command import main
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer
from tests.forked_commands import ForkedCommand
from tests.offload.whole_store import WholeStore
from tests.runtime.test_feed import first_of
from tests.runtime.whole_run import train
from tests.runtime.world import WorldFactory


def plans(rank: int, world: int, *, port: int, sharding: str) -> dict[str, Any]:
    """The plan of a rank's receiver, the XDP program made of it, what feeders hear; and the shards of the rank."""
    stream = StreamSettings(order="shuffled")
    config = TrainingConfig(
        batch_size=24, embedding_dim=4, bottom=(8,), top=(8,), row_shards=4, sharding=sharding_of(sharding)
    )
    data = Source(data="synthetic", samples=300, row_limit=50)
    facts = FeedStream.of(open_source(data, stream, config.order_settings, seed=1)).facts
    layouts: list[BatchLayout] = []
    terms: list[Terms] = []
    receiver, begin = IngestTarget.receiver, session.Session.__init__

    def receives(self: IngestTarget, layout: BatchLayout, *place: Any, **options: Any) -> Any:
        layouts.append(layout)
        return receiver(self, layout, *place, **options)

    def begins(self: session.Session, listener: Any, told: Terms, **options: Any) -> None:
        terms.append(told)
        begin(self, listener, told, **options)

    with pytest.MonkeyPatch.context() as patch, Door(IngestTarget.parse(f"cpu://127.0.0.1:{port}"), rank) as door:
        patch.setattr(IngestTarget, "receiver", receives)
        patch.setattr(session.Session, "__init__", begins)
        door.facts = facts
        source = FedSource(
            door, config.order_settings, stream, rank=rank, world_size=world, timeout_s=60.0, is_elastic=False
        )
        with Trainer(config, source) as trainer:
            source.begin(0)
            shards = sorted(map(str, trainer.own_shards))
        source.close()
    (layout,), (told,) = layouts, terms
    program = generate(layout)
    return {
        "facts": source.facts.as_json(),
        "layout": [layout.batch_rows, layout.slots],
        "terms": dataclasses.asdict(told),
        "program": hashlib.sha256(program.text.encode()).hexdigest(),
        "arrays": {name: array.tolist() for name, array in program.tables.items()},
        "shards": shards,
    }


SAMPLES, ROW_LIMIT = "600", "200"
MODEL = ["--batch-size", "64", "--dim", "4", "--bottom", "8", "--top", "8", "--sharding", "table_wise"]
MEMORY = ["--data", "synthetic", "--samples", SAMPLES, "--row-limit", ROW_LIMIT]


def feeder(port: int) -> ForkedCommand:
    return ForkedCommand("sennit", "feed", *MEMORY, "--to", f"127.0.0.1:{port}", "--timeout", "60")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_weights_are_those_of_a_run_from_memory_also_when_resumed(tmp_path: Path, port: int) -> None:
    """Saves a checkpoint in the second epoch. Another run is fed the rest.

    The second run begins with a later batch and takes each batch ahead, because its tables are in a file.
    """
    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "11"]
    expected = train(tmp_path / "memory.json", *MODEL, *MEMORY, "--order", "shuffled", "--ranks", "2")
    target = ["--ingest", f"cpu://127.0.0.1:{port}", "--ranks", "2", "--timeout", "60"]
    with feeder(port) as process:
        options = [*saved, "--sketch", str(tmp_path / "ids.sketch"), "--sharding", "auto", "--rebalance", "5"]
        fed = train(tmp_path / "fed.json", *MODEL, *target, *options)
        done = process.end(30)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr  # what it shows on a terminal, it does not show in a file
    assert fed["weights_sha256"] == expected["weights_sha256"]
    # Feeders count ids.
    assert fed["rebalance"]["looks"] == 3
    counted = fed["ingest"]
    assert counted["target"] == f"cpu://127.0.0.1:{port}"
    # Two epochs of eight steps, and sixty held-back rows.
    assert counted["records"] == 2 * (8 * 64 + 60)
    assert (counted["feeders"], counted["feeders_lost"], counted["moved"]) == (2, 0, 0)
    assert counted["datagrams"]["accepted"] > 0
    check_sketch(Sketch.load(tmp_path / "ids.sketch"), ranks=2)

    (tmp_path / "saved" / "step-000000016").rename(tmp_path / "lost")
    with feeder(port):
        stored = ["--table-store", str(tmp_path / "rows"), "--table-memory", "256KiB"]
        rest = train(tmp_path / "rest.json", *MODEL, *target, *saved, *stored, "--resume")
    assert rest["steps"] == {"first": 11, "last": 16}
    assert rest["ingest"]["records"] == 5 * 64 + 60
    assert rest["weights_sha256"] == expected["weights_sha256"]


def check_sketch(found: Sketch, *, ranks: int) -> None:
    """Checks the sketch against the order of the run."""
    data = Source(data="synthetic", samples=int(SAMPLES), row_limit=int(ROW_LIMIT))
    samples = sources.load(data, seed=1).samples()
    opened = open_source(data, StreamSettings(order="shuffled"), TrainingConfig(batch_size=64).order_settings, seed=1)
    order = opened.order
    expected = Sketch(tables=found.tables, table_rows=found.table_rows, shape=found.shape)
    by_name = {column.name: column for column in samples.columns}
    assert dict(zip(found.tables, found.table_rows, strict=True)) == {
        name: column.row_count for name, column in by_name.items()
    }
    for batch in range(order.batch_count):
        for rank in range(ranks):
            part = rows_of(order, batch, rank, ranks)
            chosen = torch.from_numpy(part[sampled_rows(batch, len(part), found.shape.one_row_in)])
            expected.add_sampled([by_name[name].gather(chosen)[1].numpy() for name in found.tables])
            expected.rows += len(part)
    assert found.rows == expected.rows == 2 * (8 * 64 + 60)
    assert np.array_equal(found.counts, expected.counts)
    assert found.counts.any()


def rows_of(order: StreamOrder, batch: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """The rows of the stream that a rank has in a batch."""
    chunk, read = order.chunk(batch, rank, ranks), []
    for begin, end in (chunk.part.rows(interval) for interval in chunk.intervals):
        rows = np.arange(begin, end)
        read.append(rows[chunk.part.has(rows)])
    return np.concatenate(read)[chunk.places(batch)]


def test_plans_do_not_depend_on_owners(kept_world: WorldFactory, port: int) -> None:
    """The same feature plan, the same XDP program of it, and the same words to feeders, whoever has which shard."""
    by_table, by_row, everywhere = (
        kept_world(2).run(plans, port=port, sharding=sharding)
        for sharding in ("table_wise", "row_wise", "data_parallel")
    )
    owned = [[one.pop("shards") for one in found] for found in (by_table, by_row, everywhere)]
    for found in (by_table, by_row, everywhere):
        # Random numbers: the run's is the same on all ranks, and each rank has a session of its own.
        assert len({one["terms"].pop("run") for one in found}) == 1
        assert len({one["terms"].pop("session") for one in found}) == len(found)
    assert not set(owned[0][0]) & set(owned[0][1])
    assert owned[0] != owned[1]
    assert owned[2][0] == owned[2][1]
    assert by_table[0]["program"] == by_table[1]["program"]
    assert by_table == by_row == everywhere


@pytest.mark.slow
def test_feeders_are_told_why_a_run_failed(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--dense-optimizer", "sgd", "--dense-rate", "999", "--sparse-rate", "999", "--decay", "none"]
    with feeder(port) as process:
        told = refusal(["--ingest", f"cpu://127.0.0.1:{port}", "--timeout", "60", *rates], capsys)
        assert "error: rank 0: loss is " in told
        done = process.end(30)
    assert done.returncode == 1
    assert "error: rank 0: loss is " in done.stderr


def test_without_a_feeder_it_ends_at_the_deadline(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(["--ingest", f"cpu://127.0.0.1:{port}", "--timeout", "1"], capsys)
    assert f"no feeder came to 127.0.0.1 port {port} within 1 s" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ingest", "cpu://127.0.0.1", "--data", "flights"], "--data with --ingest"),
        (["--ingest", "cpu://127.0.0.1", "--zipf", "1"], "--zipf with --ingest"),
        (["--ingest", "cpu://127.0.0.1", "--order", "files", "--follow", "--decay", "none"], "--ingest with --follow"),
        (["--sketch", "ids.sketch"], "--sketch without --ingest"),
        (["--ingest", "dpu://x"], "allowed: xdp://INTERFACE"),
        (["--ingest", "cpu://127.0.0.1:70000"], "port '70000'"),
        (["--ingest", "cpu://[::1"], "allowed: xdp://INTERFACE"),
        (["--ingest", "cpu://127.0.0.1:65535", "--ranks", "2"], "port 65535 for 2 ranks"),
        (["--ingest", "cpu://0.0.0.0"], "feeders need one address"),
        (["--ingest", "cpu://192.0.2.1"], "192.0.2.1 port 4800: Cannot assign requested address"),
        (["--ingest", "xdp://lo,lo", "--ranks", "2"], "an interface is named twice"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(arguments, capsys)


@pytest.mark.slow
def test_data_that_end_before_the_run_are_named_on_the_rank_that_waits(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The feeder promised more samples than it has. The other rank does not wait longer than its deadline either."""
    data = Source(data="synthetic", samples=int(SAMPLES), row_limit=int(ROW_LIMIT))
    address = Address(host="127.0.0.1", port=port)
    failures: list[FeedError] = []

    def feed() -> None:
        with Asking(address, name="short", timeout_s=60) as asking:
            stream = FeedStream.open(data, asking.terms, seed=1)

        def part_of(terms: Terms, batch: int) -> NDArray[np.int64]:
            if batch == 3:
                raise ValueError("the data end here")
            return np.arange(stream.order.counts(batch, terms.world_size)[terms.rank])

        with (
            ChunkRing(stream) as ring,
            contextlib.closing(WholeStore(first_of(ring), part_of)) as supply,
            Feeder("short", stream.facts.as_json(), supply, timeout_s=60) as feeder,
        ):
            try:
                feeder.run([(address.host, address.port)])
            except FeedError as error:
                failures.append(error)

    thread = threading.Thread(target=feed)
    thread.start()
    given = ["--ingest", f"cpu://127.0.0.1:{port}", "--ranks", "2", "--timeout", "8", "--sharding", "table_wise"]
    said = refusal(given, capsys)
    thread.join(60)
    assert re.search(r"batch [0-3], rank [01]: 0 of 32 records came, and none more within 8 s; feeders: none", said)
    assert "short at 127.0.0.1" in said
    # A feeder that stops closes its connection. The kernel resets it if requests have come that nobody read.
    assert any(reason in said for reason in ("the data end here", "connection closed", "connection lost"))
    assert "the data end here" in str(failures[0])


def test_a_port_in_use_is_named(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", port)):
        said = refusal(["--ingest", f"cpu://127.0.0.1:{port}"], capsys)
    assert f"127.0.0.1 port {port}: Address already in use" in said


def test_xdp_names_the_privilege_and_the_interface_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_features, "missing_privileges", lambda: ["CAP_BPF", "CAP_PERFMON"])
    said = refusal(["--ingest", "xdp://lo"], capsys)
    assert "lacks CAP_BPF, CAP_PERFMON, and there is no agent at" in said
    monkeypatch.setattr(kernel_features, "missing_privileges", list)
    assert "there is no interface 'eth99'; there are lo" in refusal(["--ingest", "xdp://eth99"], capsys)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*MODEL, *arguments])
    assert ended.value.code == 1
    return capsys.readouterr().err
