# SPDX-License-Identifier: Apache-2.0
"""Incremental saves and saves in the background: chains, damage, kills at seeded moments."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from sennit.runtime.checkpoint import dcp, reading
from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint.manifest import NAME, CheckpointError, Manifest
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.checkpoint.writing import Saver
from sennit.runtime.kernels import Optimizer, OptimizerSpec, Precision
from sennit.runtime.kernels.int8 import int8_rows
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, TableStore
from sennit.runtime.training import export_int8
from tests.extent import briefly
from tests.forked_commands import forked
from tests.runtime.world import WorldFactory

SAMPLES = 16
PREFIX = "tables."


def tables_of(placement: Any, store: str | None = None) -> ShardedEmbeddingBags:
    adam = OptimizerSpec(kind=Optimizer.ADAM)
    tables = [
        Table(name="user", rows=2000, dim=12, row_shards=8, precision=Precision.BF16),
        Table(name="item", rows=900, dim=8, column_shards=4, optimizer=adam),
        Table(name="day.of", rows=7, dim=4),
        Table(name="train", rows=3000, dim=8, train_rank=2),
    ]
    home = None if store is None else TableStore(folder=Path(store), memory_bytes=1 << 19)
    return ShardedEmbeddingBags(tables, lr=0.05, gradients="sum", placement=placement, store=home)


def train(tables: ShardedEmbeddingBags, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    own = tables.slices.own_samples(SAMPLES)
    ids = {
        table.name: (torch.rand(SAMPLES, 3, generator=generator) ** 3 * table.rows).to(torch.int64)[own]
        for table in tables.tables
    }
    found = tables(ids)
    torch.autograd.backward(list(found.values()), [vectors.detach() + 0.5 for vectors in found.values()])


def state_of(tables: ShardedEmbeddingBags) -> dict[str, Any]:
    return {f"{PREFIX}{name}": tensor for name, tensor in tables.state_dict().items()}


def about(step: int) -> Manifest:
    return Manifest(run_id="0123456789abcdef", step=step, fixed={}, free={}, code={})


def whole(tables: ShardedEmbeddingBags) -> dict[str, Any]:
    tables.track_changes()
    return state_of(tables)


def saved(
    rank: int, world: int, placement: Any, folder: str, in_background: bool, steps: int, store: str | None = None
) -> list[str]:
    """A save after each step. Returns the digests of the tables at these moments."""
    tables = tables_of(placement, store)
    tables.track_changes()
    saver = Saver(Path(folder), increments=3, in_background=in_background, digests=True)
    digests = []
    for number in range(1, steps + 1):
        train(tables, number)
        digests.append(tables.digest())
        saver.save(
            about(number),
            functools.partial(whole, tables),
            changes=lambda: {f"{PREFIX}{name}": tensor for name, tensor in tables.changes().items()},
            copied={f"{PREFIX}{name}" for name in tables.in_files},
        )
    saver.finish()
    tables.close()
    return digests


def loaded(rank: int, world: int, placement: Any, path: str) -> str:
    tables = tables_of(placement)
    train(tables, 99)
    state = state_of(tables)
    reading.load(Path(path), state)
    tables.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
    return tables.digest()


def refuses_damage(rank: int, world: int, path: str) -> str:
    """The message, which all ranks get, whichever has read the damaged file."""
    with pytest.raises(CheckpointError) as told:
        reading.load(Path(path), {"x": torch.zeros(1)})
    return str(told.value)


def fails_on_one_rank(rank: int, world: int, folder: str, in_background: bool) -> None:
    """What one rank cannot write is an error on all of them, and the next save is a whole one."""
    state = {f"shard{rank}.weight": torch.ones(100, 4), "dense": torch.ones(5)}
    saver = Saver(Path(folder), increments=9, in_background=in_background)

    def save(step: int) -> None:
        rows = torch.tensor([step])
        increment = {f"shard{rank}.weight": state[f"shard{rank}.weight"][rows], f"shard{rank}.changed_rows": rows}
        saver.save(about(step), lambda: state, changes=lambda: increment)

    def save_now(step: int) -> None:
        save(step)
        saver.finish()

    save(1)
    save_now(2)
    if rank == 1:
        # A folder where its file would be.
        (Path(folder) / "step-000000003.partial" / "__1_0.distcp").mkdir(parents=True)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(CheckpointError, match=r"step-000000003 was not written: rank 1: .*Is a directory"):
            save_now(3)
    save_now(4)
    newest = checkpoint.latest(Path(folder))
    assert newest is not None
    assert newest.name == "step-000000004"
    assert Manifest.read(newest).after == ()
    dist.barrier()


def loses_a_rank(rank: int, world: int, folder: str) -> float:
    """A rank dies while both save. The other gets the transport's error, and does not wait for the dead one's part."""
    saver = Saver(Path(folder), in_background=True, timeout_s=1000)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("sennit.runtime.checkpoint.writing._leave", lambda *_: os._exit(9))
        saver.save(about(1), lambda: {"x": torch.ones(9)})
        with pytest.raises(Exception, match=r"rank 1|closed|lost|died"):
            saver.save(about(2), lambda: {"x": torch.ones(9)})
    saver.abandon()
    assert checkpoint.latest(Path(folder)) is None
    return 0.0


def reads_alone(rank: int, world: int, path: str) -> dict[str, list[int]]:
    """Sizes of tensors, as a program without ranks sees them."""
    return {name: list(about.size) for name, about in OpenedCheckpoint(Path(path), alone=True).tensors.items()}


RUN = "0123456789abcdef"
ROWS = 100


class Run:
    """A table of which each save finds two rows changed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.saver = Saver(folder, **options)
        self.weight, self.dense = torch.zeros(ROWS, 4), torch.zeros(3)
        self.every: dict[int, Tensor] = {}

    def save(self, step: int, changed: tuple[int, ...] = (1, 2)) -> None:
        rows = torch.tensor(sorted({row * step % ROWS for row in changed}), dtype=torch.int64)
        self.weight[rows] += step
        increment = {"t.changed_rows": rows, "t.weight": self.weight[rows], "dense": self.dense}
        self.dense.fill_(step)
        self.every[step] = self.weight.clone()
        about = Manifest(run_id=RUN, step=step, fixed={}, free={}, code={})
        self.saver.save(about, self.state, changes=lambda: increment)

    def state(self) -> dict[str, Tensor]:
        return {"t.weight": self.weight, "dense": self.dense}


def read(path: Path) -> tuple[Tensor, Tensor]:
    state = {"t.weight": torch.full((ROWS, 4), torch.nan), "dense": torch.full((3,), torch.nan)}
    reading.load(path, state)
    return state["t.weight"], state["dense"]


def chains(folder: Path) -> dict[int, list[int]]:
    """The steps that each checkpoint needs."""
    found = [Manifest.read(path) for path in reversed(checkpoint.whole(folder))]
    return {about.step: [link.step for link in about.after] for about in found}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Makes a process group of this process alone."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("is_stored", "in_background"),
    briefly([(False, False), (False, True), (True, False), (True, True)], [(True, True)]),
)
def test_base_and_increments_are_the_tables_in_any_world_and_placement(
    kept_world: WorldFactory, tmp_path_factory: pytest.TempPathFactory, is_stored: bool, in_background: bool
) -> None:
    tmp_path, store = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("store")
    placement = {"user": "row_wise", "item": "column_wise", "day.of": "data_parallel", "train": "table_wise"}
    arguments: dict[str, Any] = {"folder": str(tmp_path), "in_background": in_background, "steps": 6}
    arguments["store"] = str(store) if is_stored else None
    (digests, other) = kept_world(2).run(saved, placement=placement, **arguments)
    assert digests == other
    assert chains(tmp_path) == {1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [], 6: [5]}
    for step, digest in enumerate(digests, 1):
        path = str(tmp_path / f"step-{step:09d}")
        assert kept_world(3).run(loaded, placement="row_wise", path=path) == [digest] * 3
        assert kept_world(1).run(loaded, placement="table_wise", path=path) == [digest]
    whole, part = (
        sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp"))
        for name in ("step-000000001", "step-000000002")
    )
    assert part < whole / 2
    sizes = [
        kept_world(1).run(reads_alone, path=str(tmp_path / name))[0] for name in ("step-000000001", "step-000000004")
    ]
    assert sizes[0] == sizes[1]


def test_damage_is_told_to_all_ranks(kept_world: WorldFactory, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "in_background": False, "steps": 2}
    kept_world(2).run(saved, placement="row_wise", **arguments)
    path = tmp_path / "step-000000002"
    for damaged in (tmp_path / "step-000000001" / "__1_0.distcp", path / "__0_0.distcp"):
        content = damaged.read_bytes()
        damaged.write_bytes(content[:99] + bytes([content[99] ^ 4]) + content[100:])
        for message in kept_world(2).run(refuses_damage, path=str(path)):
            assert f"checkpoint {path} cannot be read: rank " in message
            assert f"{damaged} is damaged" in message
        damaged.write_bytes(content)


@pytest.mark.parametrize("in_background", [False, True])
def test_an_error_of_one_rank_is_raised_on_all(kept_world: WorldFactory, tmp_path: Path, in_background: bool) -> None:
    kept_world(2).run(fails_on_one_rank, folder=str(tmp_path), in_background=in_background)


def test_nobody_waits_for_the_part_of_a_dead_rank(new_world: WorldFactory, tmp_path: Path) -> None:
    assert new_world(2).run(loses_a_rank, folder=str(tmp_path)) == [0.0, None]


@pytest.mark.usefixtures("group")
def test_a_flipped_bit_or_a_missing_file_anywhere_in_a_chain_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run = Run(folder, increments=5)
    for step in (1, 2, 3):
        run.save(step)
    assert chains(folder) == {1: [], 2: [1], 3: [1, 2]}
    newest = folder / "step-000000003"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == 9
    for path in files:
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 3):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match=path.parent.name):
                read(newest)
        path.unlink()
        with pytest.raises(CheckpointError, match=path.parent.name):
            read(newest)
        path.write_bytes(content)
        weight, dense = read(newest)
        assert torch.equal(weight, run.every[3])
        assert dense.tolist() == [3, 3, 3]


@pytest.mark.usefixtures("group")
def test_a_checkpoint_whose_base_is_lost_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run = Run(folder, increments=1)
    for step in (1, 2, 3, 4):
        run.save(step)
    assert chains(folder) == {1: [], 2: [1], 3: [], 4: [3]}
    shutil.rmtree(folder / "step-000000003")
    assert checkpoint.latest(folder) == folder / "step-000000002"
    with pytest.raises(CheckpointError, match=r"step-000000003, which later checkpoints need, is lost"):
        read(folder / "step-000000004")
    # Another base of that step is not the one that is needed.
    other = Run(folder)
    other.save(3, changed=(5,))
    assert checkpoint.latest(folder) == folder / "step-000000003"
    # A run whose base is lost begins another chain.
    run.save(5)
    assert chains(folder)[5] == []


@pytest.mark.usefixtures("group")
def test_a_new_base_comes_after_so_many_increments_or_so_many_bytes(tmp_path: Path) -> None:
    run = Run(tmp_path / "few", increments=2)
    for step in range(1, 6):
        run.save(step)
    assert chains(tmp_path / "few") == {1: [], 2: [1], 3: [1, 2], 4: [], 5: [4]}
    run = Run(tmp_path / "large", increments=9)
    for step in range(1, 6):
        run.save(step, changed=tuple(range(20)))
    # Rows of 16 bytes and their numbers: 480 of 1,612 bytes, then 960.
    assert chains(tmp_path / "large") == {1: [], 2: [1], 3: [1, 2], 4: [], 5: [4]}
    run.save(5)
    assert chains(tmp_path / "large")[5] == []
    run.save(6, changed=())
    assert chains(tmp_path / "large")[6] == [5]
    assert torch.equal(read(tmp_path / "large" / "step-000000006")[0], run.weight)


@pytest.mark.usefixtures("group")
def test_what_a_kept_increment_needs_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run = Run(folder, increments=2, keep=1)
    left = []
    for step in range(1, 8):
        run.save(step)
        left.append([int(entry.name[5:]) for entry in sorted(folder.iterdir())])
    assert left == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]


class Gate:
    """Holds the background thread before it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        write = dcp.Planned.write

        def held(planned: dcp.Planned) -> Any:
            assert self.is_open.wait(60)
            return write(planned)

        monkeypatch.setattr(dcp.Planned, "write", held)


@pytest.mark.usefixtures("group")
def test_a_save_in_the_background_has_the_values_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    gate = Gate(monkeypatch)
    run = Run(folder, increments=5, in_background=True)
    for step in (1, 2):
        gate.is_open.clear()
        run.save(step)
        run.weight += 0.25
        run.dense += 9
        assert run.saver.durable == (folder / "step-000000001" if step == 2 else None)
        gate.is_open.set()
        run.saver.finish()
        assert run.saver.durable == folder / f"step-{step:09d}"
        run.weight -= 0.25
        weight, dense = read(folder / f"step-{step:09d}")
        assert torch.equal(weight, run.every[step])
        assert dense.tolist() == [step] * 3


@pytest.mark.usefixtures("group")
def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    run = Run(tmp_path / "saved", in_background=True)
    run.save(1)
    opener = threading.Thread(target=gate.is_open.set)
    monkeypatch.setattr(run.saver._running, "wait_written", _after(opener.start, run.saver._running))
    run.save(2)
    assert tmp_path / "saved" / "step-000000001" in checkpoint.whole(tmp_path / "saved")
    run.saver.finish()
    opener.join()
    assert chains(tmp_path / "saved") == {1: [], 2: []}


def _after(first: Callable[[], None], running: Any) -> Callable[[], None]:
    wait = running.wait_written

    def waits() -> None:
        assert running.link is None
        first()
        wait()

    return waits


@pytest.mark.usefixtures("group")
def test_a_save_in_the_background_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    run = Run(tmp_path / "saved", in_background=True, timeout_s=0.05)
    run.save(1)
    with pytest.raises(CheckpointError, match=r"rank 0: .*this rank had not written its part after 0.05 s"):
        run.saver.finish()
    gate.is_open.set()
    assert run.saver.durable is None


@pytest.mark.usefixtures("group")
def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run = Run(folder, increments=5, in_background=True)
    run.save(1)
    run.saver.finish()
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        run.save(2)
        with pytest.raises(CheckpointError, match=r"step-000000002 was not written: rank 0: "):
            run.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)
    assert [entry.name for entry in folder.iterdir()] == ["step-000000001"]
    # Rows that changed before the failed save are in no increment, so the next save is a whole one.
    run.save(4)
    run.saver.finish()
    assert chains(folder) == {1: [], 4: []}
    assert torch.equal(read(folder / "step-000000004")[0], run.weight)


@pytest.mark.usefixtures("group")
def test_rows_that_were_changed_but_not_told_of_are_found_by_the_digest(tmp_path: Path) -> None:
    run = Run(tmp_path, increments=5, digests=True)
    run.save(1)
    run.weight[50] = 7
    run.save(2)
    with pytest.raises(CheckpointError, match=r"t.weight does not have the SHA-256 with which it was saved"):
        read(tmp_path / "step-000000002")


@pytest.mark.usefixtures("group")
def test_an_export_has_what_base_and_increments_add_up_to(tmp_path: Path) -> None:
    """Also tables that did not change since the base."""
    user, item, dense = torch.randn(ROWS, 8), torch.randn(ROWS, 8), torch.randn(3)
    key = "tables.{}/0.0.weight".format
    saver = Saver(tmp_path / "saved", increments=2)
    for step in (1, 2):
        rows = torch.tensor([3, 50])
        user[rows] *= 2
        increment = {key("user"): user[rows], "tables.user/0.0.changed_rows": rows, "dense.weight": dense}
        about = Manifest(run_id=RUN, step=step, fixed={}, free={}, code={})
        saver.save(about, lambda: {key("user"): user, key("item"): item, "dense.weight": dense}, changes=increment.copy)
    assert chains(tmp_path / "saved") == {1: [], 2: [1]}
    export_int8(tmp_path / "saved", tmp_path / "rows.pt")
    found = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert found["tables"].keys() == {"user", "item"}
    for name, table in (("user", user), ("item", item)):
        assert torch.equal(found["tables"][name], int8_rows(table))
    assert torch.equal(found["dense"]["weight"], dense)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", briefly([10, 300], [10]))
def test_no_kill_loses_what_was_reported(tmp_path: Path, count: int) -> None:
    done = forked("tests.runtime.checkpoint_kills", str(tmp_path), "15", str(count), timeout_s=60 + 2 * count)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == count
    # The kills were where they matter: in the middle of saves, and between whole ones and increments.
    assert any(answer["unfinished"] for answer in answers)
    assert {answer["rank"] for answer in answers} == {0, 1}
    assert len({answer["increments"] for answer in answers}) > 2
    assert sum(answer["reported"] for answer in answers) > count
    assert any(NAME in answer["died_at"] for answer in answers)
