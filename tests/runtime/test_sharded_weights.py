# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Weights of ids that require gradients: the same bits in every world and with every placement."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling
from sennit.runtime.sharded import Features, PeerInputError, ShardedEmbeddingBags, Table, TableStore
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError
from tests.extent import briefly
from tests.runtime.sharded_training import TABLES, features, own_part, rows_of
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(120)


def trained(
    rank: int,
    world: int,
    placement: Any,
    implementation: str = "native",
    codec: bool = False,
    trains: bool = False,
    folder: str | None = None,
) -> tuple[str, list[str]]:
    """Steps in which weights are results of parameters. Returns digests of tables, and of each sample's gradients.

    `trains`: two tables are tensor trains. `folder`: where tables are in files.
    """
    tables: tuple[Table, ...] = TABLES
    if trains:
        train: dict[str, Any] = {"row_shards": 1, "column_shards": 1, "train_rank": 3}
        tables = tuple(
            dataclasses.replace(table, **train) if table.name in ("user", "genre") else table for table in tables
        )
    lossless = Codec(kind=CodecKind.LOSSLESS) if codec else None
    module = ShardedEmbeddingBags(
        tables,
        lr=0.1,
        placement=placement,
        gradients="sum",
        implementation_name=implementation,
        codec=lossless,
        store=None if folder is None else TableStore(folder=Path(folder), memory_bytes=200_000),
    )
    samples = 27
    for step in range(3):
        part = own_part(features(step, samples, weighted=True), *module.slices.samples(rank, samples))
        assert part.weights is not None
        leaf = part.weights.clone().requires_grad_()
        outputs = list(module(dataclasses.replace(part, weights=leaf * 2), global_batch=samples).values())
        torch.autograd.backward(outputs, [vector.detach() * 0.5 + 0.25 for vector in outputs])
    assert leaf.grad is not None
    assert leaf.grad.abs().min() > 0
    digest = module.digest()
    module.close()
    found = [hashlib.sha256() for _ in range(part.lengths.shape[1])]
    for row, of_feature in zip(part.lengths, torch.split(leaf.grad, part.lengths.sum(1).tolist()), strict=True):
        for sample, gradient in zip(found, torch.split(of_feature, row.tolist()), strict=True):
            sample.update(gradient.contiguous().numpy().data)
    return digest, [sample.hexdigest()[:16] for sample in found]


def like_torch(rank: int, world: int, placement: str, gradients: str, pooling: str) -> None:
    """Gradients of weights against plain torch: features in another order share a table, and some ids are left out."""
    table = Table(
        name="user", rows=50, dim=12, row_shards=3, column_shards=4, bounds=Bounds.IGNORE, features=("bought", "seen"),
        pooling=Pooling(pooling), optimizer=OptimizerSpec(kind=Optimizer.SGD),
        initial=lambda rows, generator: rows.normal_(generator=generator),
    )  # fmt: skip
    module = ShardedEmbeddingBags([table], lr=0.5, placement=placement, gradients=gradients)
    generator = torch.Generator().manual_seed(7 + rank)
    samples, names = 8, ("seen", "bought")
    lengths = torch.randint(0, 6, (2, samples), generator=generator)
    values = torch.randint(0, 60, (int(lengths.sum()),), generator=generator)
    weights = torch.randn(len(values), generator=generator).requires_grad_()
    copy = weights.detach().clone().requires_grad_()
    rows = torch.cat((rows_of(module, world), torch.zeros(10, 12)))
    bags = torch.repeat_interleave(torch.arange(2 * samples), lengths.flatten())
    expected = torch.zeros(2 * samples, 12).index_add(0, bags, rows[values] * copy[:, None]).view(2, samples, 12)
    if pooling == "mean":
        expected = expected / lengths.clamp(min=1).unsqueeze(2)
    found = module(Features(lengths=lengths, values=values, weights=weights, names=names))
    for name, vectors in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], vectors)
    torch.cat([found[name] for name in names]).square().sum().backward()
    expected.square().sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, copy.grad)
    assert not weights.grad[values >= 50].any()


def refuses(rank: int, world: int) -> None:
    """What one rank gives in another way than the others is refused on all of them, and nothing changes."""
    module = ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], lr=1)
    before = module.digest()
    ids = {"lengths": torch.ones(1, 8, dtype=torch.int32), "values": torch.arange(8)}

    def of(kind: int) -> Features:
        return Features(**ids, weights=torch.ones(8, requires_grad=kind == 2) if kind else None)

    names = ("no weights", "weights", "weights that require gradients")
    for kinds in ((0, 1), (2, 1), (0, 2)):
        with pytest.raises(ArgumentError) as caught:
            module(of(kinds[rank]))
        assert f"{names[kinds[rank]]} on rank {rank}, {names[kinds[1 - rank]]} on rank {1 - rank}" in str(caught.value)
    wrong = Features(**ids, weights=torch.ones(7, requires_grad=True))
    with pytest.raises(ArgumentError) as caught:
        module(of(2) if rank else wrong)
    assert isinstance(caught.value, PeerInputError) == (rank == 1)
    assert module.digest() == before
    good = of(2)
    module(good)["user"].sum().backward()
    assert isinstance(good.weights, Tensor)
    assert good.weights.grad is not None


MIXED = {"user": "row_wise", "item": "data_parallel", "genre": "column_wise", "city": "table_wise"}

IN_WORLDS = [
    (*group, placement)
    for group in ((1, "shm"), (2, "shm"), (3, "udp"))
    for placement in ("row_wise", "column_wise", "grid", "data_parallel", MIXED)
]


@pytest.fixture(scope="module")
def alone(kept_world: WorldFactory) -> Any:
    return kept_world(1).run(trained, placement="table_wise")[0]


@pytest.mark.parametrize(
    ("world", "transport", "placement"),
    briefly(IN_WORLDS, [case for case in IN_WORLDS if case[0] == 3 or case == (1, "shm", "row_wise")]),
    ids=str,
)
def test_gradients_have_the_same_bits(
    kept_world: WorldFactory, alone: Any, world: int, transport: str, placement: Any
) -> None:
    digest, gradients = alone
    found = kept_world(world, transport).run(trained, placement=placement)
    assert [one for one, _ in found] == [digest] * world
    assert [sample for _, samples in found for sample in samples] == gradients


def test_neither_reference_nor_lossless_changes_a_bit(kept_world: WorldFactory, alone: Any) -> None:
    assert kept_world(1).run(trained, placement="grid", implementation="reference")[0] == alone
    assert kept_world(2).run(trained, placement="grid", codec=True)[0][0] == alone[0]


def test_tables_in_files_change_no_bit(kept_world: WorldFactory, alone: Any, tmp_path: Path) -> None:
    assert kept_world(1).run(trained, placement="grid", folder=str(tmp_path))[0] == alone


def test_tensor_trains_give_weights_gradients(kept_world: WorldFactory) -> None:
    expected = kept_world(1).run(trained, placement="table_wise", trains=True)[0]
    for placement in ("table_wise", "data_parallel"):
        found = kept_world(2).run(trained, placement=placement, trains=True)
        assert [digest for digest, _ in found] == [expected[0]] * 2
        assert [sample for _, samples in found for sample in samples] == expected[1]


@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize(("gradients", "pooling"), [("mean", "sum"), ("sum", "sum"), ("mean", "mean")])
def test_gradients_are_those_of_torch(kept_world: WorldFactory, gradients: str, pooling: str, placement: str) -> None:
    kept_world(2).run(like_torch, placement=placement, gradients=gradients, pooling=pooling)


def test_ranks_that_give_other_weights_are_refused(kept_world: WorldFactory) -> None:
    kept_world(2).run(refuses)
