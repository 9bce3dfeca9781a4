# SPDX-License-Identifier: Apache-2.0
"""Lightning's own demo models, which it installs, over sennit: run on each rank by test_packages.py."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from frameworks.over_sennit import as_under_torchrun, only_sennit  # type: ignore[import-not-found]


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
