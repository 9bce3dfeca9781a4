# SPDX-License-Identifier: Apache-2.0
"""`StreamLoader` in programs of one's own: each sample once, a position that is saved, the same in another world."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sennit.runtime.data.batch import Batch
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.pipeline import Pipeline
from sennit.runtime.sharded import ShardedEmbeddingBags, Table
from sennit.runtime.stream import StreamLoader, StreamSettings
from sennit.transport.errors import ConfigError
from tests.extent import briefly
from tests.runtime.stream.stream_files import table, write
from tests.runtime.world import WorldFactory

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.timeout(120)


def loader(folder: Path, **changed: Any) -> StreamLoader:
    options: dict[str, Any] = {"order": "shuffled", "batch_size": 48, "epochs": 2, "seed": 3}
    return StreamLoader(str(folder), schema=folder / "schema.toml", **(options | changed))


def batches(rank: int, world: int, /, *, folder: str, state: dict[str, Any] | None = None, steps: int = 99) -> Any:
    """This rank's labels and users by step, those of the evaluation, and the state."""
    with loader(Path(folder)) as found:
        if state is not None:
            found.load_state_dict(state)
        taken = []
        for batch in found:
            taken.append((batch.labels.tolist(), batch.values[: len(batch.labels)].tolist()))
            if len(taken) == steps:
                break
        evaluated = [batch.labels.tolist() for batch in found.evaluation()]
        return taken, evaluated, found.state_dict(), found.preprocessing.text()


def together(found: list[Any], part: int) -> list[Any]:
    """What all ranks had, by step: the parts of ranks one after another."""
    by_step = zip(*(one[part] for one in found), strict=True)
    if part == 0:
        return [[list(chain.from_iterable(rank[of] for rank in step)) for of in (0, 1)] for step in by_step]
    return [list(chain.from_iterable(step)) for step in by_step]


def test_any_world_takes_the_same_batches_and_goes_on_with_them(
    kept_world: WorldFactory, seed: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "data")
    write(tmp_path / "data", table(seed))
    alone = kept_world(1).run(batches, folder=folder)
    whole = together(alone, 0)
    assert len(whole) == 2 * (1080 // 48)
    for world in (2, 3):
        found = kept_world(world).run(batches, folder=folder, steps=10)
        assert together(found, 0) == whole[:10]
        assert together(found, 1) == together(alone, 1)
        assert {one[3] for one in found} == {alone[0][3]}
        on = kept_world(1).run(batches, folder=folder, state=found[0][2])
        assert together(on, 0) == whole[10:]


class Sum(nn.Module):
    """Of the vectors of a batch."""

    def __init__(self, found: StreamLoader) -> None:
        super().__init__()
        tables = [Table(name=table.name, rows=table.rows, dim=4) for table in found.tables]
        self.embeddings = ShardedEmbeddingBags(tables, lr=0.1, gradients="sum")

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.stack([one.sum() for one in self.embeddings(batch).values()]).sum()


def piped(rank: int, world: int, folder: str, depth: int) -> tuple[Any, int]:
    """The batch behind five steps of a pipeline by the position that the loader tells, and that position."""
    with loader(Path(folder)) as found:
        found.load_state_dict({**found.state_dict(), "step": 2})
        model, first = Sum(found), found.step
        with Pipeline(model, model.embeddings.optimizer, found, batches_ahead=depth) as run:
            for _ in range(5):
                next(run)
            state = found.state_dict(first + run.steps)
        with pytest.raises(DataError, match=r"step 99; allowed: 0 to \d+, the batches that were taken"):
            found.state_dict(99)
    taken, *_ = batches(rank, world, folder=folder, state=state, steps=1)
    return taken[0], state["step"]


@pytest.mark.parametrize("depth", briefly([0, 1, 3], [3]))
def test_a_pipeline_ahead_of_its_steps_has_their_position(
    kept_world: WorldFactory, depth: int, seed: int, tmp_path: Path
) -> None:
    write(tmp_path, table(seed))
    serial = kept_world(2).run(batches, folder=str(tmp_path), steps=8)
    assert kept_world(2).run(piped, str(tmp_path), depth) == [(taken[7], 7) for taken, *_ in serial]


def test_a_loader_without_a_process_group_and_a_state_of_another_stream(seed: int, tmp_path: Path) -> None:
    assert not dist.is_initialized()
    write(tmp_path / "data", table(seed))
    write(tmp_path / "other", table(seed + 1))
    with loader(tmp_path / "data") as found:
        assert [facts.name for facts in found.tables] == ["user", "seen", "city"]
        first = next(iter(found))
        assert first.dense.shape == (48, found.dense_count) == (48, 2)
        assert first.sample_weights is not None
        assert len(found) == found.order.step_count - 1
        assert torch.equal(found.state_dict()["step"] * torch.ones(1), torch.ones(1))
    for changed, words in (
        ({"batch_size": 50}, "batch_size 48 in the state; allowed: 50"),
        ({"order": "time", "epochs": 1}, "stream"),
    ):
        with loader(tmp_path / "data", **changed) as other, pytest.raises(DataError, match=words):
            other.load_state_dict(found.state_dict())
    with loader(tmp_path / "other") as other, pytest.raises(DataError, match="fingerprint"):
        other.load_state_dict(found.state_dict())


def test_paths_are_texts_or_paths(seed: int, tmp_path: Path) -> None:
    write(tmp_path / "data", table(seed))
    write(tmp_path / "held", table(seed + 1))
    found = []
    for kind in (str, Path):
        data, held = (kind(tmp_path / name) for name in ("data", "held"))
        for paths, evaluation in ((data, held), ([data], [held])):
            with StreamLoader(
                paths, schema=tmp_path / "data" / "schema.toml", order="files", batch_size=48, evaluation=evaluation
            ) as one:
                found.append([batch.labels.tolist() for batch in one])
    assert found == [found[0]] * 4
    with pytest.raises(ConfigError, match="evaluation is a int; allowed: paths of files"):
        loader(tmp_path / "data", evaluation=7)


def test_a_program_sees_where_windows_end(seed: int, tmp_path: Path) -> None:
    """Each window is evaluated before it is trained on, and has all of its rows."""
    rows = table(seed)
    write(tmp_path / "data", rows)
    users = rows["user"].to_pylist()

    def users_of(batch: Batch) -> list[int]:
        # Row 0 stands for values that were not seen.
        return [int(user) for user in batch.values[: len(batch.labels)]]

    settings = StreamSettings(order="time", window_s=7200.0)
    names, trained = [], []
    with loader(tmp_path / "data", order=settings, batch_size=40, epochs=1) as found:
        for batch in found:
            trained += users_of(batch)
            if found.evaluates:
                names.append(found.window)
                evaluated = [user for held in found.evaluation() for user in users_of(held)]
                assert sorted(evaluated) == sorted(users[len(trained) : 200 * (1 + len(names))])
        assert trained == users[: len(trained)]
        assert len(trained) == 1000
    assert names == [f"1970-01-01T{hour:02}:00:00" for hour in (2, 4, 6, 8, 10)]
    with loader(tmp_path / "data") as found:
        ends = [found.step for batch in found if found.evaluates]
        assert (ends, found.window) == ([22, 44], "")


def test_a_second_loop_says_how_to_go_on(seed: int, tmp_path: Path) -> None:
    write(tmp_path / "data", table(seed))
    with loader(tmp_path / "data", epochs=1) as found:
        begin = found.state_dict()
        assert len([batch for batch in zip(found, range(5), strict=False)]) == 5
        # A loop that was left goes on, and a position at the end is no mistake.
        count = len(list(found))
        end = found.state_dict()
        with pytest.raises(DataError, match=r"22 batches, which are all, were taken; allowed: StreamLoader\(epochs=\)"):
            iter(found)
        found.load_state_dict(begin)
        assert len(list(found)) == 22 == count + 6
        found.load_state_dict(end)
        assert list(found) == []


def test_a_data_loader_around_it_is_refused(seed: int, tmp_path: Path) -> None:
    write(tmp_path / "data", table(seed))
    with loader(tmp_path / "data") as found:
        for options in ({}, {"batch_size": None}, {"batch_size": 4}):
            around: Any = DataLoader(found, **options)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"it makes whole batches .*; allowed: to iterate over it, without a D"):
                next(iter(around))


class Around(IterableDataset[Any]):
    """What a program makes of a loader for a DataLoader."""

    def __init__(self, found: StreamLoader) -> None:
        self.found = found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)


def test_a_worker_of_a_data_loader_is_told_that_it_cannot_read(seed: int, tmp_path: Path) -> None:
    """It is a fork without the thread that reads, and would wait for ever."""
    write(tmp_path / "data", table(seed))
    with (
        loader(tmp_path / "data") as found,
        pytest.raises(DataError, match="a StreamLoader in a worker of a DataLoader; allowed: to loop over it in the"),
    ):
        next(iter(DataLoader(Around(found), batch_size=None, num_workers=1, timeout=30)))
    # A worker that is spawned gets a pickle.
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled; allowed: state_dict"):
            copied(found)


@pytest.mark.parametrize("step", [-1, 1000, 1.0, None])
def test_a_state_behind_the_stream_is_refused(seed: int, tmp_path: Path, step: object) -> None:
    write(tmp_path / "data", table(seed))
    with (
        loader(tmp_path / "data") as found,
        pytest.raises(DataError, match=rf"step {step} in the state; allowed: 0 to [1-9]"),
    ):
        found.load_state_dict(found.state_dict() | {"step": step})


def test_an_iterator_is_told_to_be_spooled() -> None:
    for data in (iter([{"label": 1}]), [{"label": 1}], {"label": [1]}, []):
        with pytest.raises(
            ConfigError, match=r"allowed: paths of files, .*; sennit\.runtime\.stream\.spool writes files"
        ):
            StreamLoader(data, batch_size=4)  # type: ignore[arg-type]


TEXTS = [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.binary(), pa.binary_view()]
# As Arrow files of polars have categories.
VIEWED = pa.dictionary(pa.uint32(), pa.string_view())


def array(values: Any, kind: Any) -> Any:
    """pyarrow 26.0 does not make dictionaries of views itself."""
    if kind != VIEWED:
        return pa.array(values, kind)
    plain = pa.array(values, pa.dictionary(pa.uint32(), pa.string()))
    return pa.DictionaryArray.from_arrays(plain.indices, plain.dictionary.cast(pa.string_view()))


@pytest.mark.parametrize("order", ["shuffled", "files"])
@pytest.mark.parametrize("in_lists", [False, True])
def test_rows_are_picked_whatever_type_text_has(order: str, in_lists: bool, tmp_path: Path) -> None:
    """One of every ten rows is held back, so the others are picked from record batches."""
    words = [f"word {row % 7}" for row in range(90)]

    def batches_of(kind: Any) -> list[Any]:
        column = array([text for word in words for text in (word, word[-1])], kind) if in_lists else array(words, kind)
        if in_lists:
            column = pa.ListArray.from_arrays(pa.array(range(0, 181, 2), pa.int32()), column)
        rows = pa.table({"clicked": [row % 2 for row in range(90)], "word": column, "at": range(90)})
        with pa.ipc.new_file(str(tmp_path / "rows.arrow"), rows.schema) as file:
            file.write_table(rows, max_chunksize=30)
        schema = parse_schema({"label": "clicked", "sparse": {"word": {"encode": "hash", "rows": 50}}})
        with StreamLoader(
            str(tmp_path / "rows.arrow"), schema=schema, order=order, batch_size=16, split="random"
        ) as loader:
            return [batch.values.tolist() for batch in (*loader, *loader.evaluation())]

    plain = batches_of(pa.string())
    assert len(plain) > 5
    for kind in TEXTS if in_lists else (*TEXTS, VIEWED):
        assert batches_of(kind) == plain, kind
