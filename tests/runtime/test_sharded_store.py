# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call"
"""Sharded tables in files and as tensor trains: the same bits as in memory, in every world and placement."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from sennit.runtime.kernels import Optimizer, OptimizerSpec, Precision
from sennit.runtime.memory.cache import LOCATION_BYTES, NOTE_BYTES, WAYS
from sennit.runtime.memory.layout import RowPart, StoreLayout
from sennit.runtime.pipeline import Pipeline
from sennit.runtime.sharded import Features, Home, ShardedEmbeddingBags, Table, TableStore, place
from sennit.runtime.sharded.files import TableFiles, divided
from sennit.transport.errors import ArgumentError, ConfigError, DeviceError, SennitError
from tests.extent import briefly
from tests.runtime.sharded_training import TABLES, at_home, features, own_part, trained
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
SAMPLES = 27
LARGE = (2, 4)
"""Numbers of batches."""


def made(
    folder: Path | None,
    placement: str = "row_wise",
    memory_bytes: int = 300_000,
    homes: dict[str, str] | None = None,
) -> ShardedEmbeddingBags:
    """Tables of all precisions, one of them a tensor train; in files where there is a `folder`, but for `homes`."""
    train = dataclasses.replace(TABLES[2], row_shards=1, column_shards=1, train_rank=2)
    store = None if folder is None else TableStore(folder=folder, memory_bytes=memory_bytes)
    tables = at_home((*TABLES[:2], train, TABLES[3]), homes or {})
    return ShardedEmbeddingBags(tables, lr=0.1, gradients="sum", placement=placement, store=store)


def part_of_step(module: ShardedEmbeddingBags, number: int) -> Features:
    part: Features = own_part(features(number, SAMPLES), *module.slices.samples(module.slices.rank, SAMPLES))
    return part


def step(module: ShardedEmbeddingBags, number: int) -> None:
    outputs = list(module(part_of_step(module, number), global_batch=SAMPLES).values())
    torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])


def saved(rank: int, world: int, folder: str, checkpoint: str, rows: str | None) -> str:
    """A checkpoint after a step. Returns the digest of another step."""
    module = made(None if rows is None else Path(folder) / rows)
    step(module, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save({"tables": module.state_dict()}, checkpoint_id=checkpoint)
    step(module, 1)
    digest = module.digest()
    module.close()
    return digest


def resumed(rank: int, world: int, folder: str, checkpoint: str, rows: str | None, homes: dict[str, str] | None) -> str:
    """Goes on from the checkpoint with another placement. A step before must leave nothing behind."""
    module = made(None if rows is None else Path(folder) / rows, placement="column_wise", homes=homes)
    step(module, 5)
    state = {"tables": module.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, checkpoint_id=checkpoint)
    module.load_state_dict(state["tables"])
    step(module, 1)
    digest = module.digest()
    module.close()
    return digest


def initial(rank: int, world: int, folder: str) -> list[str]:
    """Digests of new tables in memory and in files."""
    tables = [
        Table(name="user", rows=70_001, dim=3, row_shards=2, column_shards=3, precision=Precision.BF16),
        Table(name="item", rows=70_002, dim=1),
    ]
    store = TableStore(folder=Path(folder), memory_bytes=1 << 21)
    modules = [ShardedEmbeddingBags(tables, lr=1, store=home) for home in (None, store)]
    return [module.digest() for module in modules]


def changes(rank: int, world: int, folder: str) -> None:
    found = []
    for home, homes in ((None, None), (Path(folder), None), (Path(folder), {"item": "dram", "city": "dram"})):
        module = made(home, homes=homes)
        step(module, 0)
        module.track_changes()
        step(module, 1)
        found.append((module.changed_rows(clear=False), module.changes()))
    (in_memory, changed), *others = found
    for in_files, of_files in others:
        assert in_memory.keys() == in_files.keys()
        assert all(torch.equal(rows, in_files[name]) for name, rows in in_memory.items())
        assert changed.keys() == of_files.keys()
        assert all(torch.equal(values, of_files[name]) for name, values in changed.items())
    assert 0 < len(in_memory["user/1.1"]) < 125
    module.load_state_dict(module.state_dict())
    assert len(module.changed_rows()["user/1.1"]) == 125


def homeless(rank: int, world: int, folder: str) -> None:
    """Nothing is made: neither files nor tables."""
    table = Table(name="user", rows=50, dim=4)
    store = TableStore(folder=Path(folder), memory_bytes=50_000)
    for home, options, message in (
        (Home.FILE, {}, r"^table user: home file without a table store; allowed: dram$"),
        (Home.HBM, {"store": store}, r"^table user: home hbm with tables on cpu; allowed: dram$"),
        (
            Home.FILE,
            {"store": store, "placement": "data_parallel"},
            r"^table user: home file with a copy on every rank \(data_parallel\); allowed: dram$",
        ),
        ([Home.FILE, Home.DRAM][rank], {"store": store}, r"table user: home: rank 0 has file, rank 1 has dram"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardedEmbeddingBags([dataclasses.replace(table, home=home)], lr=1, **options)
    with pytest.raises(ConfigError, match="table user: home file with a train_rank; allowed: dram, hbm"):
        dataclasses.replace(table, train_rank=2, home=Home.FILE)
    assert dataclasses.replace(table, home="file").home is Home.FILE  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="table user: home disk; allowed: file, dram, hbm"):
        dataclasses.replace(table, home="disk")  # type: ignore[arg-type]


def moves(rank: int, world: int, folder: str, homes: dict[str, str] | None) -> None:
    """There and back, between steps, beside a module in memory. A move for which a disk is too full changes nothing."""
    module, other = made(Path(folder), homes=homes), made(None)
    spread = {"item": "data_parallel", "user": "row_wise"}
    placements: list[str | dict[str, str]] = ["column_wise", spread, spread, "row_wise"]
    for number, placement in enumerate(placements):
        for one in (module, other):
            step(one, number)
        found = place(module.tables, world, placement)
        assert (module.move(found) > 0) == (number != 2)
        assert module.digest() == other.digest()
        assert module.batches_ahead == (module.in_files != frozenset())
    before = module.placement
    if homes is None:
        sent = module.send(part_of_step(module, 4), global_batch=SAMPLES)
        with pytest.raises(ArgumentError, match="1 batches were sent and are not done"):
            module.move(place(module.tables, world, "column_wise"))
        module.drop(sent)
        fails = mock.patch.object(TableFiles, "create", side_effect=DeviceError("no space left"))
        expected = pytest.raises(DeviceError if rank else SennitError, match="no space left")
        with fails if rank else contextlib.nullcontext(), expected:
            module.move(place(module.tables, world, "column_wise"))
    assert module.placement is before
    for one in (module, other):
        step(one, 4)
    assert module.digest() == other.digest()
    module.close()
    assert not list(Path(folder).iterdir())


def misused(rank: int, world: int, folder: str) -> None:
    sgd = OptimizerSpec(kind=Optimizer.SGD)
    table = Table(name="user", rows=5000, dim=4, row_shards=2, optimizer=sgd)
    store = TableStore(folder=Path(folder), memory_bytes=50_000)
    module = ShardedEmbeddingBags([table], lr=1, placement="row_wise", store=store)
    # Another module in the same folder, of which the second rank has nothing.
    other = ShardedEmbeddingBags([Table(name="one", rows=10, dim=2)], lr=1, store=store)
    assert module.batches_ahead == other.batches_ahead == 1
    ids = {"user": torch.arange(400).view(8, 50) + 5 * rank}
    before = module.digest()
    for _ in range(20):  # Together more rows than lines: those of forgotten batches may be evicted.
        ids["user"] = (ids["user"] + 200) % 5000
        module.send(ids)
        module(ids)
    assert module.digest() == before
    sent = module.send(ids)
    with pytest.raises(ArgumentError, match="1 batches were sent and are not done; allowed: none, drop them"):
        module.load_state_dict(module.state_dict())
    module.drop(sent)
    module.load_state_dict(module.state_dict())
    assert module.digest() == before
    found = module(ids)["user"]
    with pytest.raises(ArgumentError, match="half way through an update"):
        module.digest()
    found.sum().backward(retain_graph=True)
    with pytest.raises(ArgumentError, match="a second backward pass, but rows are in files"):
        found.sum().backward()
    del found
    assert module.digest() != before
    assert module.cache_counters()["evictions"] == 0  # Files are new since `load_state_dict`.
    with pytest.raises(ConfigError, match=r"rank 0 has 50000 B .*: user/0.0 \(2500 rows\): a batch needs 2500 rows"):
        module({"user": torch.arange(2500).view(1, -1).expand(8, -1) + 2500 * rank})
    unused = other.digest()
    other({"one": torch.arange(8)})["one"].sum().backward()
    assert other.digest() != unused
    assert bool(other.cache_counters()) == (rank == 0)
    for closed in (module, module, other):
        closed.close()
    assert not list(Path(folder).iterdir())


class Vectors(torch.nn.Module):
    """Sums of bags of two tables in shards, of which rank 1 has too little memory for large batches."""

    def __init__(self, rank: int, folder: str | None) -> None:
        super().__init__()
        memory_bytes = 36_000 if rank == 1 else 400_000
        store = None if folder is None else TableStore(folder=Path(folder), memory_bytes=memory_bytes)
        tables = [Table(name="user", rows=6000, dim=4, row_shards=2), Table(name="item", rows=40, dim=4, row_shards=2)]
        self.tables = ShardedEmbeddingBags(tables, lr=0.1, gradients="sum", placement="row_wise", store=store)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        found = self.tables(ids)
        loss: Tensor = sum((vectors.square() + vectors).sum() for vectors in (found["user"], found["item"]))
        return loss


def ids_of_batch(number: int, own: slice) -> dict[str, Tensor]:
    """Eight samples. Those of `LARGE` have more rows than the memory of rank 1."""
    generator = torch.Generator().manual_seed(number)
    count = 400 if number in LARGE else 10
    users = torch.randint(0, 6000, (8, count), generator=generator)
    return {"user": users[own], "item": torch.randint(0, 40, (8, 2), generator=generator)[own]}


def unfit(rank: int, world: int, folder: str | None, ahead: int | None) -> tuple[str, list[str]]:
    """Trains on the batches that fit. Returns the digest, and the errors of the others.

    `ahead`: how many batches are under way; None: no `Pipeline`, but `send` one batch ahead. Without a `folder` those
    that do not fit are left out, and errors are what they must begin with.
    """
    model = Vectors(rank, folder)
    own = model.tables.slices.own_samples(8)
    if folder is None:
        batches = [ids_of_batch(number, own) for number in range(8) if number not in LARGE]
    else:
        batches = [ids_of_batch(number, own) for number in range(8)]
    told = []
    if ahead is None:
        sent = [model.tables.send(batch) for batch in batches[:1]]
        for number, batch in enumerate(batches):
            sent += [model.tables.send(batch) for batch in batches[number + 1 : number + 2]]
            model.tables.expect(batch, sent.pop(0))
            try:
                model(batch).backward()
            except ConfigError as error:
                told.append(str(error))
    else:
        with Pipeline(model, torch.optim.SGD([torch.zeros(1)]), batches, batches_ahead=ahead) as steps:
            while True:
                try:
                    next(steps)
                except StopIteration:
                    break
                except ConfigError as error:
                    told.append(str(error))
    if folder is None:
        for number in LARGE:
            rows = {name: ids.unique() for name, ids in ids_of_batch(number, slice(0, 8)).items()}
            users, items = int((rows["user"] >= 3000).sum()), int((rows["item"] >= 20).sum())
            told.append(
                f"rank 1 has 36000 B of memory for rows: user/1.0 ({users} rows), item/1.0 ({items} rows): a batch "
                f"needs {users + items} rows, other batches hold "
            )
    digest = model.tables.digest()
    model.tables.close()
    return digest, told


def broken(rank: int, world: int, folder: str) -> list[str]:
    """The disk of rank 1 fails. Errors of the batches from then on."""
    model = Vectors(rank, folder)
    model(ids_of_batch(0, own := model.tables.slices.own_samples(8))).backward()
    if rank == 1:
        for file in Path("/proc/self/fd").iterdir():
            if os.path.realpath(file).startswith(folder):
                os.ftruncate(os.open(file, os.O_WRONLY), 0)
    told = []
    for number in (1, 3):
        try:
            model(ids_of_batch(number, own))
        except SennitError as error:
            told.append(f"{type(error).__name__}: {error}")
    model.tables.close()
    return told


def killed(rank: int, world: int, folder: str, when: str) -> None:
    """Dies while it fills a file, or while it trains on it."""

    calls = itertools.count()

    def initial(rows: Tensor, generator: torch.Generator) -> None:
        # Ranks first compare what it gives in two calls.
        if when == "filling" and next(calls) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rows.zero_()

    table = Table(name="user", rows=5000, dim=2, initial=initial)
    store = TableStore(folder=Path(folder), memory_bytes=200_000)
    module = ShardedEmbeddingBags([table], lr=1, store=store)
    module({"user": torch.arange(8)})["user"].sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)


def error(
    rank: int,
    world: int,
    folder: str,
    memory_bytes: int = 200_000,
    limited_rank: int = 0,
    file_limit_bytes: int | None = None,
    copy_limit_bytes: int | None = None,
    ids: str | None = None,
) -> str:
    """Returns the error of a step over a store, and of a checkpoint of it. Limits stand for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    table = Table(name="user", rows=5000, dim=2, row_shards=2, optimizer=OptimizerSpec(kind=Optimizer.SGD), ids=ids)
    store = TableStore(folder=Path(folder), memory_bytes=memory_bytes)
    try:
        limit(file_limit_bytes if rank == limited_rank else None)
        module = ShardedEmbeddingBags([table], lr=1, placement="row_wise", store=store)
        module({"user": torch.arange(800).view(8, 100)})["user"].sum().backward()
        limit(copy_limit_bytes)
        module.state_dict()
        module.close()
    except SennitError as told:
        return f"{type(told).__name__}: {told}"
    finally:
        limit(None)
    return "no error"


def limit(size_bytes: int | None) -> None:
    """The largest file that this process may write."""
    soft = resource.RLIM_INFINITY if size_bytes is None else size_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


KINDS = ("bags", "weighted", "sequences")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel")
MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}
HOMES = {"user": "file", "item": "dram", "genre": "dram"}
"""And `city` in a file, because there is a store."""
MEMORY_BYTES = 200_000
"""Too little for all rows on one rank, enough for three batches."""


# Files know nothing of weights.
@pytest.fixture(scope="module", params=briefly(KINDS, ["bags", "sequences"]))
def in_memory(request: pytest.FixtureRequest, kept_world: WorldFactory) -> tuple[str, Any]:
    """A kind of module, and what one rank has with all tables in memory."""
    return request.param, kept_world(1).run(trained, placement="table_wise", kind=request.param)[0]


# Bags with weights do all that bags do.
@pytest.fixture(scope="module", params=briefly(KINDS, ["weighted", "sequences"]))
def with_trains(request: pytest.FixtureRequest, kept_world: WorldFactory) -> tuple[str, Any]:
    """The same where two tables are tensor trains."""
    arguments: dict[str, Any] = {"placement": "table_wise", "kind": request.param, "trains": True}
    return request.param, kept_world(1).run(trained, **arguments)[0]


def check(found: list[Any], digest: str, outputs: list[Any]) -> None:
    assert [one for one, _ in found] == [digest] * len(found)
    assert [sample for _, samples in found for sample in samples] == outputs


RANKS_AND_AHEAD = ((1, 0), (1, 2), (2, 1), (3, 1))
IN_FILES = [
    *((*ranks_and_ahead, placement, None) for ranks_and_ahead in RANKS_AND_AHEAD for placement in (*SHARDINGS, MIXED)),
    (1, 0, "row_wise", HOMES),
    (2, 1, MIXED, HOMES),
]


@pytest.mark.parametrize(
    ("world", "ahead", "placement", "homes"),
    briefly(
        IN_FILES, [(3, 1, "grid", None), (1, 2, "row_wise", None), (1, 0, "row_wise", HOMES), (2, 1, MIXED, HOMES)]
    ),
    ids=str,
)
def test_files_have_the_bits_of_memory(
    kept_world: WorldFactory,
    in_memory: tuple[str, Any],
    tmp_path: Path,
    world: int,
    ahead: int,
    placement: Any,
    homes: dict[str, str] | None,
) -> None:
    """With `homes` some tables are in memory."""
    kind, alone = in_memory
    arguments: dict[str, Any] = {
        "placement": placement,
        "kind": kind,
        "ahead": ahead,
        "folder": str(tmp_path),
        "homes": homes,
    }
    check(kept_world(world).run(trained, memory_bytes=MEMORY_BYTES, **arguments), *alone)


def test_a_home_that_cannot_be_is_refused_by_name(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(homeless, folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "homes", briefly([None, HOMES, dict.fromkeys(MIXED, "dram")], [HOMES]), ids=["files", "some", "memory"]
)
def test_shards_move_there_and_back(kept_world: WorldFactory, tmp_path: Path, homes: dict[str, str] | None) -> None:
    """Also out of files, where a table is replicated for a while."""
    kept_world(2).run(moves, folder=str(tmp_path), homes=homes)


@pytest.mark.parametrize(
    ("placement", "then"), briefly([("row_wise", MIXED), (MIXED, "grid")], [("row_wise", MIXED)]), ids=str
)
def test_shards_in_files_move_and_no_bit_changes(
    kept_world: WorldFactory, in_memory: tuple[str, Any], tmp_path: Path, placement: Any, then: Any
) -> None:
    kind, alone = in_memory
    arguments: dict[str, Any] = {"placement": placement, "then": then, "kind": kind, "folder": str(tmp_path)}
    check(kept_world(3).run(trained, memory_bytes=MEMORY_BYTES, **arguments), *alone)


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("placement", briefly(["table_wise", "data_parallel", MIXED], [MIXED]), ids=str)
@pytest.mark.parametrize("world", briefly([1, 2, 3], [3]))
def test_tensor_trains_have_the_same_bits_in_every_world(
    kept_world: WorldFactory,
    with_trains: tuple[str, Any],
    tmp_path: Path,
    world: int,
    placement: Any,
    is_stored: bool,
) -> None:
    """Trains stay in memory where other tables are in files."""
    kind, alone = with_trains
    arguments: dict[str, Any] = {"placement": placement, "kind": kind, "trains": True}
    if is_stored:
        arguments |= {"folder": str(tmp_path), "memory_bytes": MEMORY_BYTES, "ahead": 1}
    check(kept_world(world).run(trained, **arguments), *alone)


@pytest.mark.parametrize("kind", briefly(KINDS, ["sequences"]))
def test_backward_passes_accumulate_over_files(kept_world: WorldFactory, tmp_path: Path, kind: str) -> None:
    """Rows of all passes of a step stay in memory until it is taken."""
    arguments: dict[str, Any] = {"placement": "row_wise", "kind": kind, "passes": 2}
    alone = kept_world(1).run(trained, **arguments)[0]
    for world in (1, 2):
        found = kept_world(world).run(trained, folder=str(tmp_path), memory_bytes=MEMORY_BYTES, ahead=1, **arguments)
        check(found, *alone)


@pytest.mark.parametrize(
    ("writer", "reader", "homes"),
    briefly(
        [(None, None, None), (None, "rows", None), ("rows", None, None), ("rows", "rows", None),
         ("rows", "rows", HOMES)],
        [(None, "rows", None), ("rows", None, None), ("rows", "rows", HOMES)],
    ),
    ids=str,
)  # fmt: skip
def test_checkpoints_are_the_same_from_files_and_from_memory(
    kept_world: WorldFactory, tmp_path: Path, writer: str | None, reader: str | None, homes: dict[str, str] | None
) -> None:
    """With `homes` the reader has other tables in files than the writer."""
    (tmp_path / "rows").mkdir()
    arguments: dict[str, Any] = {"folder": str(tmp_path), "checkpoint": str(tmp_path / "saved")}
    written = kept_world(2).run(saved, rows=writer, **arguments)
    for world in (1, 3):
        assert set(kept_world(world).run(resumed, rows=reader, homes=homes, **arguments)) == set(written)
    assert not list((tmp_path / "rows").iterdir())


def test_initial_rows_do_not_depend_on_how_files_are_filled(kept_world: WorldFactory, tmp_path: Path) -> None:
    """A file is filled in pieces of 65,536 rows, values are drawn in blocks of 4,096."""
    (digests,) = kept_world(1).run(initial, folder=str(tmp_path))
    assert digests[0] == digests[1]


def test_changed_rows_are_those_of_memory(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(1).run(changes, folder=str(tmp_path))


def test_wrong_use_is_refused_and_forgotten_batches_hold_nothing(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(misused, folder=str(tmp_path))


def test_files_of_killed_runs_are_replaced_and_those_in_use_are_not(kept_world: WorldFactory, tmp_path: Path) -> None:
    left = tmp_path / "rows-0-0.unfinished"
    left.write_bytes(bytes(1 << 16))
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (told,) = kept_world(1).run(error, folder=str(tmp_path))
        assert told.startswith(f"DeviceError: {left}: of another run")
        assert left.stat().st_size == 1 << 16
    assert kept_world(1).run(error, folder=str(tmp_path)) == ["no error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["filling", "in use"])
def test_a_killed_run_leaves_nothing_in_the_way(new_world: WorldFactory, tmp_path: Path, when: str) -> None:
    assert new_world(1).run(killed, folder=str(tmp_path), when=when) == [None]
    names = [file.name for file in tmp_path.iterdir()]
    assert names == (["rows-0-0.unfinished"] if when == "filling" else [])
    assert new_world(1).run(error, folder=str(tmp_path)) == ["no error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": 1000}, "ConfigError: 1000 bytes of memory for 5000 rows in 1 files; allowed: 20980 or more"),
        (
            {"memory_bytes": 23_000},
            "ConfigError: rank 0 has 23000 B of memory for rows: user/0.0 (800 rows): a batch needs 800",
        ),
        ({"file_limit_bytes": 100_000}, "DeviceError: "),
        ({"copy_limit_bytes": 10_000}, "DeviceError: "),
        ({"copy_limit_bytes": 10_000, "ids": "dynamic"}, "DeviceError: "),
    ],
    ids=str,
)
def test_mistakes_are_told(new_world: WorldFactory, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (told,) = new_world(1).run(error, folder=str(tmp_path), **settings)
    assert told.startswith(message)
    assert str(tmp_path) in told or told.startswith("ConfigError")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ids", [None, "dynamic"])
def test_a_full_disk_of_one_rank_is_told_on_all(new_world: WorldFactory, tmp_path: Path, ids: str | None) -> None:
    told = new_world(2).run(error, folder=str(tmp_path), limited_rank=1, file_limit_bytes=100_000, ids=ids)
    assert told[1].startswith(f"DeviceError: {tmp_path}")
    assert told[0] == f"SennitError: rank 1 could not make its table store: {told[1]}"


@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
def test_a_batch_that_does_not_fit_one_rank_is_told_on_all_and_changes_nothing(
    kept_world: WorldFactory, tmp_path: Path, ahead: int | None
) -> None:
    """Later batches train on, with the bits of a run that has never had the large ones."""
    ((digest, expected),) = kept_world(1).run(unfit, folder=None, ahead=0)
    found = kept_world(2).run(unfit, folder=str(tmp_path), ahead=ahead)
    assert [one for one, _ in found] == [digest] * 2
    (told, same) = (messages for _, messages in found)
    assert told == same
    assert len(told) == len(expected) == 2
    assert all(message.startswith(start) for message, start in zip(told, expected, strict=True))


def test_a_disk_that_fails_on_one_rank_is_told_on_all(new_world: WorldFactory, tmp_path: Path) -> None:
    """At the next batch, and at those after it: nobody waits for that rank."""
    others, own = new_world(2).run(broken, folder=str(tmp_path))
    assert own == own[:1] * 2
    assert own[0].startswith(("CorruptStore: ", "DeviceError: "))
    assert others == [f"SennitError: rank 1 could not read rows: {text}" for text in own]


def layout(name: str, rows: int, columns: int) -> StoreLayout:
    return StoreLayout(tables=((name, rows),), parts=(RowPart(name="weight", columns=columns),))


@pytest.mark.parametrize("memory_bytes", [70_000, 200_000, 1_000_000])
def test_memory_is_not_exceeded_and_divided_by_bytes(memory_bytes: int) -> None:
    layouts = [layout("small", 10, 4), layout("large", 10_000, 16), layout("medium", 1_000, 16)]
    found = divided(memory_bytes, layouts)
    taken = [
        sum(lines) * (one.row_bytes + NOTE_BYTES) + one.row_count * LOCATION_BYTES
        for one, lines in zip(layouts, found, strict=True)
    ]
    assert memory_bytes - 200 < sum(taken) <= memory_bytes
    assert all(lines % WAYS == 0 and lines >= WAYS and spare >= (lines + spare) // 16 for lines, spare in found)
    assert sum(found[0]) == 2 * WAYS  # All rows of the small table fit.
    assert divided(1 << 40, layouts)[1] == (18_720, 1_280)
    with pytest.raises(ConfigError, match="1000 bytes of memory for 11010 rows in 3 files; allowed: 5"):
        divided(1000, layouts)
