# SPDX-License-Identifier: Apache-2.0
"""TorchRec's own tests of its sharded tables, which it installs, over sennit: run on each rank by test_packages.py."""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType
from typing import Any

import numpy
from frameworks.over_sennit import as_under_torchrun, only_sennit  # type: ignore[import-not-found]

# TorchRec's package installs its test programs, but not a module that they import for a sharder of sequences, which no
# case here uses.
NOT_INSTALLED = "torchrec.distributed.tests.test_sequence_model"


def stand_in() -> None:
    if NOT_INSTALLED not in sys.modules:
        module = ModuleType(NOT_INSTALLED)
        module.TestEmbeddingCollectionSharder = type("NotInstalled", (), {})  # type: ignore[attr-defined]
        sys.modules[NOT_INSTALLED.rpartition(".")[0]] = ModuleType(NOT_INSTALLED.rpartition(".")[0])
        sys.modules[NOT_INSTALLED] = module


def sharding(rank: int, world: int, port: int, sharding_type: str, options: dict[str, Any]) -> None:
    """A step of TorchRec's test model, its tables in shards: predictions and weights of the model on one rank.

    `options` are those of TorchRec's `_test_sharding`; a codec is given by the names of its two precisions.
    """
    with only_sennit() as sent_bytes:
        stand_in()
        import torch
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
        from torchrec.distributed.test_utils.test_model_parallel import ModelParallelTestShared
        from torchrec.distributed.test_utils.test_sharding import SharderType, create_test_sharder

        case: Any = ModelParallelTestShared("_test_sharding")
        ModelParallelTestShared.setUp(case, backend="sennit")
        # Set-up looks for a port and takes the time for a seed: each rank others.
        os.environ.update(as_under_torchrun(rank, world, port))
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)

        def run_on_this_rank(callable: Any, world_size: int, **given: Any) -> None:
            callable(rank=rank, world_size=world_size, **given)

        # TorchRec would start processes, and this is one of them already.
        case._run_multi_process_test = run_on_this_rank
        codec = options.pop("codec", None)
        precisions = QCommsConfig(*(CommType(name) for name in codec)) if codec else None
        is_dense = sharding_type == "data_parallel"
        kernel = EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED
        sharder = create_test_sharder(
            SharderType.EMBEDDING_BAG_COLLECTION.value,
            sharding_type,
            kernel.value,
            qcomms_config=precisions,
            device=torch.device("cpu"),
        )
        case._test_sharding(sharders=[sharder], backend="sennit", qcomms_config=precisions, **options)
    assert sum(sent_bytes) > 0
