# SPDX-License-Identifier: Apache-2.0
"""Saves and resumes through `torch.distributed.checkpoint` (DCP).

A checkpoint is a folder `step-000000123`. It is written under a name that ends in `.partial` and renamed when
every rank has written its part, so a folder without that ending is always whole. Tables go by their global
names, whole: any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from sennit.transport.errors import SennitError

_NAME = re.compile(r"step-(\d{9})")


class CheckpointError(SennitError):
    """A checkpoint could not be written or read; the message names the folder and the rank's reason."""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; unfinished ones do not count."""
    if not folder.is_dir():
        return None
    whole = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name) and (entry / ".metadata").is_file()]
    return max(whole, key=lambda entry: entry.name, default=None)


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes `state` as checkpoint `step`. Collective; raises `CheckpointError` on every rank or on none."""
    final = folder / f"step-{step:09d}"
    partial = final.with_name(f"{final.name}.partial")
    first = dist.get_rank() == 0
    failure = None
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            failure = str(error)
    _agree(failure, f"checkpoint {final}")
    try:
        with _quiet():
            state_dict_saver.save(
                state, storage_writer=FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
            )
    except CheckpointException as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} was not written: {_reasons(error)}") from error
    if first:
        try:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(folder)
        except OSError as error:
            failure = str(error)
    _agree(failure, f"checkpoint {final}")
    return final


def load(path: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Reads into the tensors of `state`, and replaces its other values. Collective, unless this process is `alone`."""
    try:
        with _quiet():
            state_dict_loader.load(state, storage_reader=FileSystemReader(path), no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_reasons(error)}") from error


def _agree(failure: str | None, what: str) -> None:
    """Rank 0 tells all whether it failed, so that no rank waits for one that has given up."""
    message = [failure]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(f"{what}: {message[0]}")


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))


def _sync(folder: Path) -> None:
    """Makes the rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP itself uses torch interfaces that warn of their own deprecation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        warnings.simplefilter("ignore", category=UserWarning)
        yield
