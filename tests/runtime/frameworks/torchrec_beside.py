# SPDX-License-Identifier: Apache-2.0
# TorchRec has no types here, and torch types its collectives thinly:
# mypy: disable-error-code="import-not-found,no-untyped-call,attr-defined"
"""TorchRec's collections and the sharded tables that stand in their place: the same results and steps of SGD."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.sharded import from_torchrec

RATE, SAMPLES = 0.1, 16
KEYS = ("f1", "f2", "f3", "unused")
LAYOUTS = {
    "unshared": (("t1", 4, ("f1",)), ("t2", 4, ("f2",))),
    "shared table": (("t1", 4, ("f1", "f2")), ("t2", 4, ("f3",))),
    "shared feature": (("t1", 4, ("f1", "f3")), ("t2", 4, ("f1",))),
}


@contextmanager
def torchrec() -> Iterator[Any]:
    """TorchRec's package, whose warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec

        yield torchrec


def keyed(rec: Any, own: slice, weighted: bool) -> Any:
    """Some samples of a global batch, as a KeyedJaggedTensor."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 5, (len(KEYS), SAMPLES), generator=generator)
    counts = lengths.sum(1).tolist()
    ids = torch.randint(0, 10, (sum(counts),), generator=generator)
    weights = torch.rand(len(ids), generator=generator)
    parts: list[tuple[Tensor, Tensor]] = []
    for of_key, numbers, of_ids in zip(lengths, ids.split(counts), weights.split(counts), strict=True):
        first, end = int(of_key[: own.start].sum()), int(of_key[: own.stop].sum())
        parts.append((numbers[first:end], of_ids[first:end]))
    return rec.KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.cat([numbers for numbers, _ in parts]),
        weights=torch.cat([of_ids for _, of_ids in parts]) if weighted else None,
        lengths=lengths[:, own].flatten(),
    )


def loss_of(found: Any) -> Tensor:
    """A sum over samples of a KeyedTensor, or over ids of JaggedTensors."""
    if isinstance(found, dict):
        return torch.stack([one.values().square().sum() for one in found.values()]).sum()
    loss: Tensor = found.values().square().sum()
    return loss


def fill(module: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))


def replaced(rank: int, world: int, kind: str) -> None:
    for layout in LAYOUTS:
        train_beside(rank, layout, kind)


def train_beside(rank: int, layout: str, kind: str) -> None:
    """Two steps. Theirs has the whole batch, and each rank of ours the samples of its slices.

    `kind`: "sum", "mean", "weighted", "fp16" or "sequences".
    """
    with torchrec() as rec:
        options = {"feature_names": [], "num_embeddings": 10}
        if kind != "sequences":
            options["pooling"] = rec.PoolingType.MEAN if kind == "mean" else rec.PoolingType.SUM
        if kind == "fp16":
            options["data_type"] = rec.types.DataType.FP16
        made = rec.EmbeddingConfig if kind == "sequences" else rec.EmbeddingBagConfig
        configs = [
            made(**options | {"name": name, "embedding_dim": dim, "feature_names": list(features)})
            for name, dim, features in LAYOUTS[layout]
        ]
        if kind == "sequences":
            theirs = rec.EmbeddingCollection(tables=configs, need_indices=True)
        else:
            theirs = rec.EmbeddingBagCollection(tables=configs, is_weighted=kind == "weighted")
        fill(theirs, rank)
        rec.optim.apply_optimizer_in_backward(torch.optim.SGD, theirs.parameters(), {"lr": RATE})
        ours = from_torchrec(theirs, placement="row_wise", row_shards=4, gradients="sum")
        fill(theirs, 0)  # Ours begin with the rows of rank 0.
        own = ours.slices.own_samples(SAMPLES)
        tolerance: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2} if kind == "fp16" else {}
        for _ in range(2):
            # An unweighted collection ignores weights.
            expected = theirs(keyed(rec, slice(0, SAMPLES), kind in ("weighted", "mean")))
            mine = keyed(rec, own, kind in ("weighted", "mean"))
            found = ours(mine)
            if kind == "sequences":
                of_rank = theirs(mine)
                assert list(found) == list(expected)
                for name, one in found.items():
                    assert type(one) is rec.JaggedTensor
                    for part in ("values", "lengths", "weights"):
                        torch.testing.assert_close(getattr(one, part)(), getattr(of_rank[name], part)())
            else:
                assert type(found) is rec.KeyedTensor
                assert found.keys() == expected.keys()
                assert found.length_per_key() == expected.length_per_key()
                torch.testing.assert_close(found.values(), expected.values()[own], **tolerance)
            loss_of(expected).backward()
            loss_of(found).backward()
            ours.check()
        for config in configs:
            rows = (theirs.embeddings if kind == "sequences" else theirs.embedding_bags)[config.name].weight
            torch.testing.assert_close(ours[config.name].get_rows(torch.arange(10)), rows.detach().float(), **tolerance)


def takes_over(rank: int, world: int) -> None:
    """What configurations say of tables is what sharded tables have, and a model asks them as it asks TorchRec's."""
    with torchrec() as rec:
        config = rec.EmbeddingBagConfig(
            name="t1", num_embeddings=10, embedding_dim=4, feature_names=["f1"], data_type=rec.types.DataType.BF16,
            init_fn=lambda rows: rows.fill_(3),
        )  # fmt: skip
        theirs = rec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        ours = from_torchrec(theirs, lr=RATE, seed=3)
        assert ours.embedding_bag_configs() == [config]
        assert not ours.is_weighted()
        assert ours.device == torch.device("cpu")
        assert ours.tables[0].precision.dtype is torch.bfloat16
        assert torch.equal(ours["t1"].get_rows(torch.arange(10)), torch.full((10, 4), 3.0))
        from torchrec.models.dlrm import DLRM

        model = DLRM(ours, 2, dense_arch_layer_sizes=[4], over_arch_layer_sizes=[4, 1])
        own = ours.slices.own_samples(SAMPLES)
        assert model(torch.randn(SAMPLES // world, 2), keyed(rec, own, False)).shape == (SAMPLES // world, 1)
        regrouped = rec.KeyedTensor.regroup([ours(keyed(rec, own, False))], [["f1"]])
        assert regrouped[0].shape == (SAMPLES // world, 4)
