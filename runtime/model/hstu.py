# SPDX-License-Identifier: Apache-2.0
"""HSTU: attention over a user's history, and a ranking head on the candidate behind it."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.attention import jagged_attention
from sennit.runtime.model.inputs import ATTENTION_PRECISIONS, ModelInputs, initialise, mlp
from sennit.transport.errors import ConfigError

TIME_BUCKETS: Final = 40
"""Differences of times share a bias between powers of two: bucket k > 0 begins at 2^(k - 1). 2^39 s are 17,000 years.
"""

BIAS_DEVIATION: Final = 0.02
"""Standard deviation of the biases of attention at the beginning."""


class HstuLayer(nn.Module):
    """Rows [rows, width] of all sequences -> rows, by equations 1 to 3 of the paper.

    U, V, Q, K = split(SiLU(linear(norm(X)))); X + linear(norm(attention(Q, K, V)) * U).
    """

    def __init__(self, width: int, heads: int, positions: int, *, has_times: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._heads, self._positions, self._dtype = heads, positions, dtype
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.position_bias = nn.Parameter(torch.empty(heads, positions))
        self.time_bias = nn.Parameter(torch.empty(heads, TIME_BUCKETS)) if has_times else None

    def forward(self, rows: Tensor, attend: Any) -> Tensor:
        gate, value, query, key = nn.functional.silu(self.split(self.before(rows))).chunk(4, 1)
        query, key, value = (part.reshape(len(rows), self._heads, -1).to(self._dtype) for part in (query, key, value))
        # The divisor is a constant of the model, so a history weighs the same however long its neighbours are.
        found = attend(
            query,
            key,
            value,
            divisor=float(self._positions),
            position_bias=self.position_bias,
            time_bias=self.time_bias,
        )
        added: Tensor = self.out(self.after(found.to(rows.dtype).reshape(len(rows), -1)) * gate)
        return rows + added


class Hstu(nn.Module):
    """Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
    Recommendations", ICML 2024.

    A sample is one sequence: features of the user and of the moment (context), then the events of the history, then the
    candidate. An event is the sum of linear maps of its vectors, among them what is known only afterwards (`past`, the
    action), which the candidate lacks. The paper interleaves items and actions; one position for an event is what its
    authors' later ranking model has. Layers attend causally, with biases by distance and by time. The head is an MLP
    (`inputs.top`) on the candidate's row, on its product with the candidate's own vector, and on the context.
    """

    def __init__(self, inputs: ModelInputs) -> None:
        """Raises `ConfigError` for inputs without a history, and for a width that heads do not share evenly."""
        super().__init__()
        history = inputs.history
        if history is None:
            raise ConfigError(
                "hstu reads histories, and these data have none; allowed: data with a [history] in their schema "
                "(docs/reference/data-sets.md), or another model"
            )
        self.history = history
        self._others = tuple(name for name in inputs.names if name not in (*history.own, *history.past))
        dims = {table.name: table.dim for table in inputs.tables}
        width = dims[history.own[0]]
        if width % inputs.heads:
            raise ConfigError(
                f"hstu: {width} columns of table {history.own[0]} for {inputs.heads} heads; allowed: a multiple of "
                "the heads"
            )
        self.events = nn.ModuleDict(
            {key(name): nn.Linear(dims[name], width, bias=False) for name in (*history.own, *history.past)}
        )
        self.context = nn.ModuleDict({key(name): nn.Linear(dims[name], width) for name in self._others})
        self.dense = mlp([inputs.dense_count, *inputs.bottom, width], last_relu=False) if inputs.dense_count else None
        self.context_length = len(self._others) + (self.dense is not None)
        positions = self.context_length + history.last + 1
        dtype = ATTENTION_PRECISIONS[inputs.attention]
        self.layers = nn.ModuleList(
            HstuLayer(width, inputs.heads, positions, has_times=history.times is not None, dtype=dtype)
            for _ in range(inputs.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = mlp([(2 + self.context_length) * width, *inputs.top, inputs.label_count], last_relu=False)
        # Not a buffer, because DDP would broadcast it before each forward pass.
        self._boundaries = 2 ** torch.arange(TIME_BUCKETS - 1)
        initialise(self, inputs.seed)
        self._initialise_rest(inputs.seed)

    def _initialise_rest(self, seed: int) -> None:
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.reset_parameters()
            for name, parameter in self.named_parameters():
                if name.endswith("_bias"):
                    parameter.normal_(0, BIAS_DEVIATION, generator=torch_stream(seed, "dense", name))

    def forward(self, dense: Tensor, vectors: dict[str, Any], integers: dict[str, Any]) -> Tensor:
        """-> logits, [B] of one label.

        `dense` is [B, D]. `vectors` are nested [B, *, dim] by table, of layout `torch.jagged`: those of `own` have the
        history and the candidate, those of `past` the history alone. `integers` are nested [B, *].
        """
        own, context = self.history.own, self.context_length
        lengths = vectors[own[0]].offsets().diff()
        events = sum(self.events[key(name)](vectors[name].values()) for name in own)
        candidates = lengths.cumsum(0) - 1
        if self.history.past:
            is_past = torch.ones(len(events), dtype=torch.bool, device=events.device)
            is_past[candidates] = False
            known = sum(self.events[key(name)](vectors[name].values()) for name in self.history.past)
            events = events.index_add(0, is_past.nonzero().squeeze(1), known)
        candidate = events.index_select(0, candidates)
        about = self.about(dense, vectors)
        # All context first, then all events: where each position of each sequence is among them.
        order = _interleaved(lengths, context)
        rows = torch.cat([about.reshape(-1, about.shape[2]), events]).index_select(0, order)
        offsets = nn.functional.pad((lengths + context).cumsum(0), (1, 0))
        attend = functools.partial(
            jagged_attention,
            offsets=offsets,
            activation="silu",
            context=context,
            targets=torch.ones_like(lengths),
            times=self._times(integers, lengths, order),
            boundaries=None if self.history.times is None else self._boundaries_on(rows.device),
        )
        for layer in self.layers:
            rows = layer(rows, attend)
        found = self.norm(rows.index_select(0, offsets[1:] - 1))
        logits: Tensor = self.head(torch.cat([found, found * candidate, about.flatten(1)], 1))
        return logits.squeeze(1)

    def about(self, dense: Tensor, vectors: dict[str, Any]) -> Tensor:
        """[B, context, width]: features that are no sequences. Several vectors of one are added up."""
        found = [
            self.context[key(name)](
                torch.segment_reduce(vectors[name].values(), "sum", lengths=vectors[name].offsets().diff(), initial=0)
            )
            for name in self._others
        ]
        if self.dense is not None:
            found.append(self.dense(dense))
        return torch.stack(found, 1) if found else dense.new_empty(len(dense), 0, self.norm.normalized_shape[0])

    def _boundaries_on(self, device: torch.device) -> Tensor:
        """They are copied to a device once."""
        if self._boundaries.device != device:
            self._boundaries = self._boundaries.to(device)
        return self._boundaries

    def _times(self, integers: dict[str, Any], lengths: Tensor, order: Tensor) -> Tensor | None:
        """Int64 [rows]. The context has the time of the first event."""
        if self.history.times is None:
            return None
        times = integers[self.history.times]
        begins = times.values().index_select(0, lengths.cumsum(0) - lengths)
        whole = torch.cat([begins.repeat_interleave(self.context_length), times.values()])
        return whole.index_select(0, order)


def key(name: str) -> str:
    """The name of a table as that of a module, which has no points."""
    return name.replace(".", "_")


def _interleaved(lengths: Tensor, context: int) -> Tensor:
    """Int64 [rows]: for each position of each sequence its place among B * context rows of context, and the events."""
    samples = len(lengths)
    whole = lengths + context
    owner = torch.arange(samples, device=lengths.device).repeat_interleave(whole)
    place = torch.arange(len(owner), device=lengths.device) - (whole.cumsum(0) - whole).index_select(0, owner)
    begins = samples * context + lengths.cumsum(0) - lengths - context
    return torch.where(place < context, owner * context + place, begins.index_select(0, owner) + place)
