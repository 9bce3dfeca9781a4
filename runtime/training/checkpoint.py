# SPDX-License-Identifier: Apache-2.0
"""Saves and resumes through `torch.distributed.checkpoint` (DCP).

A checkpoint is a folder `step-000000123` with DCP's files and a manifest (`manifest`). Tables are stored whole, by
their global names, so any number of ranks can read what any other number wrote.

A save writes `step-000000123.partial`, makes it durable and renames it, so a folder without a suffix is complete. If
that step exists already, the older folder is first renamed to `step-000000123.replaced`, which counts as complete until
the new one has its name. A folder to be removed is first renamed to `.deleted`, so that half of a checkpoint never
looks complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from sennit.runtime.training import manifest
from sennit.runtime.training.manifest import CheckpointError, Manifest

_NAME: Final = re.compile(r"(step-\d{9})(\.replaced)?")
_DELETED: Final = re.compile(r"step-\d{9}\.deleted")


def whole(folder: Path) -> list[Path]:
    """All complete checkpoints of a folder, newest first."""
    if not folder.is_dir():
        return []
    found: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        name = _NAME.fullmatch(entry.name)
        if name and (entry / ".metadata").is_file():
            # The names sort "step-1" before "step-1.replaced", which it replaces.
            found.setdefault(name[1], entry)
    return [found[name] for name in sorted(found, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(iter(whole(folder)), None)


def latest_of(folder: Path, run_id: str) -> Path | None:
    """The newest complete checkpoint of one run. Checkpoints of other runs, and unreadable ones, are skipped."""
    return next((path for path in whole(folder) if _is_of(path, run_id)), None)


def save(
    folder: Path,
    about: Manifest,
    state: dict[str, Any],
    *,
    documents: Mapping[str, str] | None = None,
    keep: int | None = None,
) -> Path:
    """Writes `state` as checkpoint `about.step`, with `documents` (file name to text) beside it.

    With `keep`, only that many of the run's checkpoints remain, once the new one is durable. Collective. Raises
    `CheckpointError` on every rank or on none.
    """
    final = folder / f"step-{about.step:09d}"
    partial = final.with_name(f"{final.name}.partial")
    first = dist.get_rank() == 0
    with _agreed(f"checkpoint {final}"):
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            _sync(folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
    from sennit.runtime.training import dcp

    not_written = f"checkpoint {final} was not written"
    try:
        dcp.write(partial, state, failure=not_written)
        # Every rank syncs: its files may be new entries on another machine.
        with _agreed(not_written):
            if first:
                for name, text in {**(documents or {}), manifest.NAME: about.text()}.items():
                    _write(partial / name, text)
            _sync(partial)
    except CheckpointError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with _agreed(f"checkpoint {final}"):
        if first:
            _put_in_place(partial, final)
            if keep is not None:
                _remove_older(folder, about.run_id, keep)
    return final


def load(path: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Loads into the tensors of `state`, and replaces its other values. Collective, unless this process is `alone`."""
    from sennit.runtime.training import dcp

    dcp.read(path, state, alone=alone)


def _put_in_place(partial: Path, final: Path) -> None:
    """At every moment, `final` or `final.replaced` is complete, if `final` was."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
        _sync(final.parent)
    partial.rename(final)
    # The rename must survive a power cut before what it replaces is removed.
    _sync(final.parent)
    _remove(replaced)


def _remove_older(folder: Path, run_id: str, keep: int) -> None:
    for path in [path for path in whole(folder) if _is_of(path, run_id)][keep:]:
        _remove(path)
    # A process was killed while it removed these.
    for entry in folder.iterdir():
        if _DELETED.fullmatch(entry.name):
            shutil.rmtree(entry)


def _remove(checkpoint: Path) -> None:
    """Removes a folder if it exists. It is renamed first."""
    if checkpoint.exists():
        deleted = checkpoint.with_name(f"{checkpoint.name.partition('.')[0]}.deleted")
        shutil.rmtree(deleted, ignore_errors=True)
        checkpoint.rename(deleted)
        _sync(checkpoint.parent)
        shutil.rmtree(deleted)


def _is_of(path: Path, run_id: str) -> bool:
    try:
        return Manifest.read(path).run_id == run_id
    except CheckpointError:
        return False


@contextmanager
def _agreed(what: str) -> Iterator[None]:
    """Turns an error inside the block, on any rank, into a `CheckpointError` on all ranks. Collective.

    So no rank waits for one that has failed.
    """
    mine = None
    try:
        yield
    except Exception as error:
        mine = str(error) if isinstance(error, OSError) else repr(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, mine)
    told = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
    if told:
        raise CheckpointError(f"{what}: {'; '.join(told)}")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes created, renamed and removed entries of a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
