# SPDX-License-Identifier: Apache-2.0
"""Samples that a step leaves out because their loss is not finite (`--skip-samples`).

Such a sample counts as one of weight 0: what comes before its logit is computed again from zeros, so its gradients are
zeros, and no other sample's change. Slices alone decide bits. So what is left out is the same in any world, and so are
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.backend.torch_versions import jagged
from sennit.runtime.data.batch import Batch
from sennit.runtime.training.supply import Given

NAMED_MAX: Final = 20
"""Samples that a run names; others are counted alone."""

IDS_MAX: Final = 4
"""Ids of a table that are named with a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A sample that a step has left out."""

    step: int
    """Steps that were done, with this one."""

    sample: int
    """Its place in the global batch, which slices share in turn."""

    row: int | None
    """Its row in the stream, from 0; None: nobody knows, as with feeders."""

    group: int | None
    """Whose it is, with `--gauc`: the value of that column, or the hash of text."""

    tables: Mapping[str, Sequence[int]]
    """The tables of which it has a vector that is not finite, and its rows there: some of them."""

    ids: Mapping[str, Sequence[int]]
    """Its rows in all other tables: some of them, the last ones."""

    def text(self) -> str:
        where = f"sample {self.sample} of the batch" if self.row is None else f"row {self.row:,} of the stream"
        owner = "" if self.group is None else f", of group {self.group}"
        if self.tables:
            why = "not finite: " + ", ".join(f"table {name}, {_rows(ids)}" for name, ids in self.tables.items())
        else:
            why = "its vectors are finite"
        others = "; ".join(f"{name}: {_rows(ids)}" for name, ids in self.ids.items())
        return f"step {self.step} left out {where}{owner}: loss not finite; {why}" + (f" ({others})" if others else "")


def _rows(ids: Sequence[int]) -> str:
    return f"row{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}" if ids else "no row"


@dataclass(kw_only=True, slots=True)
class LeftOutSamples:
    """How many samples of all ranks were left out, and the first of them. Equal on all ranks."""

    count: int = 0
    named: list[LeftOut] = field(default_factory=list)

    def add(self, found: Sequence[LeftOut]) -> list[LeftOut]:
        """Adds what all ranks leave out in a step, `found` of them here. Returns all in the order of samples.
        Collective.
        """
        total = torch.tensor([len(found)])
        dist.all_reduce(total)
        if not (count := int(total)):
            return []
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(found))
        new = sorted((one for part in every for one in part), key=lambda one: one.sample)
        self.count += count
        self.named += new[: max(0, NAMED_MAX - len(self.named))]
        return new


def without(is_bad: Tensor, given: Given, vectors: Mapping[str, Any]) -> tuple[Given, dict[str, Any]]:
    """What a model gets with zeros in place of these samples, whose weights are 0. `is_bad`: bool [B]."""
    weights = torch.ones(len(is_bad)) if given.weights is None else given.weights
    kept = given._replace(
        dense=torch.where(is_bad.unsqueeze(1), 0.0, given.dense), weights=torch.where(is_bad, 0.0, weights)
    )
    return kept, {name: _zeroed(rows, is_bad) for name, rows in vectors.items()}


def described(
    is_bad: Tensor, *, step: int, first: int, batch: Batch, tables: Sequence[str], vectors: Mapping[str, Any]
) -> list[LeftOut]:
    """These samples by name. `first`: the place of this rank's first sample in the global batch."""
    offsets = [torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0)) for lengths in batch.lengths]
    values = dict(zip(tables, torch.split(batch.values, batch.lengths.sum(1).tolist()), strict=True))
    found = []
    for sample in is_bad.nonzero().squeeze(1).tolist():
        bad: dict[str, list[int]] = {}
        others: dict[str, list[int]] = {}
        for name, ends in zip(tables, offsets, strict=True):
            ids = values[name][ends[sample] : ends[sample + 1]]
            is_finite = _of_sample(vectors[name], sample).isfinite().all(-1)
            if bool(is_finite.all()):
                others[name] = ids[-IDS_MAX:].tolist()
            else:
                # A pooled vector does not tell which of its rows it is.
                bad[name] = sorted(set((ids if is_finite.ndim == 0 else ids[~is_finite]).tolist()))[:IDS_MAX]
        found.append(
            LeftOut(
                step=step,
                sample=first + sample,
                row=None if batch.rows is None else int(batch.rows[sample]),
                group=None if batch.groups is None else int(batch.groups[sample]),
                tables=bad,
                ids=others,
            )
        )
    return found


def _of_sample(vectors: Any, sample: int) -> Tensor:
    """[dim], or [ids, dim] of a nested tensor."""
    if not vectors.is_nested:
        found: Tensor = vectors.detach()[sample]
        return found
    offsets = vectors.offsets()
    rows: Tensor = vectors.values().detach()[offsets[sample] : offsets[sample + 1]]
    return rows


def _zeroed(vectors: Any, is_bad: Tensor) -> Any:
    """The vectors with zeros for some samples, which get no gradients."""
    if not vectors.is_nested:
        return torch.where(is_bad.unsqueeze(1), 0.0, vectors)
    offsets = vectors.offsets()
    is_bad_row = is_bad.repeat_interleave(offsets.diff())
    return jagged(torch.where(is_bad_row.unsqueeze(1), 0.0, vectors.values()), offsets)
