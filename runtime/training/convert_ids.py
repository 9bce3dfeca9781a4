# SPDX-License-Identifier: Apache-2.0
"""Tables of a checkpoint from a vocabulary to dynamic ids, and back. Each id keeps its row and its optimizer states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sennit.offload.arrow_columns import text_ids
from sennit.runtime.checkpoint.manifest import CheckpointError, Manifest
from sennit.runtime.data.packages import require
from sennit.runtime.data.preprocessing import UNKNOWN_ROW, Encoding, Preprocessing
from sennit.runtime.kernels.id_directory import shards_of_ids, steps_of
from sennit.runtime.model.settings import described_ids
from sennit.runtime.sharded.tables import DynamicIds, Table
from sennit.transport.errors import ConfigError

_PART: Final = re.compile(r"(?P<row>\d+)\.(?P<column>\d+)\.(?P<name>\w+)")
_DIRECTORIES: Final = ("ids", "candidates", "sketch")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A table in one piece: all of its rows, whichever shards have them."""

    ids: Tensor
    """Int64 [n], each once, rising."""

    tensors: dict[tuple[str, str], Tensor]
    """By column shard and name: [n, ...]"""

    unknown: dict[tuple[str, str], Tensor]
    """The same of one row, [1, ...]: what ids without a row have."""


def to_dynamic(
    state: dict[str, Any], key: str, table: str, encoding: Encoding | None, rows: int, rules: DynamicIds, steps: int
) -> str:
    """Changes the tensors of the table at `key` to those of a dynamic table of at most `rows` rows.

    `encoding`: of its ids. None: ids are row numbers. `steps`: that the table has taken. Returns what has changed, in
    words. Raises `ConfigError` for ids that nobody knows, that are there twice, or that are too many.
    """
    parts = _parts(state, key)
    if any(name == "ids" for _, _, name in parts):
        raise ConfigError(f"table {table} has dynamic ids; allowed: a table with a vocabulary, or with row numbers")
    shards = 1 + max(row for row, _, _ in parts)
    found = _numbered(parts, shards, _ids(table, encoding, parts, shards))
    # Refuses rows that are too few for its shards.
    about = Table(name=table, rows=rows, dim=1, row_shards=shards, ids=rules)
    shard_of = shards_of_ids(found.ids, shards)
    spare = rules.unadmitted == "shared"
    last = max(1, steps)
    for row in range(shards):
        mine, room = shard_of == row, about.row_range(row).size
        count = int(mine.sum())
        if count > room - spare:
            raise ConfigError(
                f"table {table}: {count} ids for row shard {row}, which has {room - spare} of {rows} rows for them; "
                "allowed: more rows"
            )
        entries = torch.zeros(room, 2, dtype=torch.int64)
        entries[:count, 0] = found.ids[mine]
        # All came as often as an id must to be admitted, in the last step.
        entries[:count, 1] = rules.admit_after << 32 | last
        for (column, name), tensor in found.tensors.items():
            whole = tensor.new_zeros(room, *tensor.shape[1:])
            whole[:count] = tensor[mine]
            if spare:
                whole[-1:] = found.unknown.get((column, name), _unknown(tensor, name))
            state[f"{key}/{row}.{column}.{name}"] = whole
            state |= {f"{key}/{row}.{column}.{one}": torch.zeros_like(entries) for one in rules.directories}
            state[f"{key}/{row}.{column}.ids"] = entries
    return f"ids of {table}: dynamic now, {len(found.ids)} with rows, of {rows}"


def id_type_of(encoding: Encoding) -> str | None:
    """What the values of a table's vocabulary are as the ids of a dynamic one (`Encoding.id_type`)."""
    if encoding.vocabulary is None:
        return encoding.id_type
    return {"O": "text", "u": "uint64"}.get(encoding.vocabulary.dtype.kind, "int64")


def to_fixed(state: dict[str, Any], key: str, table: str, encoding: Encoding | None) -> tuple[str, Encoding]:
    """Changes the tensors of the dynamic table at `key` to those of a table with a vocabulary.

    Row 0, of values that are not in the vocabulary, gets the mean of all rows. Returns what has changed, in words, and
    the vocabulary. `encoding`: the table's own. Raises `ConfigError` for a table without ids, and for one whose ids are
    hashes.
    """
    parts = _parts(state, key)
    if not any(name == "ids" for _, _, name in parts):
        raise ConfigError(f"table {table} has no dynamic ids; allowed: a dynamic table")
    if encoding is not None and encoding.id_type == "text":
        raise ConfigError(
            f"table {table}: its ids are hashes of texts, and nobody knows these; allowed: a table whose column has "
            "integers"
        )
    shards = 1 + max(row for row, _, _ in parts)
    entries = [parts[row, "0", "ids"] for row in range(shards)]
    used = [(steps_of(one) > 0).nonzero().flatten() for one in entries]
    ids = torch.cat([one[rows, 0] for one, rows in zip(entries, used, strict=True)])
    # As numbers without sign, those with the highest bit are the last ones.
    is_unsigned = encoding is not None and encoding.id_type == "uint64"
    order = (ids ^ (-(1 << 63) if is_unsigned else 0)).argsort()
    ids = ids[order]
    if not len(ids):
        raise ConfigError(f"table {table}: no id has a row; allowed: a table that was trained")
    about = Table(name=table, rows=1 + len(ids), dim=1, row_shards=shards)
    for column, name in sorted({(column, name) for _, column, name in parts if name not in _DIRECTORIES}):
        rows = torch.cat([parts[row, column, name][used[row]] for row in range(shards)])[order]
        whole = torch.cat([_unknown(rows, name), rows])
        for row in range(shards):
            span = about.row_range(row)
            state[f"{key}/{row}.{column}.{name}"] = whole[span.low : span.high]
    values = ids.numpy().view(np.uint64) if is_unsigned else ids.numpy()
    made = Encoding(name=table, row_count=1 + len(ids), vocabulary=values)
    return f"ids of {table}: a vocabulary of {len(ids)} now", made


def _unknown(rows: Tensor, name: str) -> Tensor:
    """[1, ...]: what ids without a row get of a tensor of all rows: the mean of weights, and states of nothing."""
    return rows.float().mean(0, keepdim=True).to(rows.dtype) if name == "weight" else torch.zeros_like(rows[:1])


def _parts(state: dict[str, Any], key: str) -> dict[tuple[int, str, str], Tensor]:
    """Takes the tensors of a table out of the state: by row shard, column shard and name."""
    found = {}
    for name in [name for name in state if name.startswith(f"{key}/")]:
        if part := _PART.fullmatch(name.removeprefix(f"{key}/")):
            found[int(part["row"]), part["column"], part["name"]] = state.pop(name)
    if not found:
        raise ConfigError(f"no table {key}; allowed: a table with rows of its own, and no tensor train")
    return found


def _ids(
    table: str, encoding: Encoding | None, parts: Mapping[tuple[int, str, str], Tensor], shards: int
) -> tuple[Tensor, bool]:
    """Int64 [n]: the id of each row; and whether row 0 has none."""
    if encoding is None or (encoding.vocabulary is None and encoding.salt is None):
        return torch.arange(sum(len(parts[row, "0", "weight"]) for row in range(shards))), False
    if encoding.vocabulary is None:
        raise ConfigError(
            f"table {table}: its ids are hashed, and nobody knows them; allowed: vocabularies, row numbers"
        )
    values = encoding.vocabulary
    if values.dtype == object:
        arrow = require("pyarrow", package="pyarrow", purpose="a vocabulary of texts")
        known = text_ids(arrow.array(values, arrow.large_string()))
    else:
        known = values.astype(np.int64)
    ids = torch.from_numpy(known.copy())
    rising, order = ids.sort(stable=True)
    if len(twice := (rising[1:] == rising[:-1]).nonzero()):
        first, second = sorted(int(order[int(twice[0]) + more]) for more in (0, 1))
        both = f"{values.tolist()[first]!r} and {values.tolist()[second]!r}"
        raise ConfigError(f"table {table}: the values {both} have one id, {int(ids[first])}; allowed: each id once")
    return ids, True


def _numbered(parts: Mapping[tuple[int, str, str], Tensor], shards: int, numbered: tuple[Tensor, bool]) -> _Rows:
    ids, has_unknown = numbered
    rising, order = ids.sort()
    tensors, unknown = {}, {}
    for column, name in sorted({(column, name) for _, column, name in parts}):
        whole = torch.cat([parts[row, column, name] for row in range(shards)])
        if len(whole) != len(ids) + has_unknown:
            raise CheckpointError(f"{len(whole)} rows for {len(ids) + has_unknown} values of the vocabulary")
        if has_unknown:
            unknown[column, name] = whole[UNKNOWN_ROW : UNKNOWN_ROW + 1]
        tensors[column, name] = whole[int(has_unknown) :][order]
    return _Rows(ids=rising, tensors=tensors, unknown=unknown)


def described(about: Manifest, table: str, rows: int, rules: DynamicIds | None) -> None:
    """Writes into a manifest that a table has these rows and rules. None: it has a vocabulary, or row numbers."""
    model = about.fixed.get("model", {})
    tables = model.get("tables", {})
    for known in (tables, about.free.get("tables", {})):
        if table in known:
            known[table].pop("ids", None)
            known[table]["rows"] = rows
            if rules is not None:
                known[table]["ids"] = described_ids(rules)
    dynamic = {*model.pop("dynamic_ids", ())} - {table} | ({table} if rules is not None else set())
    if named := [name for name in tables if name in dynamic]:
        model["dynamic_ids"] = named


def with_encoding(known: Preprocessing, changed: Encoding) -> Preprocessing:
    """The preprocessing with another encoding of one table."""
    return replace(
        known,
        encodings=tuple(
            replace(changed, first=one.first) if one.name == changed.name else one for one in known.encodings
        ),
    )
