# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined"
"""Sharded tables in the place of TorchRec's collections, under its own tests: run in a group of one by
test_from_torchrec.py.

TorchRec does not install its unit tests of embedding collections. `own_tests` runs them from a clone. Of its
`test_embedding_modules.py` these need nothing that only TorchRec's modules have:

- EmbeddingBagCollectionTest: test_unweighted, test_shared_tables, test_shared_features, test_weighted,
  test_duplicate_config_name_fails
- EmbeddingCollectionTest: test_forward, test_indices, test_duplicate_config_name_fails

The others want `torch.jit.script`, `torch.fx` traces, the device "meta", or `embedding_bags[...].weight`.
"""

from __future__ import annotations

import functools
import importlib.util
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sennit.runtime.sharded import from_torchrec

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


def moved(kind: Any, *arguments: Any, **options: Any) -> Any:
    """Makes TorchRec's collection, and ours of it, which takes batches of any size."""
    return from_torchrec(kind(*arguments, **options), lr=0.1, slices=1)


def own_tests(rank: int, world: int, folder: str, source: str) -> list[str]:
    """The tests of TorchRec's file that passed on our collections."""
    with alone(folder):
        spec = importlib.util.spec_from_file_location("torchrec_own_tests", source)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in ("EmbeddingBagCollection", "EmbeddingCollection"):
            setattr(module, name, functools.partial(moved, getattr(module, name)))
        passed = []
        for kind, names in THEIRS.items():
            for name in names:
                result = unittest.TestResult()
                getattr(module, kind)(name).run(result)
                assert result.testsRun == 1
                assert result.wasSuccessful(), [*result.errors, *result.failures]
                passed.append(f"{kind}.{name}")
        return passed
