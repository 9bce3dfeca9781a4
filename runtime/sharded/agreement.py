# SPDX-License-Identifier: Apache-2.0
"""All ranks agree: on the model when it is made, and in each step on whether the input of every rank is good."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator_or_names
from sennit.runtime.kernels.checks import GradientError, IdError
from sennit.runtime.sharded.initial import described_initial
from sennit.runtime.sharded.placement import Placement
from sennit.runtime.sharded.sent import InputEnded
from sennit.runtime.sharded.tables import Table, shard_name, shards_of
from sennit.transport.codecs import Codec
from sennit.transport.errors import ArgumentError, ConfigError, SennitError

_T = TypeVar("_T")
_UNTOLD: Final = -1
"""A rank does not say how many samples all ranks have."""


class Status(IntEnum):
    """Whether the input of a rank is good. All ranks learn it before the rest of a step travels."""

    GOOD = 0
    ID_OUTSIDE = 1
    BAD_INPUT = 2
    BAD_GRADIENT = 3
    ENDED = 4


class PeerInputError(ArgumentError):
    """The input of another rank is wrong. The message names the rank. Nothing has been changed on any rank."""


def check_agreement(
    described: Mapping[str, str], group: dist.ProcessGroup | None, *, warned: Collection[str] = ()
) -> None:
    """Raises `ConfigError` on all ranks, with both values, if the ranks do not describe everything alike. Collective.

    If only descriptions of `warned` differ, warns that bits may differ.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    all_of_them: list[Any] = [None] * world_size
    dist.all_gather_object(all_of_them, dict(described), group=group)
    first: Mapping[str, str] = all_of_them[0]
    for rank, other in enumerate(all_of_them):
        for key in sorted(first.keys() | other.keys()):
            ours, theirs = first.get(key, "nothing"), other.get(key, "nothing")
            if ours != theirs:
                what = f"{key}: rank 0 has {ours}, rank {rank} has {theirs}"
                if key not in warned:
                    raise ConfigError(f"{what}; all ranks must have the same")
                warnings.warn(f"{what}; bits may differ", stacklevel=3)


def described(tables: Sequence[Table], *, lr: float, slices: int, gradients: str, seed: int) -> dict[str, str]:
    """The settings of a model of sharded tables that decide bits, for `check_agreement`."""
    found = {"lr": str(lr), "slices": str(slices), "gradients": gradients, "seed": str(seed)}
    found["tables"] = ", ".join(table.name for table in tables)
    for table in tables:
        for field in table.__dataclass_fields__:
            if field not in ("initial", "home"):
                found[f"table {table.name}: {field}"] = str(getattr(table, field))
        found[f"table {table.name}: initial"] = described_initial(table, seed)
    return found


def described_homes(tables: Sequence[Table]) -> dict[str, str]:
    """The home that each table names. It decides no bit, but what ranks exchange."""
    return {f"table {table.name}: home": "none" if table.home is None else table.home.value for table in tables}


def described_placement(tables: Sequence[Table], placement: Placement | str | Mapping[str, str]) -> dict[str, str]:
    """What decides the rank of each shard: the placement, the name of a sharding, or names by table."""
    if isinstance(placement, Placement):
        return described_owners(tables, placement)
    if isinstance(placement, str):
        return {"placement": placement}
    return {f"placement of table {name}": sharding for name, sharding in placement.items()}


def described_owners(tables: Sequence[Table], placement: Placement) -> dict[str, str]:
    """The rank of each shard."""
    return {f"owner of {shard_name(tables, shard)}": str(placement.owner_of[shard]) for shard in shards_of(tables)}


def check_codec(codec: Codec | None, group: dist.ProcessGroup | None) -> None:
    """Raises `ConfigError` for a codec in a group of another backend than sennit."""
    names = communicator_or_names(group) if codec is not None else None
    if isinstance(names, list):
        raise ConfigError(f"a codec over {', '.join(dict.fromkeys(names))}; allowed: backend sennit, or codec=None")


def exchange_headers(
    error: Exception | None,
    global_batch: int | None,
    counts: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
    *,
    alike: Mapping[str, str],
) -> list[list[int]]:
    """Tells each rank the status of this one, and the numbers `counts[rank]`. Returns what each rank tells this one.

    Collective. Raises on all ranks if one has an `error`, if global batches differ, or the settings in `alike`.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        if error is not None:
            raise error
        return [list(own) for own in counts]
    head = [_status(error), _UNTOLD if global_batch is None else global_batch, _fingerprint(alike)]
    mine = torch.tensor([[*head, *own] for own in counts], dtype=torch.int64)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    found: list[list[int]] = theirs.tolist()
    if error is not None and not isinstance(error, InputEnded):
        raise error
    ended: Exception | None = error
    for rank, (status, *_) in enumerate(found):
        match Status(status):
            case Status.GOOD:
                continue
            case Status.ENDED:
                ended = ended or InputEnded(f"rank {rank} has no further batch")
            case Status.ID_OUTSIDE:
                raise PeerInputError(f"rank {rank} has an id outside its table; its own error names it")
            case Status.BAD_INPUT:
                raise PeerInputError(f"the input of rank {rank} is wrong; its own error says how")
            case Status.BAD_GRADIENT:
                raise GradientError(
                    f"rows of rank {rank} had a gradient in the last step that is not finite; its own error names them"
                )
    if ended is not None:
        raise ended
    for rank, (_, other, *_) in enumerate(found):
        if other != head[1]:
            here, there = ("none" if told == _UNTOLD else f"{told}" for told in (head[1], other))
            raise ArgumentError(
                f"global_batch {here} on rank {dist.get_rank(group)}, {there} on rank {rank}; all ranks must give the "
                "same"
            )
    if any(fingerprint != head[2] for _, _, fingerprint, *_ in found):
        check_agreement(alike, group)
    return [row[len(head) :] for row in found]


def rows_on_all(fetch: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Calls `fetch`, which waits for this rank's rows. Raises on all ranks if one does not get its rows. Collective.

    A batch that does not fit a cache raises `ConfigError`, with the same words on all ranks. Any other error is raised
    on its own rank, and `SennitError` with its words on the others.
    """
    error: Exception | None = None
    try:
        fetch()
    except Exception as bad:  # Any type, because the other ranks wait for this one.
        error = bad
    if dist.get_world_size(group) > 1:
        failed = torch.tensor([error is not None], dtype=torch.int64)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failed.item():
            _raise_for_all(error, group)
    elif error is not None:
        raise error


def made_on_all(make: Callable[[], _T], what: str, group: dist.ProcessGroup | None) -> _T:
    """Returns what `make` returns. If `make` raises on one rank, the others raise `SennitError` with its words.

    Collective.     `what`: what that rank could not do, for the error.
    """
    made: list[_T] = []
    error: Exception | None = None
    try:
        made.append(make())
    except Exception as bad:  # Any type, because the other ranks wait for this one.
        error = bad
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, error and f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise SennitError(f"rank {rank} could not {what}: {text}")
    return made[0]


def _raise_for_all(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    told: list[Any] = [None] * dist.get_world_size(group)
    own = error and (isinstance(error, ConfigError), f"{error}", type(error).__name__, getattr(error, "__notes__", []))
    dist.all_gather_object(told, own, group=group)
    if error is not None and not isinstance(error, ConfigError):
        raise error
    for rank, one in enumerate(told):
        if one is not None:
            is_same, text, kind, notes = one
            if is_same:
                raise ConfigError(text)
            # A note says what failed.
            where, *_ = *(f": {kind}: {text}; {note}" for note in notes), f" could not read rows: {kind}: {text}"
            raise SennitError(f"rank {rank}{where}")


def _fingerprint(settings: Mapping[str, str]) -> int:
    """Int64, the same on all ranks whose settings are equal."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _status(error: Exception | None) -> Status:
    if error is None:
        return Status.GOOD
    if isinstance(error, GradientError):
        return Status.BAD_GRADIENT
    if isinstance(error, InputEnded):
        return Status.ENDED
    return Status.ID_OUTSIDE if isinstance(error, IdError) else Status.BAD_INPUT
