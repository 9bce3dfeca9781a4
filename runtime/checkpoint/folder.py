# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder: which are whole, how one gets its name, and which are removed.

A checkpoint is a folder `step-000000123` with the files of `torch.distributed.checkpoint` (DCP) and a manifest
(`manifest`). An incremental one has what changed since the one before, and needs all from its base on: its *chain*.

A save (`saver`) writes `step-000000123.partial`, makes it durable and renames it, so a folder without a suffix is
complete. If that step exists already, the older folder is first renamed to `step-000000123.replaced`, which counts as
complete until the new one has its name. A folder to be removed is first renamed to `.deleted`, so that half of a
checkpoint never looks complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from sennit.runtime.checkpoint import manifest
from sennit.runtime.checkpoint.manifest import CheckpointError, Link, Manifest
from sennit.runtime.sharded.state import CHANGED_ROWS
from sennit.transport.errors import ConfigError, SennitError

METADATA: Final = ".metadata"
"""The name of DCP's index of the files."""

_NAME: Final = re.compile(r"(step-\d{9})(\.replaced)?")
_DELETED: Final = re.compile(r"step-\d{9}\.deleted")

Result = TypeVar("Result")


def name_of(step: int) -> str:
    return f"step-{step:09d}"


def rows_of(name: str) -> str:
    """The name of the changed rows of a shard's tensor."""
    return f"{name.rpartition('.')[0]}.{CHANGED_ROWS}"


def whole(folder: Path) -> list[Path]:
    """All complete checkpoints of a folder, newest first. Those with links missing in their chains are not."""
    if not folder.is_dir():
        return []
    found: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        name = _NAME.fullmatch(entry.name)
        if name and any((entry / file).is_file() for file in (METADATA, manifest.NAME)) and not _is_cut_off(entry):
            # The names sort "step-1" before "step-1.replaced", which it replaces.
            found.setdefault(name[1], entry)
    return [found[name] for name in sorted(found, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(iter(whole(folder)), None)


def named(folder: Path) -> Path:
    """The checkpoint that a user names: `folder` itself, or the newest one in it. Raises `ConfigError` without one."""
    found = folder if (folder / METADATA).is_file() else latest(folder)
    if found is None:
        raise ConfigError(
            f"{folder}: no checkpoint, and no folder of checkpoints; give what sennit train --checkpoint wrote"
        )
    return found


def latest_of(folder: Path, run_id: str) -> Path | None:
    """The newest complete checkpoint of one run. Checkpoints of other runs, and unreadable ones, are skipped."""
    return next((path for path in whole(folder) if _is_of(path, run_id)), None)


def chain(checkpoint: Path, about: Manifest) -> list[Path]:
    """The checkpoints that make up `checkpoint`: its base first, itself last.

    Raises `CheckpointError` that names a missing one.
    """
    return [*(find_link(checkpoint.parent, link) for link in about.after), checkpoint]


def find_link(folder: Path, link: Link) -> Path:
    """The checkpoint with the link's step and manifest. Raises `CheckpointError` if there is none."""
    for path in (folder / name_of(link.step), folder / f"{name_of(link.step)}.replaced"):
        try:
            if Manifest.read(path).sha256 == link.sha256:
                return path
        except CheckpointError:
            continue
    raise CheckpointError(f"{folder / name_of(link.step)}, which later checkpoints need, is lost or another one")


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a finished save. At every moment `final` or `final.replaced` is complete, if `final` was."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
        sync(final.parent)
    partial.rename(final)
    # The rename must survive a power cut before what it replaces is removed.
    sync(final.parent)
    _remove(replaced)


def remove_older(folder: Path, run_id: str, keep: int) -> None:
    """Removes the run's checkpoints but the newest `keep` and those that they need."""
    own = [path for path in whole(folder) if _is_of(path, run_id)]
    needed = {link for path in own[:keep] for link in chain(path, Manifest.read(path))}
    # The newest first: a base goes after all that need it.
    for path in own:
        if path not in needed:
            _remove(path)
    # A process was killed while it removed these.
    for entry in folder.iterdir():
        if _DELETED.fullmatch(entry.name):
            shutil.rmtree(entry)


def agreed(what: str, function: Callable[[], Result]) -> list[Result]:
    """The results of all ranks' calls; an error of any rank is a `CheckpointError` on all of them. Collective.

    So no rank waits for one that has failed.
    """
    mine: tuple[Any, str | None] = (None, None)
    try:
        mine = function(), None
    except Exception as error:
        mine = None, str(error) if isinstance(error, OSError | SennitError) else repr(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    told = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(everyone) if failure is not None]
    if told:
        raise CheckpointError(f"{what}: {'; '.join(told)}")
    return [result for result, _ in everyone]


def sync(folder: Path) -> None:
    """Makes created, renamed and removed entries of a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Removes a folder if it exists. It is renamed first."""
    if checkpoint.exists():
        deleted = checkpoint.with_name(f"{checkpoint.name.partition('.')[0]}.deleted")
        shutil.rmtree(deleted, ignore_errors=True)
        checkpoint.rename(deleted)
        sync(checkpoint.parent)
        shutil.rmtree(deleted)


def _is_of(path: Path, run_id: str) -> bool:
    try:
        return Manifest.read(path).run_id == run_id
    except CheckpointError:
        return False


def _is_cut_off(path: Path) -> bool:
    """Whether a checkpoint that the chain needs is missing. A damaged manifest is an error when it is read."""
    try:
        about = Manifest.read(path)
    except CheckpointError:
        return False
    try:
        chain(path, about)
    except CheckpointError:
        return True
    return False
