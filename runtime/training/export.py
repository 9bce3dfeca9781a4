# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint's model for inference, with what is needed to feed it. Tables get 8 bits per weight."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint.reading import OpenedCheckpoint
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.kernels.id_directory import steps_of
from sennit.runtime.kernels.int8 import int8_rows
from sennit.runtime.training.trainer import DENSE, TABLES
from sennit.transport.errors import ConfigError, DeviceError

_WEIGHT: Final = re.compile(
    re.escape(TABLES) + r"(?P<table>.+)/(?P<row>\d+)\.(?P<column>\d+)(?P<core>\.core\d)?\.weight"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export."""

    source: Path
    """The checkpoint."""

    tables: int
    before_bytes: int
    """Bytes of the tables' weights in the checkpoint."""

    after_bytes: int
    """Bytes of their rows in the exported file."""


def export_int8(folder: Path, output: Path) -> Exported:
    """Writes `output`, which `torch.load(output, weights_only=True, mmap=True)` reads as a dict with

    - `tables`: by name, uint8 [rows, dim + 8] (`int8.int8_rows`). Of a dynamic table these are the rows that have ids;
    - `ids`: of each dynamic table by name, int64 [rows], rising: the id of each row;
    - `shared`: by name, uint8 [row shards, dim + 8]: the rows of ids that have none, in tables where they share one. Of
      checkpoints of `sennit train` alone: others do not say so;
    - `dense`: by name, the weights of the dense model, float32;
    - `model`: `fixed.model` of the manifest, whose `tables` are in the order of the model's inputs;
    - `preprocessing`: turns raw samples into inputs (`Preprocessing.as_json`). None if feeders had it and it was too
      long for the protocol.

    docs/reference/checkpoints.md says how to compute a prediction.

    `folder` is a checkpoint, or a folder of checkpoints, of which the newest is taken. Needs memory for the largest
    table and for all rows in 8 bits. Raises `ConfigError` (also for tensor trains), `CheckpointError`, `ArgumentError`
    (a weight is not finite) or `DeviceError` (the disk is full). After an error, `output` is as it was.
    """
    source = checkpoint.named(folder)
    dense: dict[str, torch.Tensor] = {}
    shards: dict[str, dict[tuple[int, int], str]] = {}
    opened = OpenedCheckpoint(source, alone=True)
    for key in sorted(opened.tensors):
        if key.startswith(DENSE):
            dense[key.removeprefix(DENSE)] = opened.tensor(key)
        elif shard := _WEIGHT.fullmatch(key):
            if shard["core"]:
                raise ConfigError(
                    f"{source}: table {shard['table']} is a tensor train; allowed: tables with rows of their own "
                    "(sennit.runtime.kernels: EmbeddingEngine.materialise makes them)"
                )
            shards.setdefault(shard["table"], {})[int(shard["row"]), int(shard["column"])] = key
    tables: dict[str, torch.Tensor] = {}
    ids: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    model = opened.about.fixed.get("model")
    before_bytes = 0
    for name, key_of in shards.items():
        rows = 1 + max(row for row, _ in key_of)
        columns = 1 + max(column for _, column in key_of)
        parts = [torch.cat([opened.tensor(key_of[row, column]) for column in range(columns)], 1) for row in range(rows)]
        before_bytes += sum(part.nbytes for part in parts)
        directories = [key_of[row, 0].removesuffix("weight") + "ids" for row in range(rows)]
        if directories[0] in opened.tensors:
            if _rules(model, name).get("unadmitted") == "shared":
                shared[name] = int8_rows(torch.stack([part[-1] for part in parts]).float(), name=name)
            ids[name], whole = _by_id([opened.tensor(key) for key in directories], parts)
        else:
            whole = parts[0] if rows == 1 else torch.cat(parts)
        tables[name] = int8_rows(whole.float(), name=name)
    if not tables:
        raise ConfigError(f"{source}: a checkpoint without embedding tables; there is nothing to export")
    known = Preprocessing.read(source)
    told = None if known is None else known.as_json()
    content = {"tables": tables, "dense": dense, "model": model, "preprocessing": told, "ids": ids, "shared": shared}
    _write(output, content)
    after_bytes = sum(rows.nbytes for of_kind in (tables, shared) for rows in of_kind.values())
    return Exported(source=source, tables=len(tables), before_bytes=before_bytes, after_bytes=after_bytes)


def _rules(model: Any, table: str) -> dict[str, Any]:
    """The rules of a dynamic table, as a manifest of `sennit train` has them."""
    found: dict[str, Any] = ((model or {}).get("tables", {}).get(table) or {}).get("ids") or {}
    return found


def _by_id(entries: list[torch.Tensor], parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that have rows, rising, and their rows. `entries`, `parts`: directories and rows by row shard."""
    used = [steps_of(one) > 0 for one in entries]
    ids, order = torch.cat([one[own, 0] for one, own in zip(entries, used, strict=True)]).sort()
    return ids, torch.cat([part[own] for part, own in zip(parts, used, strict=True)])[order]


def _write(output: Path, content: dict[str, Any]) -> None:
    partial = output.with_name(f"{output.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(output)
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError.
        partial.unlink(missing_ok=True)
        raise DeviceError(
            f"{output} was not written: {error}; choose a file in a folder with room that can be written"
        ) from error
