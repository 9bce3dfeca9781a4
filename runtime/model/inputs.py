# SPDX-License-Identifier: Apache-2.0
"""What the models of `sennit train` share: inputs, multi-layer perceptrons, and initial weights.

A user's factory gets the same `ModelInputs` (docs/reference/models.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError

ATTENTION_PRECISIONS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What products of attention are made of, by name."""


def mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Linear layers from `widths[0]` inputs to `widths[-1]` outputs, with ReLU between them."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last_relu or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def initialise(model: nn.Module, seed: int) -> None:
    """Initial weights: normal, with the deviations of DLRM's reference code.

    Each parameter has a stream of its own, so it depends on seed, name and shape alone.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            outputs = parameter.shape[0]
            variance = 2 / (outputs + parameter.shape[1]) if parameter.ndim == 2 else 1 / outputs
            parameter.normal_(0, variance**0.5, generator=torch_stream(seed, "dense", name))


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryInputs:
    """What a model gets of a sample's history."""

    own: tuple[str, ...]
    """The tables of which it gets the vectors of the history, oldest first, and then the sample's own."""

    past: tuple[str, ...]
    """The tables of which it gets the vectors of the history alone: nobody knows the sample's own yet."""

    times: str | None
    """The integers that are the times of the history and of the sample; None: there are none."""

    last: int
    """Events of a history at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What a model gets of each sample, and the widths that were asked for. The same on all ranks.

    The model is called as `model(dense, vectors)`. `dense` is float32 [B, dense_count], `vectors` has for each table a
    float32 tensor [B, dim] by its name, and the result is a logit for each sample, [B], or [B, label_count] if samples
    have several labels.

    A model whose factory has `reads_histories = True` is called as `model(dense, vectors, integers)`, with nested
    tensors of layout `torch.jagged` by name: `vectors` [B, *, dim] has a row for each id, `integers` is [B, *].
    """

    dense_count: int
    """Dense features; may be 0."""

    tables: tuple[Table, ...]
    """Tables in the order of the data's columns, with their names. A sample has a vector of each: its pooled rows."""

    bottom: tuple[int, ...] = ()
    """Hidden widths of the MLP on the dense features, if the model has one."""

    top: tuple[int, ...] = ()
    """Hidden widths of the MLP on everything else."""

    seed: int = 0
    """The seed of the run."""

    label_count: int = 1
    """Labels of a sample."""

    history: HistoryInputs | None = None
    """The histories of samples; None: the model reads none, or the data have none."""

    layers: int = 2
    """Layers of a model that attends."""

    heads: int = 2
    """Heads of each of these layers."""

    attention: str = "fp32"
    """Precision of the products of attention, "fp32" or "bf16". Sums are made in float32."""

    def __post_init__(self) -> None:
        if self.dense_count < 0:
            raise ConfigError(f"{self.dense_count} dense features; allowed: 0 or more")
        if self.label_count < 1:
            raise ConfigError(f"{self.label_count} labels; allowed: 1 or more")
        if not self.tables:
            raise ConfigError("a model without tables; allowed: one or more")
        for name, count in (("layers", self.layers), ("heads", self.heads)):
            if count < 1:
                raise ConfigError(f"{count} {name}; allowed: 1 or more")
        if self.attention not in ATTENTION_PRECISIONS:
            raise ConfigError(f"attention {self.attention!r}; allowed: {', '.join(ATTENTION_PRECISIONS)}")
        for name, widths in (("bottom", self.bottom), ("top", self.top)):
            for width in widths:
                if width < 1:
                    raise ConfigError(f"width in the {name} MLP {width}; allowed: 1 or more")

    def __str__(self) -> str:
        """The inputs in words, with the names of the tables."""
        tables = ", ".join(f"{table.name} ({table.dim} columns)" for table in self.tables)
        return f"{self.dense_count} dense features, tables {tables}, bottom {self.bottom}, top {self.top}"

    def logits_shape(self, samples: int) -> tuple[int, ...]:
        """The shape of what a model returns for so many samples, and of their labels."""
        return (samples,) if self.label_count == 1 else (samples, self.label_count)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(table.name for table in self.tables)

    @property
    def width(self) -> int:
        """Numbers that a model sees of a sample: dense features and the columns of all tables."""
        return self.dense_count + sum(table.dim for table in self.tables)

    def common_dim(self, model: str) -> int:
        """The dim of all tables. Raises `ConfigError` that names two which differ: `model` multiplies vectors."""
        first = self.tables[0]
        for table in self.tables:
            if table.dim != first.dim:
                raise ConfigError(
                    f"{model} multiplies the vectors of tables, but table {first.name} has dim {first.dim} and table "
                    f"{table.name} has dim {table.dim}; allowed: one dim for all tables, or the model dcnv2"
                )
        return first.dim


def in_order(vectors: dict[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """The vectors of these tables. The order of the dictionary must not matter."""
    return [vectors[name] for name in names]
