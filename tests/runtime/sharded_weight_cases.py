# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type"
"""Weights of ids that require gradients: run on each rank by test_sharded_weights.py."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import TABLES, features, own_part, rows_of  # type: ignore[import-not-found]
from torch import Tensor

from sennit.runtime.kernels import Bounds, Optimizer, OptimizerSpec, Pooling
from sennit.runtime.sharded import Features, PeerInputError, ShardedEmbeddingBags, Table, TableStore
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError


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
    tables = TABLES
    if trains:
        train = {"row_shards": 1, "column_shards": 1, "train_rank": 3}
        tables = tuple(
            dataclasses.replace(table, **train) if table.name in ("user", "genre") else table for table in tables
        )
    lossless = Codec(kind=CodecKind.LOSSLESS) if codec else None
    module = ShardedEmbeddingBags(
        tables,
        rate=0.1,
        placement=placement,
        gradients="sum",
        implementation_name=implementation,
        codec=lossless,
        store=None if folder is None else TableStore(folder=Path(folder), memory_bytes=200_000),
    )
    samples = 27
    for step in range(3):
        part = own_part(features(step, samples, weighted=True), *module.slices.samples(rank, samples))
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
    module = ShardedEmbeddingBags([table], rate=0.5, placement=placement, gradients=gradients)
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
    module = ShardedEmbeddingBags([Table(name="user", rows=10, dim=4)], rate=1)
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
