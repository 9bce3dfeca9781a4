# SPDX-License-Identifier: Apache-2.0
"""Batches of a stream against the whole data set in memory: rows, fitted values, and what is read for them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.arrow_columns import PartOfFile, Piece, raw_samples
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields
from sennit.runtime.data.schema import DenseField, read_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream import settings as settings_module
from sennit.runtime.stream.fitting import Frequencies, Moments, fit
from sennit.runtime.stream.parquet_file import ParquetFile
from sennit.runtime.stream.reader import Reader
from sennit.runtime.stream.settings import OpenedStream, StreamSettings, open_stream, short_stream
from sennit.runtime.stream.source import StreamSource
from tests.extent import examples
from tests.runtime.stream.stream_files import table, write
from tests.runtime.stream.test_stream_order import rows_of

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.timeout(120)


def opened(folder: Path, seed: int, rows: Any, *, order: str = "shuffled", **settings: Any) -> OpenedStream:
    write(folder, rows)
    run = OrderSettings(
        seed=seed,
        split="random",
        eval_fraction=0.1,
        batch_size=40,
        epochs=1,
        max_steps=None,
        eval_every=None if "window_s" in settings else 7,
    )
    source = Source(data=str(folder), schema=folder / "schema.toml")
    chosen = StreamSettings(order=order, shuffle_rows=250, **settings)
    return open_stream(source, read_schema(folder / "schema.toml"), chosen, run)


def test_the_label_that_all_held_back_rows_have_is_found_before_training(seed: int, tmp_path: Path) -> None:
    """And where there are two labels, the first blocks say so."""

    def only_label(labels: Any, **settings: Any) -> float | None:
        rows = table(seed)
        number = rows.schema.names.index("clicked")
        found = opened(tmp_path, seed, rows.set_column(number, "clicked", pa.array(labels)), **settings)
        blocks.clear()
        return found.only_label()

    blocks: list[int] = []
    both = np.arange(1200) % 2 == 0
    one = np.ones(1200, np.bool_)
    with pytest.MonkeyPatch.context() as patch:
        read = ParquetFile.read

        def counted(self: ParquetFile, block: int, columns: Any, *, begin: int = 0) -> Any:
            blocks.append(block)
            return read(self, block, columns, begin=begin)

        patch.setattr(ParquetFile, "read", counted)
        assert only_label(both) is None
        assert len(blocks) == 1
        assert (only_label(one), only_label(~one)) == (1.0, 0.0)
        assert len(blocks) == 15
        # Without an order of its own, the last tenth is held back.
        assert only_label(np.where(np.arange(1200) < 1080, both, one), order="time") == 1.0
        assert len(blocks) == 2


def fitted(found: OpenedStream, world_size: int = 1) -> list[Preprocessing]:
    """The preprocessing of each rank of a world, whose ranks are threads here."""
    gathered: list[Any] = [None] * world_size
    made: list[Any] = [None] * world_size
    meeting = threading.Barrier(world_size)

    def rank_of(rank: int) -> None:
        def gather(mine: Any) -> list[Any]:
            gathered[rank] = mine
            meeting.wait(60)
            return gathered

        part, stream = found.order.training_part(), found.stream
        made[rank] = fit(
            "clicks", stream.index, stream.schema, part, found.fitted, rank=rank, world_size=world_size, gather=gather
        )

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def equal(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("dense", "labels", "lengths", "values", "sample_weights")
    )


@pytest.mark.parametrize("order", ["shuffled", "time"])
def test_batches_have_the_rows_that_the_order_names(order: str, seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    found = opened(tmp_path / "data", seed, rows, order=order)
    (preprocessing,) = fitted(found)
    raw = raw_samples("clicks", [Piece(rows, PartOfFile("whole", "rows"))], found.stream.schema)
    whole = preprocessing.apply(raw).samples()
    for world_size in (1, 3):
        for rank in range(world_size):
            source = StreamSource(found.stream, found.order, preprocessing, rank=rank, world_size=world_size)
            try:
                for number in range(found.order.batch_count):
                    wanted = whole.batch(torch.from_numpy(rows_of(found.order, number, rank, world_size)))
                    assert equal(source.take(number), wanted), number
                    source.release(number)
            finally:
                source.close()
            # A run that resumes begins anywhere.
            source = StreamSource(found.stream, found.order, preprocessing, rank=rank, world_size=world_size)
            number = found.order.batch_count // 2
            wanted = whole.batch(torch.from_numpy(rows_of(found.order, number, rank, world_size)))
            assert equal(source.take(number), wanted)
            source.close()


def test_samples_in_memory_have_the_same_batches_as_a_short_stream(seed: int) -> None:
    stream = np.random.default_rng(seed)
    count = 300
    lengths = stream.integers(0, 4, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cities = pa.array([None if number == 0 else f"city {number}" for number in stream.integers(0, 9, count)])
    dense = stream.standard_normal((count, 2))
    dense[7, 1] = np.nan
    raw = RawSamples(
        name="mine",
        dense=torch.from_numpy(dense),
        dense_fields=dense_fields(["one", "two"]),
        labels=torch.from_numpy(stream.integers(0, 2, (count, 2)).astype(np.float32)),
        label_names=("clicked", "bought"),
        sample_weights=torch.from_numpy(stream.random(count).astype(np.float32)),
        eval_rows=50,
        features=(
            Feature.categories("city", cities),
            Feature(name="seen", row_count=20, values=stream.integers(0, 2**40, offsets[-1]), offsets=offsets, salt=3),
            Feature(name="user", row_count=9, values=stream.integers(0, 9, count).astype(np.int32)),
        ),
    )
    run = OrderSettings(seed=seed, split="random", eval_fraction=0.5, batch_size=40, epochs=2, max_steps=None)
    found = short_stream(raw, StreamSettings(order="files"), run)
    assert found.order.eval_count == 50
    (preprocessing,) = fitted(found)
    narrow = replace(raw, dense=raw.dense.to(torch.float32))
    whole = preprocessing.apply(narrow).samples()
    with contextlib.closing(StreamSource(found.stream, found.order, preprocessing, rank=1, world_size=2)) as source:
        assert source.label_names == ("clicked", "bought")
        for number in range(found.order.batch_count):
            wanted = whole.batch(torch.from_numpy(rows_of(found.order, number, 1, 2)))
            assert equal(source.take(number), wanted), number


def small(**changed: Any) -> RawSamples:
    """Four samples, one number of which is null."""
    made = RawSamples(
        name="mine",
        dense=torch.tensor([[1.0], [torch.nan], [3.0], [5.0]]),
        dense_fields=(DenseField(name="price", clamp=(0.0, 2.0), log1p=True),),
        labels=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        features=(Feature(name="user", row_count=9, values=np.arange(4)),),
    )
    return replace(made, **changed)


RUN = OrderSettings(seed=1, split="last", eval_fraction=0.25, batch_size=3, epochs=1, max_steps=None)


def test_operators_of_samples_in_memory_have_been_applied_and_are_for_servers() -> None:
    """Not a second time: 3 and 5 are what clamp and log1p have made."""
    found = short_stream(small(), StreamSettings(order="files"), RUN)
    (preprocessing,) = fitted(found)
    assert [scale.field for scale in preprocessing.scales] == list(small().dense_fields)
    with contextlib.closing(StreamSource(found.stream, found.order, preprocessing, rank=0, world_size=1)) as source:
        assert source.take(0).dense.squeeze(1).tolist() == [-1.0, 0.0, 1.0]
        assert source.take(1).dense.squeeze(1).tolist() == [3.0]


def test_a_model_of_other_features_is_refused(seed: int, tmp_path: Path) -> None:
    found = short_stream(small(), StreamSettings(), RUN)
    (preprocessing,) = fitted(found)
    other = opened(tmp_path / "data", seed, table(seed))
    with pytest.raises(DataError, match=r"data with the features price, .*; allowed: those of the model, price, user"):
        StreamSource(other.stream, other.order, preprocessing, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": torch.tensor([0.0, 1.0, 0.0, 2.0])}, "label 2.0 of sample 3; allowed: 0 and 1"),
        ({"labels": torch.zeros(3)}, r"dense is \(4, 1\), expected \(3, at least 1\)"),
        ({"sample_weights": torch.tensor([1.0, 1.0, 1.0, -1.0])}, "weight -1.0 of sample 3; allowed: 0 or more"),
        ({"dense": torch.tensor([[1.0], [torch.inf], [3.0], [5.0]])}, "dense column price has values that are not fin"),
        ({"features": (Feature(name="user", row_count=3, values=np.arange(4)),)}, "table user: row id 3 .* is outside"),
        ({"features": (Feature(name="price", row_count=9, values=np.arange(4)),)}, "two columns have one name"),
        ({"features": ()}, "no sparse column"),
    ],
)
def test_samples_in_memory_are_checked_before_a_run_begins(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        short_stream(small(**changed), StreamSettings(), RUN)


def test_a_pass_over_the_training_rows_fits_as_whole_data_do(seed: int, tmp_path: Path) -> None:
    rows = table(seed)
    found = opened(tmp_path / "data", seed, rows)
    every = [fitted(found, world_size) for world_size in (1, 2, 5)]
    texts = {made.text() for of_world in every for made in of_world}
    assert len(texts) == 1
    made = every[0][0]
    raw = raw_samples("clicks", [Piece(rows, PartOfFile("whole", "rows"))], found.stream.schema)
    is_training = torch.from_numpy(found.order.training_part().has(np.arange(len(rows))))
    whole = Preprocessing.fit(raw, is_training)
    for one, other in zip(made.scales, whole.scales, strict=True):
        assert one.mean == pytest.approx(other.mean, rel=1e-12)
        assert one.deviation == pytest.approx(other.deviation, rel=1e-12)
    for known, wanted in zip(made.encodings, whole.encodings, strict=True):
        assert known.row_count == wanted.row_count
        if wanted.vocabulary is not None:
            assert known.vocabulary is not None
            assert known.vocabulary.tolist() == wanted.vocabulary.tolist()


def test_a_rolling_run_knows_the_values_of_its_first_window_alone(seed: int, tmp_path: Path) -> None:
    """Each hour brings a new city. The first window of two hours has ten of them, and batches end behind it."""
    found = opened(tmp_path / "data", seed, table(seed), order="time", window_s=7200.0)
    (made,) = fitted(found)
    assert found.fitted == (0, 200)
    assert made.encodings[2].row_count == 1 + 10


@given(
    parts=st.lists(
        st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(float("nan"))), min_size=1, max_size=9), min_size=1, max_size=6
    )
)
@examples(30)
def test_moments_of_parts_are_those_of_the_whole(parts: list[list[float]]) -> None:
    columns = [np.array(part, np.float32)[:, None] for part in parts]
    total = Moments(np.zeros(1), np.zeros(1), np.zeros(1))
    for column in columns:
        total = total.merged(Moments.of(column))
    values = np.concatenate(columns).astype(np.float64)
    values = values[~np.isnan(values)]
    assert total.count[0] == len(values)
    if len(values):
        assert total.mean[0] == pytest.approx(values.mean(), abs=1e-6)
        assert total.squares[0] == pytest.approx(((values - values.mean()) ** 2).sum(), abs=1e-3, rel=1e-6)


def test_frequencies_of_values_add_up() -> None:
    counted, wanted = Frequencies(), dict[str, int]()
    stream = np.random.default_rng(5)
    for _ in range(40):
        values, counts = np.unique(stream.integers(0, 60, 20).astype(str).astype(object), return_counts=True)
        counted.add(values, counts)
        for value, count in zip(values, counts, strict=True):
            wanted[value] = wanted.get(value, 0) + int(count)
    values, counts = counted.total()
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == wanted
    assert values.tolist() == sorted(wanted)


def test_a_region_that_goes_on_is_not_decoded_again(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(tmp_path / "data", seed, table(seed))
    index = found.stream.index
    begun: list[tuple[int, int]] = []
    original = type(index).read

    def read(self: Any, begin: int, end: int, columns: Any) -> Any:
        begun.append((begin, end))
        return original(self, begin, end, columns)

    monkeypatch.setattr(type(index), "read", read)
    with Reader(index, tuple(found.stream.schema.columns), open_max=4) as reader:
        got: list[int] = []
        # Two regions in turn, with gaps as an order of time has them.
        for step in range(20):
            for region in (0, 600):
                first = region + 20 * step
                for row, _, rows in reader.read(first, first + 13):
                    got += range(row, row + len(rows))
    assert sorted(got) == sorted(
        row for step in range(20) for region in (0, 600) for row in range(region + 20 * step, region + 20 * step + 13)
    )
    ends = index.ends.tolist()
    blocks = zip([0, *ends[:-1]], ends, strict=True)
    assert len(begun) == sum(
        begin < high and low < end for begin, end in blocks for low, high in [(0, 393), (600, 993)]
    )


def test_a_file_that_comes_while_the_index_is_made_is_not_part_of_the_run(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to train on, nor in that it moves the begin of the rows for evaluation."""
    for name in ("data", "held"):
        write(tmp_path / name, table(seed))
    schema = tmp_path / "data" / "schema.toml"
    make = getattr(settings_module, "open_index")  # noqa: B009

    def make_while_one_comes(*given: Any, **options: Any) -> Any:
        index = make(*given, **options)
        (tmp_path / "data" / "part-9.parquet").write_bytes((tmp_path / "data" / "part-0.parquet").read_bytes())
        return index

    monkeypatch.setattr(settings_module, "open_index", make_while_one_comes)
    source = Source(data=str(tmp_path / "data"), schema=schema, evaluation=(str(tmp_path / "held"),))
    run = OrderSettings(seed=seed, split="random", eval_fraction=0.1, batch_size=40, epochs=1, max_steps=None)
    found = open_stream(source, read_schema(schema), StreamSettings(order="files"), run)
    assert len(found.stream.index.files) == 6
    assert found.order.train_count == 1200


def test_a_file_that_is_replaced_in_the_middle_is_named(seed: int, tmp_path: Path) -> None:
    found = opened(tmp_path / "data", seed, table(seed))
    (preprocessing,) = fitted(found)
    source = StreamSource(found.stream, found.order, preprocessing, rank=0, world_size=1)
    source.take(0)
    write(tmp_path / "data", table(seed + 1))
    with contextlib.closing(source), pytest.raises(DataError, match=r"part-\d\.parquet"):
        [source.take(number) for number in range(found.order.batch_count)]


def test_a_source_ends_while_it_reads(seed: int, tmp_path: Path) -> None:
    found = opened(tmp_path / "data", seed, table(seed))
    (preprocessing,) = fitted(found)
    for number in (0, found.order.batch_count - 1):
        source = StreamSource(found.stream, found.order, preprocessing, rank=0, world_size=1)
        source.begin(number)
        source.close()
        source.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sennit-stream")]
