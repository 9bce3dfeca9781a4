# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints: bases and increments, while training waits or in the background.

Each rank writes its own file. In the background nothing is collective: a rank leaves a file `rank-N.part` beside what
it has written, and rank 0 makes a checkpoint of the folder when all are there. Ranks agree on the outcome at the next
save, or in `finish`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import manifest
from sennit.runtime.checkpoint.digest import sha256_of_file, sha256_of_tensor
from sennit.runtime.checkpoint.folder import METADATA, agreed, name_of, rows_of
from sennit.runtime.checkpoint.manifest import CheckpointError, Link, Manifest
from sennit.thread_names import name_thread

LOOK_S: Final = 0.01
"""Seconds between two looks of rank 0 for the other ranks' parts."""


class Saver:
    """Saves the checkpoints of a run in one folder. All methods but `abandon` are collective."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        increments: int = 0,
        in_background: bool = False,
        digests: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """`keep`: how many of the run's checkpoints remain, beside those that they need; None: all.

        `increments`: so many increments may follow a base; fewer if together they have half of its bytes.
        `in_background`: files are written while training goes on. A save then copies what it writes.
        `digests`: increments also have the SHA-256 of whole tables, so that loading proves base and increments to be
        the tables of that moment. This reads all tables in each save.
        `timeout_s`: how long a save may take in the background.
        """
        self._folder, self._keep, self._increments = folder, keep, increments
        self._in_background, self._digests, self._timeout_s = in_background, digests, timeout_s
        self._chain: list[Link] = []
        """What the next increment needs. Empty: the next save is a base. Rank 0's counts."""
        self._base_bytes = self._increment_bytes = 0
        self._running: _Background | None = None
        self._last: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the save in the background; after an error, abandons it. Collective, unless there is an error."""
        if kind is None:
            self.finish()
        else:
            self.abandon()

    @property
    def durable(self) -> Path | None:
        """The newest checkpoint that this saver has made durable, as far as this rank knows. Not collective."""
        running = self._running
        return self._last if running is None or running.link is None else running.save.final

    def save(
        self,
        about: Manifest,
        state: Callable[[], Mapping[str, Any]],
        *,
        changes: Callable[[], Mapping[str, Any]] | None = None,
        copied: Collection[str] = (),
        documents: Mapping[str, str] | None = None,
    ) -> None:
        """Saves checkpoint `about.step`, with `documents` (file name to text) beside it.

        `state` returns everything, for a base. `changes` returns what an increment has: of a shard with changed rows
        `SHARD.changed_rows` and these rows of its tensors, copied; nothing of a shard without; everything else whole.
        The one that is called begins to count changes anew.
        `copied`: names of shards of which `state` has copies that nothing changes, as of tables in files.

        A save in the background is durable when `finish` or the next save returns. Raises `CheckpointError` on every
        rank or on none, also if the save before failed. The next save is then a base.
        """
        self.finish()
        chain = self._chain
        self._chain = []  # Until this save is durable: if it fails, the rows that had changed are forgotten.
        final = self._folder / name_of(about.step)
        failure = f"checkpoint {final} was not written"
        partial = final.with_name(f"{final.name}.partial")
        is_first = dist.get_rank() == 0

        def begin() -> tuple[Link, ...]:
            if not is_first:
                return ()
            self._folder.mkdir(parents=True, exist_ok=True)
            checkpoint.sync(self._folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
            return tuple(chain) if changes is not None and self._may_follow(chain, about.step) else ()

        after = agreed(failure, begin)[0]
        written: Mapping[str, Any] = {}
        everything: Mapping[str, Any] = {}

        def take() -> None:
            nonlocal written, everything
            written = changes() if changes is not None and after else state()
            everything = state() if self._digests and after else written

        # `take` may copy tables to a disk that is full.
        agreed(failure, take)
        try:
            one = _Save(
                partial, final, dataclasses.replace(about, after=after), written,
                documents=documents or {}, keep=self._keep, failure=failure,
            )  # fmt: skip
            if self._digests:
                one.add_digests(everything)
            if self._in_background:
                one.copy(copied)
                self._running = _Background(one, timeout_s=self._timeout_s)
            else:
                parts = agreed(failure, one.write)
                self._done(one, agreed(failure, lambda: one.commit(parts) if is_first else None)[0])
        except CheckpointError:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def finish(self) -> None:
        """Waits for the save in the background, if there is one. Raises `CheckpointError` on all ranks if it failed."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            # First what each rank has written: if one is dead, this says so, and rank 0 need not wait for its part.
            agreed(running.save.failure, running.wait_written)
            link = agreed(running.save.failure, running.wait_committed)[0]
        except BaseException:
            running.end()
            if dist.is_initialized() and dist.get_rank() == 0:
                shutil.rmtree(running.save.partial, ignore_errors=True)
            raise
        self._done(running.save, link)

    def abandon(self) -> None:
        """Ends what the background still does, because the group of ranks has failed. Not collective."""
        running, self._running = self._running, None
        self._chain = []
        if running is not None:
            running.end()

    def _done(self, save: _Save, link: Link | None) -> None:
        assert link is not None
        after = list(save.about.after)
        self._chain = [*after, link]
        if after:
            self._increment_bytes += save.bytes
        else:
            self._base_bytes, self._increment_bytes = save.bytes, 0
        self._last = save.final

    def _may_follow(self, chain: list[Link], step: int) -> bool:
        """Whether an increment may follow these checkpoints."""
        if not chain or len(chain) > self._increments or 2 * self._increment_bytes >= self._base_bytes:
            return False
        if any(link.step == step for link in chain):
            # An increment at the step of its base would replace the base.
            return False
        try:
            return all(checkpoint.find_link(self._folder, link) for link in chain)
        except CheckpointError:
            return False


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
    Saver(folder, keep=keep).save(about, lambda: state, documents=documents)
    return folder / name_of(about.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What a rank has written."""

    results: list[Any]
    """What DCP returned for this rank's file."""

    files: dict[str, str]
    """SHA-256 of the rank's files, by name."""

    tensors: dict[str, str]


class _Save:
    """One save, whose ranks have agreed who writes what."""

    def __init__(
        self,
        partial: Path,
        final: Path,
        about: Manifest,
        written: Mapping[str, Any],
        *,
        documents: Mapping[str, str],
        keep: int | None,
        failure: str,
    ) -> None:
        """Collective."""
        from sennit.runtime.checkpoint import dcp

        self.partial, self.final, self.about, self.failure = partial, final, about, failure
        self._documents, self._keep = documents, keep
        self._partly = {name for name in written if rows_of(name) in written}
        """Names of tensors of which the files have some rows."""
        self._planned = dcp.Planned(partial, dict(written), failure=failure)
        self.bytes = self._planned.bytes
        self._digests: dict[str, str] = {}

    def add_digests(self, state: Mapping[str, Any]) -> None:
        """Adds SHA-256 of whole tensors of which the files have some rows. Tables change after this, so not later."""
        names = {name for name, _ in self._planned.tensors()} & self._partly & state.keys()
        self._digests = {name: sha256_of_tensor(state[name]) for name in sorted(names)}

    def copy(self, copied: Collection[str]) -> None:
        """Makes the save independent of the state, which may then change."""
        self._planned.copy(lambda name: name in self._partly or name.rpartition(".")[0] in copied)

    def write(self) -> _Part:
        """Writes this rank's file. Any thread."""
        results = self._planned.write()
        # Every rank syncs: its files may be new entries on another machine.
        checkpoint.sync(self.partial)
        names = sorted({result.storage_data.relative_path for result in results})
        whole = {name: tensor for name, tensor in self._planned.tensors() if name not in self._partly}
        return _Part(
            results=results,
            files={name: sha256_of_file(self.partial / name) for name in names},
            tensors=self._digests | {name: sha256_of_tensor(tensor) for name, tensor in whole.items()},
        )

    def commit(self, parts: list[_Part]) -> Link:
        """Makes a checkpoint of what all ranks have written. On rank 0, any thread."""
        self._planned.finish([part.results for part in parts])
        for name, text in self._documents.items():
            _write(self.partial / name, text)
        files = {name: sha256_of_file(self.partial / name) for name in (METADATA, *self._documents)}
        tensors: dict[str, str] = {}
        for part in parts:
            files |= part.files
            tensors |= part.tensors
        about = dataclasses.replace(
            self.about, files=dict(sorted(files.items())), tensors=dict(sorted(tensors.items()))
        )
        _write(self.partial / manifest.NAME, about.text())
        checkpoint.sync(self.partial)
        checkpoint.put_in_place(self.partial, self.final)
        if self._keep is not None:
            checkpoint.remove_older(self.final.parent, about.run_id, self._keep)
        return Link(about.step, about.sha256)


class _Background:
    """A save in a thread of its own."""

    def __init__(self, save: _Save, *, timeout_s: float) -> None:
        self.save = save
        self.link: Link | None = None
        """The checkpoint, once it is durable. Only rank 0 knows it."""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self._error: Exception | None = None
        self._is_written, self._is_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sennit-saver", daemon=True)
        self._thread.start()

    def wait_written(self) -> None:
        """Waits until this rank's part is written. Raises what went wrong."""
        if not self._is_written.wait(self._left_s()):
            raise TimeoutError(self._late("this rank had not written its part"))
        if self._error is not None:
            raise self._error

    def wait_committed(self) -> Link | None:
        """Waits until the thread has ended."""
        self._thread.join(self._left_s())
        if self._thread.is_alive():
            raise TimeoutError(self._late("the checkpoint had not got its name"))
        if self._error is not None:
            raise self._error
        return self.link

    def end(self) -> None:
        """Waits for no other rank any more, and until this rank's file is written."""
        self._is_ended.set()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        name_thread(self._thread.name)
        try:
            part = self.save.write()
            _leave(self.save.partial, self._rank, part)
            self._is_written.set()
            if self._rank == 0:
                self.link = self.save.commit(self._parts())
        except Exception as error:
            self._error = error
        finally:
            self._is_written.set()

    def _parts(self) -> list[_Part]:
        """What all ranks have written, in their order."""
        paths = [_part_file(self.save.partial, rank) for rank in range(self._world)]
        for rank, path in enumerate(paths):
            while not path.exists():
                if self._is_ended.wait(LOOK_S):
                    raise CheckpointError("given up; another error of this rank says why")
                if time.monotonic() > self._ends_s:
                    raise TimeoutError(self._late(f"rank {rank} had not written its part"))
        parts = [pickle.loads(path.read_bytes()) for path in paths]
        for path in paths:
            path.unlink()
        return parts

    def _left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def _late(self, what: str) -> str:
        return (
            f"{what} after {self._timeout_s:g} s; look at the load and the room of its disk, or give more (--timeout)"
        )


def _leave(partial: Path, rank: int, part: _Part) -> None:
    """Tells rank 0 what this rank has written."""
    path = _part_file(partial, rank)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_bytes(pickle.dumps(part))
    unfinished.rename(path)


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank}.part"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
