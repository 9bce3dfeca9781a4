# SPDX-License-Identifier: Apache-2.0
"""What checkpoints need of `torch.distributed.checkpoint` (DCP): the files of a state, the state of an optimizer.

Import this module where it is used, not at the top: DCP takes half as long to import as torch itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Module
from torch.optim import Optimizer

from sennit.runtime.checkpoint.folder import agreed
from sennit.runtime.checkpoint.manifest import CheckpointError

# The flattened form has one entry per parameter name and kind, which DCP can read at any world size.
_FLAT: Final = StateDictOptions(flatten_optimizer_state_dict=True)


class Planned:
    """A state of which the ranks have agreed who writes what. What several ranks hold is written once."""

    def __init__(self, folder: Path, state: dict[str, Any], *, failure: str) -> None:
        """Collective. Raises `CheckpointError` that begins with `failure` on every rank or on none."""
        self._planner = DefaultSavePlanner()
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        is_first = dist.get_rank() == 0

        def own() -> Any:
            with _quiet():
                self._planner.set_up_planner(state, self._writer.storage_meta(), is_first)
                self._writer.set_up_storage_writer(is_first)
                return self._writer.prepare_local_plan(self._planner.create_local_plan())

        plans = agreed(failure, own)
        try:
            plans, self._metadata = self._planner.create_global_plan(plans)
        except ValueError as error:
            raise CheckpointError(f"{failure}: {error}") from error
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[dist.get_rank()])

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that all ranks write."""
        return sum(
            about.size.numel() * about.properties.dtype.itemsize
            for about in self._metadata.state_dict_metadata.values()
            if isinstance(about, TensorStorageMetadata)
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that this rank writes whole, by name."""
        for item in self._plan.items:
            if item.type is WriteItemType.TENSOR:
                yield item.index.fqn, self._planner.state_dict[item.index.fqn]

    def copy(self, is_own: Callable[[str], bool]) -> None:
        """Copies what this rank writes to host memory, so that the state may change before. A tensor that `is_own` does
        not change."""
        values = self._planner.state_dict
        for name in {item.index.fqn for item in self._plan.items}:
            value = values[name]
            if not isinstance(value, Tensor):
                values[name] = copy.deepcopy(value)
            elif not is_own(name):
                values[name] = value.detach().to("cpu", copy=True)

    def write(self) -> list[WriteResult]:
        """Writes and syncs this rank's file. Any thread."""
        return self._writer.write_data(self._plan, self._planner).value()

    def finish(self, results: Sequence[list[WriteResult]]) -> None:
        """Writes the index of what all ranks have written."""
        self._writer.finish(self._metadata, list(results))


def index(folder: Path) -> Metadata:
    """What a folder's files hold."""
    return FileSystemReader(folder).read_metadata()


def read(folder: Path, state: dict[str, Any]) -> None:
    """Loads into the tensors of `state`, and replaces its other values. Not collective."""
    if not state:
        return
    try:
        with _quiet():
            state_dict_loader.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError("; ".join(str(failure[0]) for failure in error.failures.values())) from error


def optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state by the parameters' names, flat."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))


def restore_optimizer(model: Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes over the states of parameters of what `optimizer_state` returned. Settings, as its weight decay, stay."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, state, options=_FLAT)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings: DCP uses torch interfaces that warn of their own deprecation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield
