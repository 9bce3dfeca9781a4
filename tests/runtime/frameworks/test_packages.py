# SPDX-License-Identifier: Apache-2.0
"""Packages that build on torch.distributed run their own tests and models over sennit (extra `frameworks`).

Accelerate takes the default group that is there. `InitProcessGroupKwargs(backend="sennit")` it refuses on CPUs.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.runtime.frameworks.over_sennit import as_under_torchrun, group_over_sennit, only_sennit
from tests.runtime.world import World

pytestmark = pytest.mark.timeout(180)


@contextmanager
def ready(rank: int, world: int, folder: str, port: int, name: str) -> Iterator[ModuleType]:
    """The module of a script, with a group, and a state of Accelerate that is not an earlier script's."""
    os.environ.update(as_under_torchrun(rank, world, port), ACCELERATE_USE_CPU="true")
    with group_over_sennit(rank, world, folder, name):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        # Some scripts ask for a state without saying that it is one of CPUs, and then use the one that is there.
        PartialState(cpu=True)
        yield importlib.import_module(f"accelerate.test_utils.scripts.{name}")


def script(rank: int, world: int, folder: str, port: int, name: str) -> None:
    """Runs all of a script, which destroys the group in the end."""
    with ready(rank, world, folder, port, name) as module:
        module.main()


def data_loop(rank: int, world: int, folder: str, port: int) -> None:
    """Runs the parts of a script that need neither torchdata nor several GPUs.

    The others join uneven inputs. Accelerate warns that it joins those of GPUs only, and over gloo they hang.
    """
    with ready(rank, world, folder, port, "test_distributed_data_loop") as module:
        from torch.utils.data import DataLoader

        module.test_default_ensures_even_batch_sizes()
        module.test_can_disable_even_batches()
        module.test_pickle_accelerator()
        for is_shuffled in (False, True):
            loader = DataLoader(module.DummyDataset(), shuffle=is_shuffled, batch_size=module.BATCH_SIZE)
            module.test_data_loader(loader, module.create_accelerator())


def trained(backend: str, model_name: str) -> list[torch.Tensor]:
    """The weights that one of Lightning's models has after an epoch, a validation and a test over `backend`."""
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.demos import boring_classes
    from lightning.pytorch.strategies import DDPStrategy

    seed_everything(3, verbose=False)
    model: Any = getattr(boring_classes, model_name)()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        limit_train_batches=6,
        limit_val_batches=2,
        limit_test_batches=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    data = boring_classes.BoringDataModule()
    trainer.fit(model, datamodule=data)
    assert dist.get_backend() == backend
    trainer.test(model, datamodule=data, verbose=False)
    weights = [weight.detach().clone() for weight in model.parameters()]
    gathered = [torch.empty_like(weights[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights[0])
    assert all(torch.equal(weights[0], other) for other in gathered)
    return weights


def fit(rank: int, world: int, port: int, model: str) -> None:
    """Lightning makes the group itself. The weights have the bits that they get over gloo."""
    os.environ.update(as_under_torchrun(rank, world, port))
    with only_sennit() as sent_bytes:
        ours = trained("sennit", model)
    assert sum(sent_bytes) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.update(as_under_torchrun(rank, world, port + 1))
        theirs = trained("gloo", model)
        dist.destroy_process_group()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


# TorchRec's package installs its test programs, but not a module that they import for a sharder of sequences, which no
# case here uses.
NOT_INSTALLED = "torchrec.distributed.tests.test_sequence_model"


def stand_in() -> None:
    if NOT_INSTALLED not in sys.modules:
        module = ModuleType(NOT_INSTALLED)
        module.TestEmbeddingCollectionSharder = type("NotInstalled", (), {})  # type: ignore[attr-defined]
        sys.modules[NOT_INSTALLED.rpartition(".")[0]] = ModuleType(NOT_INSTALLED.rpartition(".")[0])
        sys.modules[NOT_INSTALLED] = module


def step_of_their_model(rank: int, world: int, port: int, sharding_type: str, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerate(ranks: Callable[[int], World], tmp_path: Path, port: int, name: str) -> None:
    ranks(2).run(script, folder=str(tmp_path), port=port, name=name)


def test_accelerate_data_loop(ranks: Callable[[int], World], tmp_path: Path, port: int) -> None:
    ranks(2).run(data_loop, folder=str(tmp_path), port=port)


@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel"])
def test_lightning(ranks: Callable[[int], World], port: int, model: str) -> None:
    ranks(2).run(fit, port=port, model=model)


@pytest.mark.parametrize(
    ("sharding", "options"),
    [
        ("table_wise", {}),
        ("row_wise", {}),
        ("row_wise", {"codec": ["fp16", "bf16"]}),
        ("column_wise", {}),
        ("table_row_wise", {"local_size": 2}),
        ("data_parallel", {}),
    ],
)
def test_torchrec(ranks: Callable[[int], World], port: int, sharding: str, options: dict[str, Any]) -> None:
    """Rows over gloo TorchRec skips, because gloo sums no reduce_scatter in the background."""
    ranks(2).run(step_of_their_model, port=port, sharding_type=sharding, options=options)
