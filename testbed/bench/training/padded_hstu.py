# SPDX-License-Identifier: Apache-2.0
"""The model `hstu` in padded plain torch, the peer of benchmarks: tensors [samples, longest, ...], and one mask.

It has the parameters of ours with the same initial values, so one trained state fits both. Scores are whole matrices,
of which the mask takes a half and the padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sennit.runtime.data.batch import Batch
from sennit.runtime.model.hstu import TIME_BUCKETS, Hstu, key
from sennit.runtime.model.inputs import HistoryInputs, ModelInputs
from sennit.runtime.sharded.outputs import nested
from sennit.runtime.training.supply import integers_by_name
from sennit.testbed.bench.training.plain_torch import PlainTorch


class PaddedHstu(Hstu):
    """The same parameters, names and initial values as `Hstu`."""

    def forward(self, dense: Tensor, vectors: dict[str, Any], integers: dict[str, Any]) -> Tensor:
        history: HistoryInputs = self.history
        lengths = vectors[history.own[0]].offsets().diff()
        longest, context = int(lengths.max()), self.context_length
        event: Any = sum(self.events[key(name)](_padded(vectors[name], longest)) for name in history.own)
        for name in history.past:
            rows = self.events[key(name)](_padded(vectors[name], longest))
            event = event + rows * _is_there(lengths - 1, longest).unsqueeze(2)
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, event.shape[2])
        candidate = event.gather(1, last).squeeze(1)
        about = self.about(dense, vectors)
        rows = torch.cat([about, event], 1)
        place = torch.arange(context + longest)
        place = torch.where(place < context, 0, place - context + 1)
        distance = (place[:, None] - place[None, :]).abs().clamp(max=context + history.last)
        attends = torch.ones(len(place), len(place), dtype=torch.bool).tril()
        attends[:context] = True
        is_there = F.pad(_is_there(lengths, longest), (context, 0), value=True)
        # Nobody but itself attends to the candidate, which is the last one of its sequence.
        is_candidate = torch.zeros_like(is_there).scatter(1, (lengths - 1 + context).unsqueeze(1), True)
        mask = attends & is_there.unsqueeze(1) & (~is_candidate.unsqueeze(1) | is_candidate.unsqueeze(2))
        bucket = None if history.times is None else self._buckets(integers[history.times], longest)
        for layer in self.layers:
            rows = _through(layer, rows, mask, distance, bucket, float(context + history.last + 1))
        found = self.norm(rows.gather(1, last + context).squeeze(1))
        logits: Tensor = self.head(torch.cat([found, found * candidate, about.flatten(1)], 1))
        return logits.squeeze(1)

    def _buckets(self, times: Any, longest: int) -> Tensor:
        padded = _padded(times, longest)
        whole = torch.cat([padded[:, :1].expand(-1, self.context_length), padded], 1)
        since = (whole.unsqueeze(2) - whole.unsqueeze(1)).abs()
        boundaries = 2 ** torch.arange(TIME_BUCKETS - 1)
        return torch.bucketize(since, boundaries, right=True)


def _through(layer: Any, x: Tensor, mask: Tensor, distance: Tensor, bucket: Tensor | None, divisor: float) -> Tensor:
    samples, length, width = x.shape
    gate, value, query, key_ = F.silu(layer.split(layer.before(x))).chunk(4, 2)
    heads = layer.position_bias.shape[0]
    query, key_, value = (part.view(samples, length, heads, -1).transpose(1, 2) for part in (query, key_, value))
    scores = query @ key_.transpose(2, 3) / query.shape[3] ** 0.5 + layer.position_bias[:, distance]
    if bucket is not None:
        scores = scores + layer.time_bias[:, bucket].transpose(0, 1)
    weights = F.silu(scores) / divisor * mask.unsqueeze(1)
    found = (weights @ value).transpose(1, 2).reshape(samples, length, width)
    added: Tensor = layer.out(layer.after(found) * gate)
    return x + added


def _padded(sequences: Any, longest: int) -> Tensor:
    """[samples, longest, ...], zeros behind the end."""
    lengths = sequences.offsets().diff()
    rows: Tensor = sequences.values()
    whole = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    return whole.index_put(tuple(_is_there(lengths, longest).nonzero().T), rows)


def _is_there(lengths: Tensor, longest: int) -> Tensor:
    """Bool [samples, longest]."""
    return torch.arange(longest) < lengths.unsqueeze(1)


class PaddedTorch(PlainTorch):
    """`PlainTorch` with `PaddedHstu`: a lookup gives the row of each id."""

    def _model(self, inputs: ModelInputs) -> nn.Module:
        return PaddedHstu(inputs)

    def _logits(self, batch: Batch, weights: Any) -> Tensor:
        found = {name: F.embedding(ids, weights[name], sparse=True) for name, (_, ids) in self.ids(batch).items()}
        integers = {} if batch.integers is None else integers_by_name(self.source.integer_names, batch.integers)
        logits: Tensor = self.model(batch.dense, nested(found, batch.lengths), integers)
        return logits
