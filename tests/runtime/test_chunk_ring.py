# SPDX-License-Identifier: Apache-2.0
"""The chunks of a feeder: few are in memory, what is asked for again is the same, and errors name the row."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Hashable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from sennit.offload.ingest.protocol import ProtocolError
from sennit.offload.ingest.trainer_search import FeedError
from sennit.offload.record_store import RecordStore
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.source import Source
from sennit.runtime.ingest import feed_stream
from sennit.runtime.ingest.chunk_ring import KEPT, ChunkRing
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.ingest.order import numbered, numbering_of, settings_of, terms_of
from sennit.runtime.ingest.shelf import MAPPED, Release, Shelf, Stop, Want, give
from sennit.runtime.stream.settings import StreamSettings, open_source
from tests.offload.fake_rank import Rank
from tests.runtime.stream.stream_files import SCHEMA, pa, table, write

RUN = OrderSettings(
    seed=3, split="random", eval_fraction=0.1, batch_size=40, epochs=2, max_steps=None, validation_fraction=0.1
)
ORDERS = {
    "shuffled": StreamSettings(order="shuffled", shuffle_rows=100),
    "time": StreamSettings(order="time"),
    "rolling": StreamSettings(order="time", window_s=7200.0),
    "until": StreamSettings(order="files", train_until_s=28800.0),
}


def stream_of(folder: Path, seed: int, order: str = "shuffled") -> FeedStream:
    write(folder, table(seed))
    return opened(folder, order)


def opened(folder: Path, order: str = "shuffled", known: Preprocessing | None = None) -> FeedStream:
    (folder / "schema.toml").write_text(SCHEMA.replace('sample_weight = "worth"\n', ""))
    source = Source(data=str(folder), schema=folder / "schema.toml")
    return FeedStream.of(open_source(source, ORDERS[order], run_of(order), seed=1), known=known)


def test_a_preprocessing_that_the_run_knows_is_taken_and_not_fitted_anew(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stream_of(tmp_path, seed)
    monkeypatch.setattr(feed_stream, "fit", None)
    found = opened(tmp_path, known=first.preprocessing)
    assert found.facts == first.facts
    other = replace(first.preprocessing, encodings=first.preprocessing.encodings[1:])
    with pytest.raises(TypeError):  # Of other features: it is fitted, so that the trainer says what differs.
        opened(tmp_path, known=other)


def run_of(order: str) -> OrderSettings:
    settings = ORDERS[order]
    run = RUN if settings.order != "time" else replace(RUN, epochs=1)
    return run if settings.window_s is None else replace(run, validation_fraction=0.0)


def take(ring: ChunkRing, batch: int, holder: int = 0) -> tuple[Hashable, RecordStore]:
    ring.ask(batch, holder)
    while not (found := list(ring.ready())):
        assert select.select([ring], [], [], 30)[0]
    ((_, key, store),) = found
    return key, store


def content(store: RecordStore) -> list[bytes]:
    return [store.record(number) for number in range(len(store))]


def test_few_chunks_are_in_memory_and_one_that_went_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "data", seed)
    with ChunkRing(stream) as ring:
        kept: dict[Hashable, list[bytes]] = {}
        sizes: list[int] = []
        for batch in range(stream.order.batch_count):
            key, store = take(ring, batch)
            assert content(store) == kept.setdefault(key, content(store))
            sizes.append(store.extent.size_bytes)
            ring.release(key, 0)
        assert len(kept) > 20
        key, store = take(ring, 0)
        assert content(store) == kept[key]
        assert max(sizes) < ring.peak_bytes <= 2 * KEPT * max(sizes)


def test_a_chunk_that_somebody_sends_from_stays(seed: int, tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "data", seed)
    with ChunkRing(stream) as ring:
        _, held = take(ring, 0, holder=5)
        for batch in range(0, stream.order.step_count, 2):
            key, _ = take(ring, batch)
            ring.release(key, 0)
        assert take(ring, 0, holder=5)[1] is held
        ring.leave(5)
        take(ring, stream.order.batch_count - 1)
        for batch in range(2, 12, 2):
            ring.release(take(ring, batch)[0], 0)
        assert take(ring, 0, holder=5)[1] is not held


def test_a_worker_has_the_chunks_in_memory_of_its_own(seed: int, tmp_path: Path) -> None:
    """And keeps the last ones, although no batch is on its way."""
    stream = stream_of(tmp_path / "data", seed)
    ours, theirs = Pipe()
    shelf = Shelf(theirs, stream.order, {"of": "the run"})
    rank = Rank(order={"of": "the run"}, rank=1, world_size=3, endpoints=[["h", 1]] * 3)
    keys: list[Hashable] = []
    with contextlib.closing(rank), ours, theirs, ChunkRing(stream) as ring:
        for batch in range(0, 12, 3):
            part = shelf.part(rank.terms, batch)
            assert len(part.records) == stream.order.counts(batch, 3)[1]
            assert shelf.store(part.chunk, batch) is None
            assert shelf.store(part.chunk, batch) is None
            assert ours.recv() == Want(batch)
            assert not ours.poll()
            key, store = take(ring, batch)
            give(ours, key, store, None)
            shelf.receive()
            found = shelf.store(part.chunk, batch)
            assert found is not None
            assert content(found) == content(store)
            shelf.keep([])
            keys.append(key)
            if len(keys) > MAPPED:
                assert ours.recv() == Release(keys[-1 - MAPPED])
        assert shelf.store(keys[-1], 9) is found
        with pytest.raises(ValueError, match="another order of samples than when this feeder began"):
            shelf.part(replace(rank.terms, order={}), 0)
        ours.send(Stop("a file is gone"))
        with pytest.raises(FeedError, match="a file is gone"):
            shelf.receive()


def test_a_value_that_the_schema_refuses_in_the_middle_is_named(seed: int, tmp_path: Path) -> None:
    """Of the window that is trained on last, which nobody read before."""
    rows = table(seed)
    prices = rows["price"].to_numpy(zero_copy_only=False).copy()
    prices[1150] = np.inf
    write(tmp_path / "data", rows.set_column(3, "price", pa.array(prices, from_pandas=True)))
    words = r"part-2\.parquet: column price, row group 3, row 80: value inf; allowed: finite numbers and null"
    with ChunkRing(opened(tmp_path / "data", "rolling")) as ring, pytest.raises(DataError, match=words):
        take(ring, 0)


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_number_batches_as_feeders_do(name: str, seed: int, tmp_path: Path) -> None:
    settings, run = ORDERS[name], run_of(name)
    assert settings_of(terms_of(run, settings)) == (run, settings)
    order = stream_of(tmp_path / "data", seed, name).order
    told = numbered("data", numbering_of(order), run, settings)
    assert (told.batch_count, told.step_count) == (order.batch_count, order.step_count)
    for batch in range(order.batch_count):
        assert told.counts(batch, 3) == order.counts(batch, 3)
        assert told.place(batch) == order.place(batch)
    for step in range(1, order.step_count + 1):
        assert told.evaluation_batches(step) == order.evaluation_batches(step)
        assert told.evaluated(step) == order.evaluated(step)


def test_what_is_no_numbering_is_refused(seed: int, tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "data", seed)
    good = numbering_of(stream.order)
    for wrong, words in (
        ({"version": 0}, "version 0 of the order of streams"),
        ({"train": -1}, "train rows -1"),
        ({"windows": [[1, 2]]}, "not the numbering of a run"),
        ({"windows": 3}, "not the numbering of a run"),
        ({"evaluation": "many"}, "evaluation rows many"),
    ):
        with pytest.raises(ProtocolError, match=words):
            numbered("data", good | wrong, RUN, ORDERS["shuffled"])
    with pytest.raises(ProtocolError, match="an order that this feeder does not know"):
        settings_of({**terms_of(RUN, ORDERS["shuffled"]), "run": {"speed": 1}})
