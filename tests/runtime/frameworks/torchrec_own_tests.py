# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined"
"""Our collections in the place of TorchRec's (torchrec_adapter.py): run in a group of one by
test_collections.py.

TorchRec does not install its unit tests of embedding collections. `own_tests` runs them from a clone. Of its
`test_embedding_modules.py` these need nothing that only TorchRec's modules have:

- EmbeddingBagCollectionTest: test_unweighted, test_shared_tables, test_shared_features, test_weighted,
  test_duplicate_config_name_fails
- EmbeddingCollectionTest: test_forward, test_indices, test_duplicate_config_name_fails

The others want `torch.jit.script`, `torch.fx` traces, the device "meta", or `embedding_bags[...].weight`.
"""

from __future__ import annotations

import importlib.util
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

THEIRS = {
    "EmbeddingBagCollectionTest": (
        "test_unweighted",
        "test_shared_tables",
        "test_shared_features",
        "test_weighted",
        "test_duplicate_config_name_fails",
    ),
    "EmbeddingCollectionTest": ("test_forward", "test_indices", "test_duplicate_config_name_fails"),
}


@contextmanager
def alone(folder: str) -> Iterator[None]:
    """A group of one rank. What TorchRec warns of is its own."""
    store = dist.FileStore(str(Path(folder) / "store"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("sennit", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
        try:
            yield
        finally:
            dist.destroy_process_group()


def own_tests(rank: int, world: int, folder: str, source: str) -> list[str]:
    """The tests of TorchRec's file that passed on our collections."""
    with alone(folder):
        from tests.runtime.frameworks import torchrec_adapter

        spec = importlib.util.spec_from_file_location("torchrec_own_tests", source)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.EmbeddingBagCollection = torchrec_adapter.EmbeddingBagCollection
        module.EmbeddingCollection = torchrec_adapter.EmbeddingCollection
        passed = []
        for kind, names in THEIRS.items():
            for name in names:
                result = unittest.TestResult()
                getattr(module, kind)(name).run(result)
                assert result.testsRun == 1
                assert result.wasSuccessful(), [*result.errors, *result.failures]
                passed.append(f"{kind}.{name}")
        return passed


def beside_theirs(rank: int, world: int, folder: str) -> None:
    """The same configurations and features for TorchRec's collections and ours: the same names, sizes and numbers."""
    with alone(folder):
        from torchrec.modules import embedding_modules as theirs
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        from tests.runtime.frameworks import torchrec_adapter

        def configs(kind: Any, *tables: tuple[str, int, tuple[str, ...]], **options: Any) -> list[Any]:
            return [
                kind(name=name, num_embeddings=10, embedding_dim=dim, feature_names=list(features), **options)
                for name, dim, features in tables
            ]

        lengths = torch.tensor([2, 0, 1, 1, 1, 3, 0, 0, 2])
        values = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 9])
        weights = torch.linspace(0.1, 1, len(values))
        layouts = {
            "unshared": (("t1", 3, ("f1",)), ("t2", 4, ("f2",))),
            "shared table": (("t1", 3, ("f1", "f2")),),
            "shared feature": (("t1", 3, ("f1",)), ("t2", 4, ("f1",))),
            "all": (("t1", 4, ("f1", "f3")), ("t2", 4, ("f3", "f2"))),
        }
        for layout in layouts.values():
            for pooling, weighted in ((PoolingType.SUM, False), (PoolingType.MEAN, False), (PoolingType.SUM, True)):
                given = configs(EmbeddingBagConfig, *layout, pooling=pooling)
                keyed = KeyedJaggedTensor(["f1", "f2", "f3"], values, weights if weighted else None, lengths=lengths)
                there = theirs.EmbeddingBagCollection(given, is_weighted=weighted)
                here = torchrec_adapter.EmbeddingBagCollection(given, is_weighted=weighted)
                weight_of = {config.name: there.embedding_bags[config.name].weight for config in given}
                with torch.no_grad():
                    for held in here.sharded.held():
                        weight_of[held.name.partition("/")[0]].copy_(held.weight)
                expected, found = there(keyed), here(keyed)
                assert found.keys() == expected.keys()
                assert found.offset_per_key() == expected.offset_per_key()
                torch.testing.assert_close(found.values(), expected.values())
            given = configs(EmbeddingConfig, *((name, 4, features) for name, _, features in layout))
            keyed = KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=lengths)
            there = theirs.EmbeddingCollection(given, need_indices=True)
            sequences = torchrec_adapter.EmbeddingCollection(given, need_indices=True)
            with torch.no_grad():
                for held in sequences.sharded.held():
                    there.embeddings[held.name.partition("/")[0]].weight.copy_(held.weight)
            expected, found = there(keyed), sequences(keyed)
            assert list(found) == list(expected)
            for output, rows in expected.items():
                for part in ("values", "lengths", "weights"):
                    assert torch.equal(getattr(found[output], part)(), getattr(rows, part)()), (output, part)
        for kind, ours in (
            (EmbeddingBagConfig, torchrec_adapter.EmbeddingBagCollection),
            (EmbeddingConfig, torchrec_adapter.EmbeddingCollection),
        ):
            with pytest.raises(ValueError, match="two tables are called t1"):
                ours(configs(kind, ("t1", 3, ("f1",)), ("t1", 3, ("f2",))))
