# SPDX-License-Identifier: Apache-2.0
"""What one attention computes: who attends to whom, how scores become weights, and which biases they get."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sennit.transport.errors import ArgumentError

ACTIVATIONS = ("softmax", "silu")
"""How scores become weights: normalized over a row, or each by itself, as HSTU does."""

MAX_DIM = 1024
"""The largest dim of a head."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `jagged_attention` but for query, key and value, checked against them.

    In the order of the operator's arguments.
    """

    position_bias: Tensor | None
    """float32 [H, P]."""

    time_bias: Tensor | None
    """float32 [H, boundaries + 1]."""

    offsets: Tensor
    """int64 [B + 1]: where sequences begin and where the last one ends."""

    targets: Tensor | None
    """int64 [B]: how many of the last positions of a sequence are candidates."""

    times: Tensor | None
    """int64 [rows]."""

    boundaries: Tensor | None
    """int64 [boundaries], rising."""

    activation: str
    scale: float
    divisor: float
    causal: bool
    context: int
    window: int | None

    @property
    def is_softmax(self) -> bool:
        return self.activation == "softmax"

    @property
    def bias_entries(self) -> int:
        """Entries of both biases of a head."""
        return sum(bias.shape[1] for bias in (self.position_bias, self.time_bias) if bias is not None)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises `ArgumentError` where an argument does not fit the others. Waits once for a device, if all is well."""
        _check_rows(query, key, value)
        rows, heads, _ = query.shape
        self._check_options(query.device, rows, heads)
        if bool(self._may_be_wrong(rows)):
            AttentionCall._check_values(self._on_the_host(), rows)

    def _check_options(self, device: torch.device, rows: int, heads: int) -> None:
        """What can be told without looking into tensors."""
        for name in ("position_bias", "time_bias", "offsets", "targets", "times", "boundaries"):
            given: Tensor | None = getattr(self, name)
            if given is not None and given.device != device:
                raise ArgumentError(f"{name} on {given.device}, query on {device}; allowed: one device")
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1 or len(self.offsets) == 0:
            raise ArgumentError(
                f"offsets: {self.offsets.dtype} {list(self.offsets.shape)}; allowed: int64 [sequences + 1]"
            )
        if self.activation not in ACTIVATIONS:
            raise ArgumentError(f"activation {self.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        if not math.isfinite(self.scale):
            raise ArgumentError(f"scale {self.scale}; allowed: a finite number")
        if not (math.isfinite(self.divisor) and self.divisor > 0):
            raise ArgumentError(f"divisor {self.divisor}; allowed: above 0")
        if self.is_softmax and self.divisor != 1:
            raise ArgumentError(f"divisor {self.divisor} with softmax, whose weights have the sum 1; allowed with silu")
        if self.context < 0:
            raise ArgumentError(f"context {self.context}; allowed: 0 or more")
        if self.window is not None and self.window < 0:
            raise ArgumentError(f"window {self.window}; allowed: 0 or more, or None")
        if self.targets is not None:
            _check_integers("targets", self.targets, len(self.offsets) - 1)
        for name, bias in (("position_bias", self.position_bias), ("time_bias", self.time_bias)):
            if bias is not None and (bias.dtype != torch.float32 or bias.dim() != 2 or bias.shape[0] != heads):
                raise ArgumentError(f"{name}: {bias.dtype} {list(bias.shape)}; allowed: float32 [{heads}, entries]")
        if self.position_bias is not None and self.position_bias.shape[1] == 0:
            raise ArgumentError("position_bias without an entry; allowed: 1 or more")
        if self.time_bias is None:
            if self.times is not None or self.boundaries is not None:
                raise ArgumentError("times or boundaries without time_bias, which they belong to")
            return
        if self.times is None or self.boundaries is None:
            raise ArgumentError("time_bias without times and boundaries; allowed: all three")
        _check_integers("times", self.times, rows)
        _check_integers("boundaries", self.boundaries, self.time_bias.shape[1] - 1)

    def _on_the_host(self) -> AttentionCall:
        there: dict[str, Any] = {
            field.name: one.cpu() for field in fields(self) if isinstance(one := getattr(self, field.name), Tensor)
        }
        return replace(self, **there)

    def _may_be_wrong(self, rows: int) -> Tensor:
        """Bool, on the device: what `_check_values` looks at, in one number."""
        lengths = self.offsets.diff()
        wrong = [self.offsets[0] != 0, self.offsets[-1] != rows, (lengths < 0).any()]
        if self.targets is not None:
            wrong.append(((self.targets < 0) | (self.targets > lengths)).any())
        if self.boundaries is not None:
            wrong.append((self._edges().diff() <= 0).any())
        if self.times is not None and rows >= 2 and len(lengths):
            wrong.append(self._backwards(self.times).any())
        return torch.stack(wrong).any()

    def _check_values(self, rows: int) -> None:
        lengths = self.offsets.diff()
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != rows or bool((lengths < 0).any()):
            raise ArgumentError(
                f"offsets from {int(self.offsets[0])} to {int(self.offsets[-1])}; allowed: from 0 to the number of "
                f"rows, {rows}, never falling"
            )
        if self.targets is not None:
            wrong = (self.targets < 0) | (self.targets > lengths)
            if wrong.any():
                at = int(wrong.nonzero()[0])
                raise ArgumentError(
                    f"sequence {at}: {int(self.targets[at])} targets; allowed: 0 to its length, {int(lengths[at])}"
                )
        if self.times is None or self.boundaries is None:
            return
        if not bool((self._edges().diff() > 0).all()):
            raise ArgumentError(f"boundaries {self.boundaries.tolist()}; allowed: rising, above 0")
        if rows < 2:
            return
        backwards = self._backwards(self.times)
        if backwards.any():
            row = int(backwards.nonzero()[0]) + 1
            sequence = int(torch.searchsorted(self.offsets, row, right=True)) - 1
            raise ArgumentError(
                f"sequence {sequence}, position {row - int(self.offsets[sequence])}: time {int(self.times[row])} after "
                f"{int(self.times[row - 1])}; allowed: times of a history that do not fall"
            )

    def _edges(self) -> Tensor:
        assert self.boundaries is not None
        return torch.cat([self.boundaries.new_zeros(1), self.boundaries])

    def _backwards(self, times: Tensor) -> Tensor:
        """Bool [rows - 1]: whether the time of row r + 1 is before that of row r, in one history.

        Candidates may have any time: nobody else attends to them.
        """
        row = torch.arange(1, len(times), device=times.device)
        # Of offsets that are wrong, too, this is a sequence.
        sequence = torch.searchsorted(self.offsets.contiguous(), row, right=True) - 1
        sequence = sequence.clamp(0, len(self.offsets) - 2)
        end = self.offsets[1:] if self.targets is None else self.offsets[1:] - self.targets
        is_later = (row > self.offsets[sequence]) & (row < end[sequence])
        return (times[1:] < times[:-1]) & is_later


def _check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if rows.dim() != 3 or rows.shape[:2] != query.shape[:2] or not 1 <= rows.shape[2] <= MAX_DIM:
            raise ArgumentError(
                f"{name} {list(rows.shape)}; allowed: [rows, heads, dim] with the rows and heads of the query, "
                f"{list(query.shape[:2])}, and dim 1 to {MAX_DIM}"
            )
        if rows.dtype != query.dtype or rows.dtype not in (torch.float32, torch.bfloat16):
            raise ArgumentError(f"{name} {rows.dtype}; allowed: float32 or bfloat16, as query, key and value alike")
        if rows.device != query.device:
            raise ArgumentError(f"{name} on {rows.device}, query on {query.device}; allowed: one device")
    if key.shape != query.shape:
        raise ArgumentError(f"key {list(key.shape)}; allowed: the shape of the query, {list(query.shape)}")
    if query.shape[1] == 0:
        raise ArgumentError("query without a head; allowed: 1 or more")


def _check_integers(name: str, given: Tensor, count: int) -> None:
    if given.dtype != torch.int64 or given.shape != (count,):
        raise ArgumentError(f"{name}: {given.dtype} {list(given.shape)}; allowed: int64 [{count}]")
