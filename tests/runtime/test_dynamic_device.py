# SPDX-License-Identifier: Apache-2.0
"""Dynamic tables whose rows are on a device: every bit is that of rows in host memory.

Without a GPU their operations run on `device_double`, which fails where host and device mix, and the kernels in
Triton's interpreter. `test_dynamic_tables.py` has what is run here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.optimizers import OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, ShardSpec
from sennit.runtime.sharded import DynamicIds, Evicted, ShardedEmbeddingBags, Table
from sennit.runtime.sharded.growing import FEWEST, GrowingShards, Lines
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.shards import Shards
from sennit.transport.errors import ConfigError
from tests.extent import briefly, number
from tests.runtime import device_double, dynamic_training, stream_double, test_dynamic_tables
from tests.runtime.dynamic_training import FORMS, TABLE, store_in
from tests.runtime.test_sharded_device import kernels_there
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)
# The double takes a hundred times as long as a host.
STEPS = 10
SHORT = TABLE | {"row_shards": 2}


@contextlib.contextmanager
def double() -> Iterator[device_double.Device]:
    """Inside, tables are on `device_double` unless their module says otherwise."""
    there = {"device": device_double.DEVICE, "implementation_name": "reference"}
    with (
        device_double.Device() as device,
        stream_double.streams(),
        kernels_there(),
        mock.patch.dict(ShardedTables.__init__.__kwdefaults__, there),
    ):
        yield device


def on_double(rank: int, world: int, /, function: Callable[..., Any], *arguments: Any) -> Any:
    with double():
        return function(rank, world, *arguments)


def trained_there(rank: int, world: int, form: str, kind: str, placement: str, folder: str | None) -> Any:
    options: dict[str, Any] = {"device": device_double.DEVICE, "implementation_name": "reference"}
    with double():
        return dynamic_training.trained(rank, world, form, kind, STEPS, SHORT, placement, folder, **options)


@pytest.mark.parametrize(
    ("form", "kind", "home"),
    briefly(
        [(form, kind, home) for form in FORMS for kind in ("bags", "sequences") for home in ("hbm", "file")
         if (form, kind) != ("shared", "sequences")],
        [("lru", "bags", "file"), ("shared", "bags", "hbm"), ("sketch", "sequences", "hbm"),
         ("shared", "bags", "file")],
    ),
)  # fmt: skip
def test_one_digest_on_the_host_and_on_the_device(
    kept_world: WorldFactory, tmp_path: Path, form: str, kind: str, home: str
) -> None:
    wanted = kept_world(1).run(dynamic_training.trained, form, kind, STEPS, SHORT, "table_wise")[0]
    folder = str(tmp_path) if home == "file" else None
    found = kept_world(2).run(trained_there, form, kind, "row_wise", folder)
    assert [digest for digest, _, _ in found] == [wanted[0]] * 2
    for name in ("admitted", "evicted", "expired", "without_row"):
        assert sum(counters[name] for _, counters, _ in found) == wanted[1][name], name


@pytest.mark.parametrize(("there", "files"), [("first", False), ("second", False), ("second", True)])
def test_a_state_goes_to_a_device_and_back_and_a_move_changes_nothing(
    kept_world: WorldFactory, tmp_path: Path, there: str, files: bool
) -> None:
    restored, folder = test_dynamic_tables.restored, str(tmp_path) if files else None
    whole = kept_world(1).run(restored, None, 0, 20)[0][1]
    if there == "first":
        parts = kept_world(2).run(on_double, restored, None, 0, 11)
    else:
        parts = kept_world(2).run(restored, None, 0, 11)
    saved: dict[str, Tensor] = {}
    for (state, _), _ in parts:
        saved |= state
    if there == "second":
        found = kept_world(3).run(on_double, restored, saved, 11, 20, folder)
    else:
        found = kept_world(3).run(restored, saved, 11, 20)
    assert {digest for _, digest in found} == {whole}


def gone(rank: int, world: int, folder: str | None) -> list[tuple[int, int, list[float]]]:
    """Ids that go, with the first column and the values of their rows."""
    rules, found = DynamicIds(evicted_share=0.25, expire_after=4), list[Evicted]()
    table = Table(name="user", rows=60, dim=4, row_shards=2, column_shards=2, ids=rules, optimizer="sgd")
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", store=store_in(folder, 32_000))
    module.on_evicted(found.append)
    for step in range(12):
        ids = torch.arange(12 * step, 12 * step + 16) if step < 8 else torch.arange(4)
        module({"user": ids.view(-1, 2)})["user"].pow(2).sum().backward()
    counters = module.id_counters()["user"]
    assert min(counters["evicted"], counters["expired"]) > 0
    module.close()
    return [
        (ident, one.columns.start, row)
        for one in found
        for ident, row in zip(one.ids.tolist(), one.rows.tolist(), strict=True)
    ]


def test_rows_that_go_are_read_back_for_their_function(kept_world: WorldFactory, tmp_path: Path) -> None:
    (wanted,) = kept_world(1).run(gone, None)
    for folder in (None, str(tmp_path)):
        assert kept_world(1).run(on_double, gone, folder) == [wanted]


def gone_early(rank: int, world: int, folder: str | None) -> tuple[list[list[float]], list[list[float]]]:
    """Rows that go before the batch in which they began has a backward pass; and what it has read."""
    table = Table(name="user", rows=8, dim=4, optimizer="sgd", ids=DynamicIds(evicted_share=0.5))
    module = ShardedEmbeddingBags([table], lr=1.0, gradients="sum", store=store_in(folder, 32_000))
    found = list[Evicted]()
    module.on_evicted(found.append)
    first, second, third = (torch.arange(4 * one, 4 * one + 4).view(-1, 1) for one in range(3))
    read = module({"user": first})["user"]
    for ids in (second, third):
        module({"user": ids})["user"].sum().backward()
    return [row for one in found for row in one.rows.tolist()], read.tolist()


@pytest.mark.parametrize("home", ["hbm", "file"])
def test_rows_that_go_early_have_what_they_began_with(kept_world: WorldFactory, tmp_path: Path, home: str) -> None:
    ((gone, read),) = kept_world(1).run(on_double, gone_early, str(tmp_path) if home == "file" else None)
    assert gone == read


@pytest.mark.parametrize("rules", [DynamicIds(), DynamicIds(admit_after=3)], ids=["first", "third"])
def test_increments_have_all_that_changes(kept_world: WorldFactory, rules: DynamicIds) -> None:
    kept_world(2).run(on_double, test_dynamic_tables.changed_without_updates, rules)


def test_a_batch_that_is_refused_changes_nothing(kept_world: WorldFactory, tmp_path: Path) -> None:
    refused, unfit = test_dynamic_tables.refused, test_dynamic_tables.unfit
    wanted = kept_world(2).run(refused, 2, "exact", False)
    found = kept_world(2).run(on_double, refused, 2, "exact", True)
    assert [one[1:] for one in found] == [one[1:] for one in wanted]
    undisturbed = kept_world(2).run(unfit, str(tmp_path), False)
    found = kept_world(2).run(on_double, unfit, str(tmp_path), True)
    assert [one[:2] for one in found] == [one[:2] for one in undisturbed]
    assert len(found[0][2]) == 2


def begun_again(rank: int, world: int, folder: str) -> list[str]:
    ((_, told),) = [test_dynamic_tables.begun(rank, world, folder)]
    return told


def test_rows_of_a_refused_batch_are_read_anew(kept_world: WorldFactory, tmp_path: Path) -> None:
    """The cache on the host has not read the rows that were to begin, and what came to the device is nothing."""
    told = kept_world(1).run(on_double, begun_again, str(tmp_path))[0]
    assert told[-1] == kept_world(1).run(test_dynamic_tables.begun_in_memory)[0]


@pytest.mark.parametrize("home", ["hbm", "file"])
def test_a_gradient_of_an_id_that_has_gone_reaches_no_other(
    kept_world: WorldFactory, tmp_path: Path, home: str
) -> None:
    folder = str(tmp_path) if home == "file" else None
    assert kept_world(1).run(on_double, test_dynamic_tables.late, folder)[0] == pytest.approx(1.0)


def test_a_state_may_be_loaded_in_the_middle_of_a_step(kept_world: WorldFactory) -> None:
    kept_world(1).run(on_double, test_dynamic_tables.gone_back)
    kept_world(1).run(on_double, test_dynamic_tables.stale)


def grown(rank: int, world: int) -> tuple[str, str]:
    """The digest of a table that grows between a lookup of ids without rows and its update, here and on the host."""
    found = []
    for home in ("dram", "hbm"):
        table = Table(name="user", rows=3_000, dim=4, optimizer="adam", home=home, ids=DynamicIds(admit_after=2))
        module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum")
        for step in range(4):
            first = torch.arange(700 * step, 700 * step + 300).view(-1, 1)
            held = module({"user": first})["user"]
            with module.no_sync():
                held.sum().backward()
            later = torch.arange(700 * step, 700 * step + 700)
            module({"user": later.repeat(2).view(-1, 1)})["user"].pow(2).sum().backward()
        found.append(module.digest())
    return found[0], found[1]


def test_memory_may_grow_between_a_lookup_and_its_update(kept_world: WorldFactory) -> None:
    (wanted, found) = kept_world(1).run(on_double, grown)[0]
    assert found == wanted


def accessed(rank: int, world: int, home: str) -> tuple[list[float], str]:
    """Rows that are set and got by id, of a table whose ids come on the device; and its digest."""
    rules = DynamicIds(admit_after=2, unadmitted="shared")
    table = Table(name="user", rows=300, dim=4, row_shards=2, precision="fp16", home=home, ids=rules)
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="row_wise")
    ids, values = torch.tensor([-5, 2**62, 7]), torch.arange(12.0).view(3, 4) / 8
    module["user"].set_rows(ids if rank == 0 else ids[:0], values if rank == 0 else values[:0])
    for step in range(3):
        given = torch.cat([ids, torch.arange(45) + 30 * step])[rank::world].view(-1, 1)
        module({"user": given.to(device_double.DEVICE)}, global_batch=48)["user"].sum().backward()
    return module["user"].get_rows(torch.cat([ids, torch.tensor([35, 1000])])).tolist(), module.digest()


def test_rows_are_set_and_got_by_id_and_ids_may_come_on_the_device(kept_world: WorldFactory) -> None:
    wanted = kept_world(2).run(on_double, accessed, "dram")
    assert kept_world(2).run(on_double, accessed, "hbm") == wanted
    assert wanted[0] == wanted[1]


def full(rank: int, world: int) -> tuple[list[str], list[int], str]:
    """The device has no memory for more lines, on one rank; what is told, and how many lines there were tried."""
    rows, told, tried = 4_000, [], list[int]()
    table = Table(name="user", rows=rows, dim=4, row_shards=2, optimizer="adam", ids="dynamic")
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="row_wise")
    lengthen = GrowingShards._replace

    def replace(shards: GrowingShards, number: int, name: str, count: int) -> None:
        tried.append(count)
        if rank == 1 and count > 700 and name == "state1":
            raise torch.OutOfMemoryError("no memory")
        if rank == 1 and count > 1200 and name != "weight":
            raise torch.OutOfMemoryError("no memory")
        lengthen(shards, number, name, count)

    with mock.patch.object(GrowingShards, "_replace", replace):
        for count in (300, 1100, 3000, 500):
            ids = torch.arange(10**6 * count, 10**6 * count + count)
            try:
                module({"user": ids[rank::world].view(-1, 1)}, global_batch=count)["user"].sum().backward()
            except ConfigError as error:
                told.append(str(error))
    return told, tried, module.digest()


def there_alone(rank: int, world: int) -> str:
    """What `full` trains."""
    table = Table(name="user", rows=4_000, dim=4, row_shards=2, optimizer="adam", ids="dynamic")
    module = ShardedEmbeddingBags([table], lr=0.1, gradients="sum", placement="row_wise")
    for count in (300, 1100, 500):
        ids = torch.arange(10**6 * count, 10**6 * count + count)
        module({"user": ids[rank::world].view(-1, 1)}, global_batch=count)["user"].sum().backward()
    return module.digest()


def test_a_device_that_is_full_refuses_a_batch_on_all_ranks(kept_world: WorldFactory) -> None:
    found = kept_world(2).run(on_double, full)
    assert found[0][0] == found[1][0]
    (told,) = found[0][0]
    assert "shard user/1.0 has " in told
    assert "no memory there for" in told
    assert {digest for _, _, digest in found} == set(kept_world(2).run(there_alone))


def test_lines_are_those_of_rows(rng: Any) -> None:
    """Any order of growth: each row has one line, and no line moves."""
    for _ in range(number(20)):
        others = int(rng.integers(1, 2_000))
        lines = Lines(others, others + 3_000)
        line_of: dict[int, int] = {}
        for _ in range(12):
            low, high = (0, others) if rng.random() < 0.6 else (others, others + 2_999)
            rows = torch.from_numpy(rng.integers(low, low + 1 + int((high - low) * rng.random()), 40))
            for begin, end in lines.missing(rows):
                stop = lines.doubled(begin, end)
                assert end <= stop <= (others if begin < others else others + 2_999)
                assert stop - begin >= min(FEWEST, (others if begin < others else others + 2_999) - begin)
                lines.add(begin, stop)
            found = lines.of(rows)
            assert lines.rows(found).equal(rows)
            assert lines.has(rows).all()
            assert not lines.missing(rows)
            for row, line in zip(rows.tolist(), found.tolist(), strict=True):
                assert line_of.setdefault(row, line) == line
        assert len(set(line_of.values())) == len(line_of)
        assert 0 not in line_of.values()
        assert len(set(lines.rows(torch.arange(lines.count)).tolist())) == lines.count


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_triton_takes_lines_that_grow(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of ids, a shared row and rows without ids: lookups and updates are those of rows that lie in order."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is not 1")
    specs = [ShardSpec(name=f"t{n}", row_count=1_000, dim=8, precision=precision, first_row=n << 20) for n in range(2)]
    optimizer, cpu = OptimizerSpec.named("adam"), torch.device("cpu")
    with_spares = [dataclasses.replace(spec, row_count=2_000) for spec in specs]
    plain = Shards(EmbeddingEngine(with_spares, optimizer, seed=3), (0, 1), (1_000, 1_000))
    there = GrowingShards(
        specs,
        optimizer,
        cpu,
        lambda own, memory: EmbeddingEngine(own, optimizer, implementation_name="triton", memory=memory, seed=3),
        (0, 1),
        (1_000, 1_000),
        (999, 1_000),
    )
    draw = torch.Generator().manual_seed(5)
    for step in range(3):
        rows = torch.randint(120 * (step + 1) ** 2, (24,), generator=draw)
        rows[::5] = 999  # Shared in one table.
        rows[1::7] = 1_000 + torch.randint(200 * step + 3, (len(rows[1::7]),), generator=draw)
        batch = Batch(
            table_of_block=(0, 1),
            bags_of_block=(4, 4),
            lengths=torch.full((8,), 3, dtype=torch.int32),
            values=rows,
            pooling=Pooling.SUM,
        )
        results = []
        for shards in (plain, there):
            announced = shards.announce(batch)
            for table, own in enumerate(torch.split(rows, 12)):
                new = torch.tensor(sorted(set(own.tolist())))
                values = (new[:, None] * torch.linspace(0.1, 1, 8) + table + step).to(torch.float32)
                shards.begin_rows(announced, table, new, values / 64)
            results.append(shards.lookup(announced))
            shards.update(announced.batch, results[-1].cos(), rate=(0.1, 0.1))
        assert results[0].equal(results[1])
    for one, other in zip(plain.held(), there.held(), strict=True):
        assert one.weight.equal(other.weight)
        assert all(state.equal(other.states[name]) for name, state in one.states.items())


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["hbm", "file"])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(new_world: WorldFactory, tmp_path: Path, form: str, home: str) -> None:
    world, folder = new_world(2), str(tmp_path) if home == "file" else None
    wanted = world.run(dynamic_training.trained, form, "bags", 20, TABLE, "row_wise")
    options: dict[str, Any] = {"device": torch.device("cuda:0"), "folder": folder}
    found = world.run(dynamic_training.trained, form, "bags", 20, TABLE, "row_wise", **options)
    assert [one[:2] for one in found] == [one[:2] for one in wanted]
