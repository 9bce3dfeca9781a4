# SPDX-License-Identifier: Apache-2.0
# Torch's helpers for tests have no types:
# mypy: disable-error-code="no-untyped-call,attr-defined"
"""Modules of sharded tables in torch's own database of modules, under its own tests: test/test_modules.py of a clone.

Torch installs the database, and not the tests. They get each module as `ModuleInfo`, with the learning rate 0: they go
backward through one output several times, and want the same results afterwards.
"""

from __future__ import annotations

import importlib.util
import unittest
from collections.abc import Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from sennit.runtime.sharded import ShardedEmbeddingBags, ShardedEmbeddings, Table
from tests.runtime.frameworks.torchrec_own_tests import alone

REFUSED: Final = (
    "test_pickle",  # would keep one rank's rows
    "test_factory_kwargs",  # `dtype`: each table has a precision of its own
    "test_device_ctx_init",  # tables on the device "meta" have no rows to shard
    "test_memory_format",  # asks `autograd.grad` for gradients of parameters, which tables never make
)


class OneTensor(ShardedEmbeddingBags):
    """As the tests want results: a tensor."""

    def __init__(self, tables: Sequence[Table], **options: Any) -> None:
        super().__init__(tables, outputs="tensor", **options)


class Sequences(ShardedEmbeddings):
    """As the tests want results: a tuple of tensors."""

    def forward(self, features: Any, *, global_batch: int | None = None) -> tuple[Tensor, ...]:
        return tuple(super().forward(features, global_batch=global_batch).values())


def database() -> list[Any]:
    """Both modules, as torch's tests of modules take them."""
    from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput

    def inputs(info: Any, **options: Any) -> list[Any]:
        pooling = "sum" if info.module_cls is OneTensor else "none"
        tables = [Table(name=name, rows=10, dim=4, pooling=pooling) for name in ("user", "item")]
        ids = {"user": torch.arange(8), "item": torch.arange(8).flip(0)}
        return [ModuleInput(FunctionInput(tables, lr=0.0), FunctionInput(ids))]

    kinds = (OneTensor, Sequences)
    return [ModuleInfo(kind, module_inputs_func=inputs, dtypes=(torch.float32,)) for kind in kinds]


def own_tests(rank: int, world: int, folder: str, source: str) -> dict[str, str]:
    """What became of torch's tests by name: "passed", "refused" or "skipped"."""
    outcomes = {}
    with alone(folder):
        from torch.testing._internal import common_modules

        spec = importlib.util.spec_from_file_location("torch_own_tests", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch.object(common_modules, "module_db", database()):
            spec.loader.exec_module(module)
        kind: Any = module.TestModuleCPU
        for name in unittest.TestLoader().getTestCaseNames(kind):
            result = unittest.TestResult()
            kind(name).run(result)
            assert result.testsRun == 1
            if name.startswith(REFUSED):
                assert not result.wasSuccessful(), name
                outcomes[name] = "refused"
            else:
                assert result.wasSuccessful(), (name, *result.errors, *result.failures)
                outcomes[name] = "skipped" if result.skipped else "passed"
    return outcomes
