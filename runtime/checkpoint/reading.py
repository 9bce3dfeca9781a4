# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints: all files are checked first, then comes the base, then what each later save changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from sennit.runtime.checkpoint import dcp
from sennit.runtime.checkpoint.digest import sha256_of_file, sha256_of_tensor
from sennit.runtime.checkpoint.folder import METADATA, agreed, chain, rows_of
from sennit.runtime.checkpoint.manifest import CheckpointError, Manifest


class OpenedCheckpoint:
    """A whole checkpoint, whose files were checked when it was opened."""

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        """Collective, unless this process is `alone`; ranks share the work of checking.

        Raises `CheckpointError` on every rank or on none.
        """
        self.path, self._alone = path, alone
        self._links: list[_Link] = []
        self._together(self._open)

    @property
    def about(self) -> Manifest:
        return self._links[-1].about

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Size and type of each tensor, by name."""
        found: dict[str, TensorStorageMetadata] = {}
        for link in self._links:
            for name, about in link.index.state_dict_metadata.items():
                if link.is_whole(name) and isinstance(about, TensorStorageMetadata):
                    found[name] = about
        return found

    def everything(self) -> dict[str, Any]:
        """All values, in host memory."""
        state: dict[str, Any] = {}
        for link in self._links:
            for name, place in (link.index.planner_data or {}).items():
                if not link.is_whole(name):
                    continue
                *outer, last = map(str, place)
                values = functools.reduce(lambda values, key: values.setdefault(key, {}), outer, state)
                is_tensor = isinstance(link.index.state_dict_metadata[name], TensorStorageMetadata)
                values[last] = link.empty(name) if is_tensor else None
        self.read(state)
        return state

    def tensor(self, name: str) -> Tensor:
        """One of `tensors`, whole, in host memory. Errors as of `read`."""
        about = self.tensors[name]
        state = {name: torch.empty(about.size, dtype=about.properties.dtype)}
        self.read(state)
        return state[name]

    def read(self, state: dict[str, Any]) -> None:
        """Loads into the tensors of `state`, and replaces its other values.

        A tensor that does not have the SHA-256 with which it was saved is an error.
        """
        self._together(lambda: self._read(state))

    def _open(self) -> None:
        about = Manifest.read(self.path)
        paths = chain(self.path, about)
        abouts = [*(Manifest.read(path) for path in paths[:-1]), about]
        files = [
            (path / name, digest)
            for path, one in zip(paths, abouts, strict=True)
            for name, digest in sorted(one.files.items())
        ]
        for path, one in zip(paths, abouts, strict=True):
            if METADATA not in one.files:
                raise CheckpointError(f"{path}: its manifest does not name {METADATA}")
        rank, world = (0, 1) if self._alone else (dist.get_rank(), dist.get_world_size())
        for path, digest in files[rank::world]:
            try:
                found = sha256_of_file(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing") from None
            if found != digest:
                raise CheckpointError(f"{path} is damaged: SHA-256 {found[:16]}..., it was saved with {digest[:16]}...")
        self._links = [_Link(path, one) for path, one in zip(paths, abouts, strict=True)]

    def _read(self, state: dict[str, Any]) -> None:
        # The last link that has a value whole.
        last: dict[str, int] = {}
        for place, link in enumerate(self._links):
            last |= dict.fromkeys(filter(link.is_whole, state.keys() & link.names), place)
        if missing := state.keys() - last.keys():
            raise CheckpointError(f"it has no {min(missing)}")
        digests: dict[str, str] = {}
        for place, link in enumerate(self._links):
            values = {name: value for name, value in state.items() if last[name] == place}
            dcp.read(link.path, values)
            state.update(values)
            changed = {name: value for name, value in state.items() if last[name] < place and name in link.names}
            _read_rows(link, changed)
            digests = {name: digest for name, digest in digests.items() if name not in changed}
            digests |= link.about.tensors
        for name, digest in digests.items():
            if isinstance(tensor := state.get(name), Tensor) and sha256_of_tensor(tensor) != digest:
                raise CheckpointError(f"{name} does not have the SHA-256 with which it was saved")

    def _together(self, function: Callable[[], None]) -> None:
        what = f"checkpoint {self.path} cannot be read"
        if not self._alone:
            agreed(what, function)
            return
        try:
            function()
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{what}: {error}") from error


def load(path: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Loads into the tensors of `state`, and replaces its other values. Collective, unless this process is `alone`.

    All files are checked first. Raises `CheckpointError` on every rank or on none.
    """
    OpenedCheckpoint(path, alone=alone).read(state)


def _read_rows(link: _Link, tensors: Mapping[str, Tensor]) -> None:
    """Overwrites the rows that `link` has of some tensors."""
    parts = {name: link.empty(name) for name in {*tensors, *map(rows_of, tensors)}}
    dcp.read(link.path, parts)
    for name, tensor in tensors.items():
        rows, values = (part.to(tensor.device) for part in (parts[rows_of(name)], parts[name]))
        tensor.index_copy_(0, rows, values)


class _Link:
    """One folder of a chain."""

    def __init__(self, path: Path, about: Manifest) -> None:
        self.path, self.about = path, about
        self.index: Metadata = dcp.index(path)
        places = self.index.planner_data or {}
        self.names = {str(place[0]) for place in places.values()}
        """Names of the values of the state. DCP takes nested ones apart."""

    def is_whole(self, name: str) -> bool:
        """Whether a value that the folder has is not just some of its rows."""
        return rows_of(name) not in self.names

    def empty(self, name: str) -> Tensor:
        about = self.index.state_dict_metadata[name]
        assert isinstance(about, TensorStorageMetadata)
        return torch.empty(about.size, dtype=about.properties.dtype)
