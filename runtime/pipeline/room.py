# SPDX-License-Identifier: Apache-2.0
"""Whether batches ahead of a step have room in host memory: they are refused before the first step if not.

The first batch that is sent says how large the others will be. A step adds the vectors of its batch and their
gradients. Each batch ahead adds a copy of its samples, and ids: this rank's, and those that came for its rows. One
batch ahead may be looked up already: it adds its vectors. All of this is certainly needed, and there is more that
nobody counts here, such as what the model keeps for its backward pass. So only what certainly has no room is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.sharded.memory_limits import host_place
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.sent import Sent
from sennit.runtime.sharded.shards import Announced
from sennit.transport._core import available_bytes
from sennit.transport.errors import ConfigError

_LEAVES: Final = (Tensor, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Bytes of host memory that one rank will need, and bytes that its host has left, when its first batch is there."""

    host: str
    """A name of the memory. Ranks with the same name share it."""

    step: int
    """Bytes for the batch that is computed."""

    ahead: int
    """Bytes for each batch ahead."""

    looked_up: int
    """Bytes for the batch that is looked up ahead; 0 if none is."""

    available: int

    def bytes_with(self, depth: int) -> int:
        """What the rank needs with this many batches ahead."""
        return self.step + depth * self.ahead + (self.looked_up if depth else 0)


def check_room(
    batch: Any, tables: Sequence[ShardedTables], sent: Sequence[Sent], *, depth: int, group: dist.ProcessGroup | None
) -> None:
    """Raises `ConfigError` on all ranks if a host has no room for `depth` batches ahead of a step. Collective.

    `batch`: the first one on this rank. `sent`: what each of `tables` has sent of it.
    """
    vectors = [
        module.result_bytes(one) if module.device.type == "cpu" else 0 for module, one in zip(tables, sent, strict=True)
    ]
    need = Need(
        host=host_place(),
        step=2 * sum(vectors),
        ahead=host_bytes((batch, [one.arrived for one in sent])),
        looked_up=sum(size for module, size in zip(tables, vectors, strict=True) if module.looks_ahead),
        available=available_bytes(),
    )
    needs: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(needs, need, group=group)
    if (reason := refusal(needs, depth)) is not None:
        raise ConfigError(reason)


def refusal(needs: Sequence[Need], depth: int) -> str | None:
    """The reason to refuse this many batches ahead; None if they have room. `needs`: one for each rank."""
    ranks = next((ranks for ranks in _by_host(needs) if not _has_room(needs, ranks, depth)), None)
    if ranks is None:
        return None
    named = f"rank {ranks[0]} needs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} of one host need"
    ahead = sum(needs[rank].ahead for rank in ranks)
    return (
        f"{_batches(depth)} ahead of a step: {named} {_needed(needs, ranks, depth):,} bytes, {ahead:,} of them for "
        f"each batch ahead, and {_available(needs, ranks):,} bytes are left there; {_advice(fitting(needs, depth))}"
    )


def fitting(needs: Sequence[Need], depth: int) -> int | None:
    """The most batches ahead, up to `depth`, that all hosts have room for; None if they have none for 0."""
    hosts = _by_host(needs)
    return next(
        (one for one in range(depth, -1, -1) if all(_has_room(needs, ranks, one) for ranks in hosts)),
        None,
    )


def _by_host(needs: Sequence[Need]) -> list[list[int]]:
    hosts = dict.fromkeys(need.host for need in needs)
    return [[rank for rank, need in enumerate(needs) if need.host == host] for host in hosts]


def _needed(needs: Sequence[Need], ranks: Sequence[int], depth: int) -> int:
    return sum(needs[rank].bytes_with(depth) for rank in ranks)


def _available(needs: Sequence[Need], ranks: Sequence[int]) -> int:
    # The ranks of a host measured at different moments.
    return min(needs[rank].available for rank in ranks)


def _has_room(needs: Sequence[Need], ranks: Sequence[int], depth: int) -> bool:
    return _needed(needs, ranks, depth) <= _available(needs, ranks)


def _batches(depth: int) -> str:
    return "1 batch" if depth == 1 else f"{depth} batches"


def _advice(depth: int | None) -> str:
    if depth is None:
        return "a step alone does not fit: give smaller batches, or more hosts"
    return f"{_batches(depth)} ahead would fit. Give {depth}, or smaller batches"


def host_bytes(given: Any) -> int:
    """The bytes of all tensors and arrays in host memory that `given` holds, each counted once.

    Looks into mappings, sequences and dataclasses. Of any other object it looks at the attributes, but not into them,
    because they may lead anywhere.
    """
    sizes: dict[tuple[int, int], int] = {}
    for one in _leaves(given):
        if isinstance(one, np.ndarray):
            sizes[one.ctypes.data, one.nbytes] = one.nbytes
        elif one.device.type == "cpu" and one.layout is torch.strided:
            sizes[one.data_ptr(), one.nbytes] = one.nbytes
    return sum(sizes.values())


def _leaves(given: Any) -> Iterator[Tensor | np.ndarray]:
    waiting, seen = [given], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case Tensor() | np.ndarray():
                yield one
            case Announced():
                waiting.append(one.batch)
            case Mapping():
                waiting += one.values()
            case list() | tuple():
                waiting += one
            case _ if is_dataclass(one):
                waiting += [getattr(one, field.name, None) for field in fields(one)]
            case _:
                waiting += [value for value in getattr(one, "__dict__", {}).values() if isinstance(value, _LEAVES)]
