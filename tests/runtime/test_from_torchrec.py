# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined,operator"
"""TorchRec's collections are replaced in one line: against TorchRec where it is installed, and by stand-ins."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from sennit.runtime.kernels import Optimizer, Precision
from sennit.runtime.sharded import DynamicIds, KeyedVectors, PeerInputError, from_torchrec
from sennit.transport.errors import ArgumentError, Unsupported
from tests.runtime.frameworks.torchrec_beside import replaced, takes_over
from tests.runtime.frameworks.torchrec_own_tests import own_tests
from tests.runtime.world import WorldFactory

pytestmark = pytest.mark.timeout(180)


def config(name: str, *features: str, pooling: str | None = "SUM", kind: str = "FP32", **options: Any) -> Any:
    found = SimpleNamespace(name=name, num_embeddings=10, embedding_dim=4, feature_names=list(features), **options)
    found.data_type, found.init_fn = SimpleNamespace(value=kind), None
    if pooling is not None:
        found.pooling = SimpleNamespace(value=pooling)
    return found


class Collection(nn.Module):
    """A stand-in for both of TorchRec's collections."""

    def __init__(self, configs: list[Any], *, device: str = "cpu", is_weighted: bool = False) -> None:
        super().__init__()
        self.weighted = is_weighted
        if hasattr(configs[0], "pooling"):
            self.embedding_bag_configs = lambda: configs
            self.is_weighted = lambda: is_weighted
        else:
            self.embedding_configs = lambda: configs
            self.need_indices = lambda: True
        tables = {one.name: nn.Embedding(10, 4, device=device) for one in configs}
        self.embedding_bags = self.embeddings = nn.ModuleDict(tables)


class Jagged:
    """A stand-in for JaggedTensor."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self.parts = values, lengths, weights

    def values(self) -> Tensor:
        return self.parts[0]

    def lengths(self) -> Tensor:
        return self.parts[1]


class Keyed:
    """A stand-in for KeyedJaggedTensor: two ids of each sample of each key."""

    def __init__(self, ids: dict[str, Tensor], weights: Tensor | None = None) -> None:
        self._ids, self._weights = ids, weights

    def keys(self) -> list[str]:
        return list(self._ids)

    def values(self) -> Tensor:
        return torch.cat(list(self._ids.values()))

    def lengths(self) -> Tensor:
        return torch.full((len(self.values()) // 2,), 2)

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def to_dict(self) -> dict[str, Jagged]:
        return {key: Jagged(one, torch.full((len(one) // 2,), 2)) for key, one in self._ids.items()}


class Repeated(Keyed):
    """With the bag of each sample: the first one of all."""

    def stride_per_key(self) -> list[int]:
        return [len(self.lengths()) // len(self.keys())] * len(self.keys())

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor]:
        return self.keys(), torch.zeros(len(self.keys()), self.stride_per_key()[0], dtype=torch.int64)


def ids(samples: int) -> Tensor:
    return torch.arange(2 * samples) % 10


def stands_in(rank: int, world: int) -> None:
    """Rows of rank 0, its names, weights as the collection takes them; bad input is an error on all ranks."""
    torch.manual_seed(rank)
    samples = 8 // world
    for is_weighted in (False, True):
        theirs = Collection([config("t1", "f1", "f2"), config("t2", "f1", pooling="MEAN")], is_weighted=is_weighted)
        ours = from_torchrec(theirs, lr=0.1)
        first = theirs.embeddings["t1"].weight.detach() if rank == 0 else torch.empty(10, 4)
        torch.distributed.broadcast(first, 0)
        assert torch.equal(ours["t1"].get_rows(torch.arange(10)), first)
        weights = torch.full((4 * samples,), 0.5)
        given = {"f2": ids(samples), "f1": ids(samples)}
        found = ours(Keyed(given, weights))
        assert isinstance(found, KeyedVectors)
        assert found.keys() == ["f1@t1", "f2", "f1@t2"]
        pairs = first[ids(samples)].view(samples, 2, 4).sum(1)
        torch.testing.assert_close(found["f2"], pairs * 0.5 if is_weighted else pairs)
        if is_weighted:
            error, words = (ArgumentError, "ids without weights for a weighted") if rank == 0 else (PeerInputError, "0")
            with pytest.raises(error, match=words):
                ours(Keyed(given, weights if rank else None))
        repeated = ours(Repeated(given, weights))
        assert torch.equal(repeated["f2"], found["f2"][:1].expand(samples, 4))
        sent = ours.send(Keyed(given, weights))
        assert torch.equal(ours(sent)["f2"], found["f2"])
    theirs = Collection([config("t1", "f1", "f2", pooling=None), config("t2", "f1", pooling=None)])
    rows = from_torchrec(theirs, lr=0.1)
    sequences = rows(Keyed({"f1": ids(samples), "f2": ids(samples)}))
    assert rows.embedding_names_by_table() == [["f1@t1", "f2"], ["f1@t2"]]
    assert (rows.embedding_dim(), rows.need_indices(), list(sequences)) == (4, True, ["f1@t1", "f2", "f1@t2"])
    values, lengths, of_ids = sequences["f2"].parts
    assert torch.equal(values, rows["t1"].get_rows(ids(samples)))
    assert (lengths.tolist(), of_ids.tolist()) == ([2] * samples, ids(samples).tolist())
    # As TorchRec's, which gives the rows of each bag.
    assert torch.equal(rows(Repeated({"f1": ids(samples), "f2": ids(samples)}))["f2"].values(), values)
    with pytest.raises(ArgumentError, match="ids are a dict; allowed: a KeyedJaggedTensor"):
        rows({"f1": ids(samples), "f2": ids(samples)})


def settings(rank: int, world: int) -> None:
    """Data types, optimizers that run in the backward pass, rows on no device, and what is not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch, about its own scripts.
        from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    theirs = Collection([config("t1", "f1", kind="FP16"), config("t2", "f2", kind="BF16")])
    for name, kind, options in (
        ("t1", torch.optim.SGD, {"lr": 0.25, "weight_decay": 0.5}),
        ("t2", torch.optim.Adam, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-3}),
    ):
        apply_optimizer_in_backward(kind, theirs.embeddings[name].parameters(), options)
    ours = from_torchrec(theirs, row_shards=2, column_shards=2)
    first, second = ours.tables
    assert (ours["t1"].lr, ours["t2"].lr) == (0.25, 0.5)
    assert (first.optimizer.kind, first.optimizer.weight_decay) == (Optimizer.SGD, 0.5)
    assert (second.optimizer.kind, second.optimizer.beta1, second.optimizer.epsilon) == (Optimizer.ADAM, 0.5, 1e-3)
    assert (first.precision, second.precision) == (Precision.FP16, Precision.BF16)
    assert (first.row_shards, second.column_shards) == (2, 2)
    named = from_torchrec(theirs, lr=2.0, optimizer="adagrad")
    assert (named["t1"].lr, named.tables[0].optimizer.kind) == (2, Optimizer.ADAGRAD)
    filled = config("t1", "f1")
    filled.init_fn = lambda rows: rows.normal_()
    before = torch.random.get_rng_state()
    drawn = from_torchrec(Collection([filled], device="meta"), lr=1.0)["t1"].get_rows(torch.arange(10))
    assert torch.equal(torch.random.get_rng_state(), before)
    again = from_torchrec(Collection([filled], device="meta"), lr=1.0, seed=1)["t1"].get_rows(torch.arange(10))
    assert not torch.equal(drawn, again)
    both = Collection([config("t1", "f1"), config("t2", "f2")])
    mixed = from_torchrec(both, lr=1.0, ids={"t2": DynamicIds(admit_after=2)}, row_shards=2)
    assert [table.ids for table in mixed.tables] == [None, DynamicIds(admit_after=2)]
    assert torch.equal(mixed["t1"].get_rows(torch.arange(10)), both.embeddings["t1"].weight.detach())
    assert mixed["t2"].get_rows(torch.tensor([2**62, -1])).abs().max() > 0
    dynamic = from_torchrec(both, lr=1.0, ids="dynamic")
    found = dynamic(Keyed({"f1": torch.tensor([7, -(2**60)]), "f2": torch.tensor([2**40, 3])}))
    found["f1"].sum().backward()
    assert {name: counts["used"] for name, counts in dynamic.id_counters().items()} == {"t1": 2, "t2": 2}
    with pytest.raises(ArgumentError, match="ids of table t3; allowed: t1, t2"):
        from_torchrec(both, lr=1.0, ids={"t3": "dynamic"})
    moving = Collection([config("t1", "f1")])
    apply_optimizer_in_backward(torch.optim.SGD, moving.parameters(), {"lr": 0.25, "momentum": 0.5, "nesterov": True})
    spec = from_torchrec(moving).tables[0].optimizer
    assert (spec.momentum, spec.nesterov) == (0.5, True)
    rising = Collection([config("t1", "f1")])
    apply_optimizer_in_backward(torch.optim.SGD, rising.parameters(), {"lr": 0.25, "maximize": True})
    other = Collection([config("t1", "f1")])
    apply_optimizer_in_backward(torch.optim.Rprop, other.parameters(), {"lr": 0.25})
    for wrong, error, words in (
        (nn.Linear(2, 2), ArgumentError, "a collection of type Linear; allowed: an EmbeddingBagCollection or"),
        (Collection([config("t1", "f1")]), ArgumentError, "no lr for table t1, and none from apply_optimizer"),
        (Collection([config("t1", "f1", kind="INT8")]), Unsupported, "table t1 of data type INT8: allowed: FP32"),
        (rising, Unsupported, "table t1 with optimizer SGD with maximize: allowed: SGD, Adagrad"),
        (other, Unsupported, "table t1 with optimizer Rprop: allowed"),
    ):
        with pytest.raises(error, match=words):
            from_torchrec(wrong)


def test_what_looks_like_a_collection_is_replaced(kept_world: WorldFactory) -> None:
    kept_world(2).run(stands_in)


def test_settings_of_a_collection_are_taken_over(kept_world: WorldFactory) -> None:
    kept_world(1).run(settings)


KINDS = ("sum", "mean", "weighted", "fp16", "sequences")


@pytest.mark.parametrize("kind", KINDS)
def test_torchrecs_collections_and_ours_train_alike(kept_world: WorldFactory, kind: str) -> None:
    need_torchrec()
    kept_world(2).run(replaced, kind=kind)


def test_a_torchrec_model_takes_ours(kept_world: WorldFactory) -> None:
    need_torchrec()
    kept_world(2).run(takes_over)


def test_torchrecs_own_tests_of_collections(new_world: WorldFactory, tmp_path: Path) -> None:
    """TORCHREC_TESTS: torchrec/modules/tests/test_embedding_modules.py of a clone. No package has it."""
    need_torchrec()
    if "TORCHREC_TESTS" not in os.environ:
        pytest.skip("TORCHREC_TESTS does not name TorchRec's test_embedding_modules.py, which it does not install")
    source = str(Path(os.environ["TORCHREC_TESTS"]).resolve())
    passed = new_world(1, backend="").run(own_tests, folder=str(tmp_path), source=source)
    assert len(passed[0]) == 8


def need_torchrec() -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("the package torchrec is not installed: make frameworks")
