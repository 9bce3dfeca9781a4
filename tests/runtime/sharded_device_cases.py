# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,import-not-found"
"""Sharded tables on a device: run on each rank by test_sharded_device.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import device_double
import pytest
import sharded_cases
import sharded_codec_cases
import stream_double
import torch
from device_double import OnDevice
from device_stand_in import on_device
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sennit.runtime.kernels import engine as engines
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.implementations import implementation
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.sharded import ShardedEmbeddingBags, Table, TableStore
from sennit.runtime.sharded.module import ShardedTables
from sennit.transport.errors import ConfigError, SennitError, Unsupported


class Kernels:
    """An implementation for `device_double`: the native one on the memory of its tensors."""

    device_type = device_double.DEVICE.type

    def __init__(self) -> None:
        self._native = implementation("native")

    def __getattr__(self, name: str) -> Any:
        def call(tables: Sequence[ShardMemory], batch: Batch, *given: Any, **options: Any) -> Any:
            found = getattr(self._native, name)(
                [_parts(table, device_double.host_of) for table in tables],
                _parts(batch, device_double.host_of),
                *map(device_double.host_of, given),
                **options,
            )
            if isinstance(found, list):
                return [_parts(one, OnDevice) for one in found]
            return OnDevice(found)

        return call


def _parts(whole: Any, change: Callable[[Any], Any]) -> Any:
    """A dataclass with its tensors changed."""
    fields = {one.name: getattr(whole, one.name) for one in dataclasses.fields(whole)}
    return dataclasses.replace(whole, **tree_map_only(Tensor, change, fields))


def trained_on_the_double(rank: int, world: int, **arguments: Any) -> tuple[Any, dict[str, int]]:
    """What `sharded_cases.trained` returns for tables on `device_double`, and how often its steps waited."""
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
        options = {"implementation": "reference", "device": device_double.DEVICE}
        return sharded_cases.trained(rank, world, **options, **arguments), waits


def kernels_there() -> Any:
    """The double has `Kernels`, whatever is asked for. Tables in host memory have the native ones."""

    def made(name: str, **options: Any) -> Any:
        return implementation(name, **options) if name == "native" else Kernels()

    return mock.patch.object(engines, "implementation", side_effect=made)


def loaded_elsewhere(rank: int, world: int) -> None:
    """Groups of tables, their rates and steps do not depend on homes."""
    states: list[dict[str, Any]] = []
    digests = []
    options: dict[str, Any] = {"rate": 0.1, "gradients": "sum", "device": device_double.DEVICE}
    with device_double.Device(), stream_double.streams(), kernels_there():
        for homes in ({}, {"user": "dram", "item": "dram"}):
            module = ShardedEmbeddingBags(sharded_cases.at_home(sharded_cases.TABLES, homes), **options)
            assert [len(group["tables"]) for group in module.optimizer.param_groups] == [3, 1]
            whole = sharded_cases.features(len(states), 8)
            for state in states:
                module.load_state_dict(state)
            part = sharded_cases.own_part(whole, *module.slices.samples(rank, 8))
            outputs = list(module(part).values())
            torch.autograd.backward(outputs, [vector.detach() for vector in outputs])
            states.append(module.state_dict())
            digests.append(module.digest())
        assert [state["steps"].tolist() for state in states] == [[1, 1], [2, 2]]
        module = ShardedEmbeddingBags(sharded_cases.TABLES, **options)
        module.load_state_dict(states[1])
        assert module.digest() == digests[1] != digests[0]


def coded_on_the_double(rank: int, world: int, **arguments: Any) -> Any:
    """What `sharded_codec_cases.coded` returns for tables on `device_double`."""
    with (
        device_double.Device(),
        stream_double.streams(),
        mock.patch.object(engines, "implementation", side_effect=lambda *_, **__: Kernels()),
    ):
        return sharded_codec_cases.coded(rank, world, device=device_double.DEVICE, **arguments)


def coded_on_a_gpu(rank: int, world: int, **arguments: Any) -> Any:
    return sharded_codec_cases.coded(rank, world, device=torch.device("cuda:0"), **arguments)


def trained_by_triton(rank: int, world: int, device: str, **arguments: Any) -> Any:
    """What `sharded_cases.trained` returns with Triton: on a GPU, or on the CPU in its interpreter."""
    with on_device(device == "cpu"):
        return sharded_cases.trained(rank, world, implementation="triton", device=torch.device(device), **arguments)


def refused(rank: int, world: int) -> None:
    tables = [Table(name="user", rows=8, dim=4)]
    options: dict[str, Any] = {"rate": 0.1, "device": "meta"}
    with pytest.raises(ConfigError, match=r"device: rank 0 has cpu, rank 1 has meta"):
        ShardedEmbeddingBags(tables, rate=0.1, device="meta" if rank else "cpu")
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
        options: dict[str, Any] = {"rate": 0.1, "gradients": "sum", "placement": "row_wise"}
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
        ShardedEmbeddingBags([Table(name="user", rows=8, dim=4)], rate=0.1, device="meta")
