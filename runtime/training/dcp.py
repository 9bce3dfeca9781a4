# SPDX-License-Identifier: Apache-2.0
"""What checkpoints need of `torch.distributed.checkpoint` (DCP): the files of a state, the state of an optimizer.

Import this module where it is used, not at the top: DCP takes half as long to import as torch itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from sennit.runtime.training.manifest import CheckpointError

# The flattened form has one entry per parameter name and kind, which DCP can read at any world size.
_FLAT: Final = StateDictOptions(flatten_optimizer_state_dict=True)


def write(folder: Path, state: dict[str, Any], *, failure: str) -> None:
    """Writes and syncs the files of `state`. Collective.

    Raises `CheckpointError` that begins with `failure` on every rank or on none.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        with _quiet():
            state_dict_saver.save(state, storage_writer=writer)
    except CheckpointException as error:
        raise CheckpointError(f"{failure}: {_reasons(error)}") from error


def read(folder: Path, state: dict[str, Any], *, alone: bool) -> None:
    """Loads into the tensors of `state`, and replaces its other values. Collective, unless this process is `alone`."""
    try:
        with _quiet():
            state_dict_loader.load(state, storage_reader=FileSystemReader(folder), no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {_reasons(error)}") from error


def optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state by the parameters' names, flat."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))


def restore_optimizer(model: Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes over what `optimizer_state` returned."""
    set_optimizer_state_dict(model, optimizer, state, options=_FLAT)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings: DCP uses torch interfaces that warn of their own deprecation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield
