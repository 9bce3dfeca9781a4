# SPDX-License-Identifier: Apache-2.0
"""Sharded tables on a device: the bits of tables on the CPU.

Without a GPU there are two halves: `device_double` finds operations that mix devices, and Triton's interpreter runs the
kernels. The tests marked `gpu` run both at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from sennit.runtime.kernels import engine as engines
from sennit.runtime.kernels.implementations import implementation
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, TableStore
from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.errors import ConfigError, SennitError, Unsupported
from tests.extent import briefly
from tests.runtime import device_double, dynamic_training, stream_double
from tests.runtime.device_kernels import Kernels
from tests.runtime.device_stand_in import on_device
from tests.runtime.sharded_training import TABLES, at_home, coded, features, own_part, trained
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def trained_on_the_double(rank: int, world: int, /, **arguments: Any) -> tuple[Any, dict[str, int]]:
    """What `trained` returns for tables on `device_double`, and how often its steps waited."""
    waits: dict[str, int] = {}
    check = ShardedTables.check

    def counted(module: ShardedTables) -> None:
        waits.update(device.waits)
        check(module)

    with (
        device_double.Device() as device,
        stream_double.streams(),
        kernels_there(),
        mock.patch.object(ShardedTables, "check", counted),
    ):
        options: dict[str, Any] = {"implementation": "reference", "device": device_double.DEVICE}
        return trained(rank, world, **options, **arguments), waits


def kernels_there() -> Any:
    """The double has `Kernels`, whatever is asked for. Tables in host memory have the native ones."""

    def made(name: str, **options: Any) -> Any:
        return implementation(name, **options) if name == "native" else Kernels()

    return mock.patch.object(engines, "implementation", side_effect=made)


def loaded_elsewhere(rank: int, world: int) -> None:
    """Groups of tables, their rates and steps do not depend on homes."""
    states: list[dict[str, Any]] = []
    digests = []
    options: dict[str, Any] = {"lr": 0.1, "gradients": "sum", "device": device_double.DEVICE}
    with device_double.Device(), stream_double.streams(), kernels_there():
        for homes in ({}, {"user": "dram", "item": "dram"}):
            module = ShardedEmbeddingBags(at_home(TABLES, homes), **options)
            assert [group["table"] for group in module.optimizer.param_groups] == [table.name for table in TABLES]
            whole = features(len(states), 8)
            for state in states:
                module.load_state_dict(state)
            part = own_part(whole, *module.slices.samples(rank, 8))
            outputs = list(module(part).values())
            torch.autograd.backward(outputs, [vector.detach() for vector in outputs])
            states.append(module.state_dict())
            digests.append(module.digest())
        assert [state["steps"].tolist() for state in states] == [[1] * len(TABLES), [2] * len(TABLES)]
        module = ShardedEmbeddingBags(TABLES, **options)
        module.load_state_dict(states[1])
        assert module.digest() == digests[1] != digests[0]


def coded_on_the_double(rank: int, world: int, /, **arguments: Any) -> Any:
    """What `coded` returns for tables on `device_double`."""
    with (
        device_double.Device(),
        stream_double.streams(),
        mock.patch.object(engines, "implementation", side_effect=lambda *_, **__: Kernels()),
    ):
        return coded(rank, world, device=device_double.DEVICE, **arguments)


def coded_on_a_gpu(rank: int, world: int, /, **arguments: Any) -> Any:
    return coded(rank, world, device=torch.device("cuda:0"), **arguments)


def trained_by_triton(rank: int, world: int, /, device: str, **arguments: Any) -> Any:
    """What `trained` returns with Triton: on a GPU, or on the CPU in its interpreter."""
    with on_device(device == "cpu"):
        return trained(rank, world, implementation="triton", device=torch.device(device), **arguments)


def refused(rank: int, world: int) -> None:
    tables = [Table(name="user", rows=8, dim=4)]
    options: dict[str, Any] = {"lr": 0.1, "device": "meta"}
    with pytest.raises(ConfigError, match=r"device: rank 0 has cpu, rank 1 has meta"):
        ShardedEmbeddingBags(tables, lr=0.1, device="meta" if rank else "cpu")
    with pytest.raises(ConfigError, match="implementation native with tables on meta"):
        ShardedEmbeddingBags(tables, implementation_name="native", **options)


def unfit_there(rank: int, world: int, folder: str) -> None:
    """Rank 1 has memory for 46 rows on its device. A larger batch changes nothing; smaller ones are trained."""
    store = TableStore(folder=Path(folder), memory_bytes=400_000, device_bytes=1_300 if rank else 400_000)
    table = Table(name="user", rows=1000, dim=4, row_shards=2)
    with (
        device_double.Device(),
        stream_double.streams(),
        kernels_there(),
    ):
        options: dict[str, Any] = {"lr": 0.1, "gradients": "sum", "placement": "row_wise"}
        module = ShardedEmbeddingBags([table], device=device_double.DEVICE, store=store, **options)
        in_memory = ShardedEmbeddingBags([table], device=device_double.DEVICE, **options)
        module.track_changes()
        in_memory.track_changes()
        for number, count in enumerate((4, 30, 3, 4, 50, 4)):
            ids = {"user": torch.arange(8 * count).view(8, count)[module.slices.own_samples(8)] * 17 % 1000}
            if count > 20:
                with pytest.raises(ConfigError, match=r"rank 1 has 400000 B .*: user/1.0 .* the device has 46 lines"):
                    module(ids)
                continue
            outputs = [one({"user": ids["user"] + number})["user"] for one in (module, in_memory)]
            for vectors in outputs:
                torch.autograd.backward(vectors, vectors.detach() * 0.5 + 0.25)
        assert module.digest() == in_memory.digest()
        found, wanted = module.changed_rows(), in_memory.changed_rows()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(rows, wanted[name]) for name, rows in found.items())
        module.load_state_dict(module.state_dict())  # The device forgets its rows.
        assert module.digest() == in_memory.digest()
        for one in (module, in_memory):
            vectors = one({"user": ids["user"][:, :4]})["user"]
            torch.autograd.backward(vectors, vectors.detach())
        assert module.digest() == in_memory.digest()
        module.close()


def missing_on_one_rank(rank: int, world: int) -> None:
    """The other rank learns of it, and does not wait."""
    expected = pytest.raises(SennitError, match="rank 1 could not make its tables on meta: Unsupported")
    if rank == 1:
        expected = pytest.raises(Unsupported, match="implementation triton")

    def fails(*_: Any, **__: Any) -> Any:
        if rank == 1:
            raise Unsupported("implementation triton", "no CUDA device")
        return mock.Mock(device_type="meta")

    with mock.patch.object(engines, "implementation", fails), expected:
        ShardedEmbeddingBags([Table(name="user", rows=8, dim=4)], lr=0.1, device="meta")


MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}
CODED = {"user": "column_wise", "item": "table_wise", "genre": "data_parallel"}
KINDS = ("bags", "weighted", "sequences")


# Tests name those that stand for the others. Bags with weights do all that bags do.
@pytest.fixture(scope="module", params=briefly(KINDS, ["weighted"]))
def alone(request: pytest.FixtureRequest, kept_world: WorldFactory) -> tuple[str, Any]:
    """A kind of module, and what one rank has with all tables on the CPU."""
    arguments: dict[str, Any] = {"placement": "table_wise", "kind": request.param}
    return request.param, kept_world(1).run(trained, **arguments)[0]


@pytest.mark.parametrize(
    ("alone", "world", "ids_there", "placement"),
    briefly(
        [(kind, *group, placement)
         for kind in KINDS for group in ((2, True), (3, False)) for placement in ("row_wise", "grid", MIXED)],
        [("weighted", 2, True, MIXED)],
    ),
    ids=str,
    indirect=["alone"],
)  # fmt: skip
def test_nothing_mixes_devices(
    kept_world: WorldFactory, alone: tuple[str, Any], world: int, ids_there: bool, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments: dict[str, Any] = {"placement": placement, "kind": kind, "ids_there": ids_there}
    found = kept_world(world).run(trained_on_the_double, **arguments)
    assert [one for (one, _), _ in found] == [digest] * world
    assert [sample for (_, samples), _ in found for sample in samples] == outputs
    for _, waits in found:
        # In a step ids, lengths and weights are read once, if they are there; and the numbers of the rows of a
        # replicated table whose sums go to others.
        read = (3 if kind == "weighted" else 2) if ids_there else 0
        assert 4 * read <= sum(waits.values()) <= 4 * (read + (placement == MIXED)), waits


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_what_travels_coded_has_the_same_bits(kept_world: WorldFactory, codec: str, kind: str) -> None:
    arguments: dict[str, Any] = {"codec": codec, "kind": kind, "placement": CODED}
    wanted = kept_world(2).run(coded, **arguments)
    assert [of_rank for of_rank, _ in kept_world(2).run(coded_on_the_double, **arguments)] == [
        of_rank for of_rank, _ in wanted
    ]


@pytest.mark.parametrize("kind", briefly(KINDS, ["sequences"]))
def test_passes_are_one_step(kept_world: WorldFactory, kind: str) -> None:
    arguments: dict[str, Any] = {"placement": MIXED, "kind": kind, "passes": 2}
    wanted = kept_world(2).run(trained, **arguments)
    assert [one for one, _ in kept_world(2).run(trained_on_the_double, **arguments)] == wanted


@pytest.mark.parametrize(
    ("alone", "world", "ahead", "passes"),
    briefly(
        [(kind, *run) for kind in KINDS for run in ((1, 2, 1), (2, 1, 1), (2, 1, 2))],
        [("weighted", 2, 1, 2)],
    ),
    indirect=["alone"],
)
def test_rows_from_files_have_the_same_bits(
    kept_world: WorldFactory,
    alone: tuple[str, Any],
    tmp_path: Path,
    world: int,
    ahead: int,
    passes: int,
) -> None:
    """On the device there are rows of a few batches only, in host memory of some more."""
    kind, (digest, outputs) = alone
    arguments: dict[str, Any] = {"placement": MIXED if world > 1 else "row_wise", "kind": kind, "passes": passes}
    if passes > 1:
        ((digest, outputs),) = kept_world(1).run(trained, **arguments)
    memory: dict[str, Any] = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000 * passes}
    found = kept_world(world).run(trained_on_the_double, ahead=ahead, **arguments, **memory)
    assert [one for (one, _), _ in found] == [digest] * world
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


@pytest.mark.parametrize(
    ("alone", "placement", "is_stored"),
    briefly(
        [(kind, *homes) for kind in KINDS for homes in (("row_wise", False), (MIXED, True))],
        [("sequences", MIXED, True)],
    ),
    ids=str,
    indirect=["alone"],
)
def test_some_tables_in_host_memory_have_the_same_bits(
    kept_world: WorldFactory, alone: tuple[str, Any], tmp_path: Path, is_stored: bool, placement: Any
) -> None:
    """Two tables with one optimizer, and one of two features: results and gradients go between host and device."""
    kind, (digest, outputs) = alone
    arguments: dict[str, Any] = {
        "placement": placement,
        "kind": kind,
        "homes": {"item": "dram", "genre": "dram", "city": "hbm"},
    }
    if is_stored:
        arguments |= {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000, "ahead": 1}
    found = kept_world(2).run(trained_on_the_double, **arguments)
    assert [one for (one, _), _ in found] == [digest] * 2
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


def dynamic_beside_the_double(rank: int, world: int, form: str, kind: str, placement: str) -> str:
    """The digest of a dynamic table in host memory, and a fixed one on `device_double`."""
    with device_double.Device(), stream_double.streams(), kernels_there():
        on_double: dict[str, Any] = {"implementation_name": "reference", "device": device_double.DEVICE}
        options = dynamic_training.TABLE | {"home": "dram"}
        return dynamic_training.trained(rank, world, form, kind, 20, options, placement, **on_double)[0]


@pytest.mark.parametrize(
    ("form", "kind"),
    briefly([(form, kind) for form in ("lru", "second") for kind in ("bags", "sequences")], [("second", "bags")]),
)
def test_dynamic_tables_beside_a_device_have_the_same_bits(kept_world: WorldFactory, form: str, kind: str) -> None:
    """Rows come and go in host memory. Ids, sums and gradients go there and back."""
    wanted = kept_world(1).run(dynamic_training.trained, form, kind, 20, dynamic_training.TABLE, "table_wise")[0][0]
    found = kept_world(2).run(dynamic_beside_the_double, form, kind, "row_wise")
    assert found == [wanted] * 2


def test_a_checkpoint_is_read_with_other_homes(kept_world: WorldFactory) -> None:
    kept_world(2).run(loaded_elsewhere)


def test_rows_from_files_move(kept_world: WorldFactory, alone: tuple[str, Any], tmp_path: Path) -> None:
    kind, (digest, outputs) = alone
    memory: dict[str, Any] = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000}
    arguments: dict[str, Any] = {"placement": "row_wise", "then": MIXED, "kind": kind}
    found = kept_world(2).run(trained_on_the_double, **arguments, **memory)
    assert [one for (one, _), _ in found] == [digest] * 2
    assert [sample for (_, samples), _ in found for sample in samples] == outputs


# The table of the kernels' cases has weights and bags, too.
@pytest.mark.parametrize("kind", briefly(KINDS, ["sequences"]))
def test_triton_has_the_bits_of_the_native_kernels(kept_world: WorldFactory, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("triton")
    arguments: dict[str, Any] = {"placement": MIXED, "kind": kind, "samples": 4, "steps": 1}
    wanted = kept_world(1).run(trained, **arguments)[0][0]
    found = kept_world(2).run(trained_by_triton, device="cpu", **arguments)
    assert [digest for digest, _ in found] == [wanted] * 2
    # Lines of a cache are rounded by the numbers of their rows.
    stored: dict[str, Any] = {"folder": str(tmp_path), "memory_bytes": 400_000}
    (found,) = kept_world(1).run(trained_by_triton, device="cpu", **arguments, **stored)
    assert found[0] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_what_travels_coded_from_a_gpu(new_world: WorldFactory, codec: str) -> None:
    world = new_world(2)
    arguments: dict[str, Any] = {"codec": codec, "placement": CODED}
    wanted = [digest for digest, _ in world.run(coded, **arguments)]
    assert [digest for digest, _ in world.run(coded_on_a_gpu, **arguments)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "grid", "data_parallel", MIXED], ids=str)
@pytest.mark.parametrize("ids_there", [False, True])
def test_on_a_gpu(
    new_world: WorldFactory, alone: tuple[str, Any], tmp_path: Path, ids_there: bool, placement: Any
) -> None:
    kind, (digest, outputs) = alone
    arguments: dict[str, Any] = {"placement": placement, "kind": kind, "ids_there": ids_there}
    memory: dict[str, Any] = {"folder": str(tmp_path), "memory_bytes": 240_000, "device_bytes": 130_000, "ahead": 1}
    world = new_world(2)
    for more in ({}, memory):
        found = world.run(trained_by_triton, device="cuda:0", **arguments, **more)
        assert [one for one, _ in found] == [digest] * 2
        assert [sample for _, samples in found for sample in samples] == outputs


def test_what_a_device_does_not_have_is_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refused)


def test_rows_that_do_not_fit_the_device_of_one_rank_are_told_on_all(kept_world: WorldFactory, tmp_path: Path) -> None:
    kept_world(2).run(unfit_there, folder=str(tmp_path))


def test_a_device_that_one_rank_lacks_is_told_to_all(kept_world: WorldFactory) -> None:
    kept_world(2).run(missing_on_one_rank)
