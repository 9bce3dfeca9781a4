# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU in C++ (runtime/kernels/csrc), for the best instruction set of the processor."""

from __future__ import annotations

import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels
from sennit.runtime.kernels.attention_call import AttentionCall

EVERYWHERE = 2**62
"""A window that no sequence is longer than."""


class NativeAttention:
    """The functions of `reference`, with the same bits. No number of threads changes one."""

    def __init__(self, instruction_set: str | None = None, *, threads: int = 1) -> None:
        """`instruction_set`: one that this processor has; None for the best one."""
        self._instruction_set = instruction_set or _kernels.attention_sets()[0]
        self._threads = threads

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        statistics = torch.empty(*query.shape[:2], 2 if call.is_softmax else 0)
        _Native(self._instruction_set, call, query, key, value).native.attend(
            _rows(output), statistics.data_ptr(), self._threads
        )
        return output, statistics

    def differentiate(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gradient: Tensor,
        statistics: Tensor,
        *,
        wants_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradient = _inner(gradient)
        of_query, of_key, of_value = (
            torch.empty_like(rows, memory_format=torch.contiguous_format) for rows in (query, key, value)
        )
        entries = call.bias_entries if wants_bias else 0
        sequences = len(call.offsets) - 1
        of_bias = torch.zeros(sequences + 1 if entries else 1, query.shape[1], entries)
        _Native(self._instruction_set, call, query, key, value).native.differentiate(
            _rows(gradient),
            statistics.data_ptr(),
            _rows(of_query),
            _rows(of_key),
            _rows(of_value),
            of_bias.data_ptr() if entries else 0,
            self._threads,
        )
        return of_query, of_key, of_value, of_bias[-1]


class _Native:
    """A call for C++, which gets addresses: the tensors live as long as this object."""

    def __init__(self, instruction_set: str, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._rows = query, key, value = _inner(query), _inner(key), _inner(value)
        self._others = offsets, targets, position_bias, time_bias, times, boundaries = [
            None if tensor is None else tensor.contiguous()
            for tensor in (
                call.offsets,
                call.targets,
                call.position_bias,
                call.time_bias,
                call.times,
                call.boundaries,
            )
        ]
        self.native = _kernels.Attention(
            instruction_set,
            _rows(query),
            _rows(key),
            _rows(value),
            _address(offsets),
            _address(targets),
            len(call.offsets) - 1,
            query.shape[1],
            call.context,
            call.scale,
            1 / call.divisor,
            call.is_softmax,
            call.causal,
            query.dtype == torch.bfloat16,
            EVERYWHERE if call.window is None else call.window,
            (_address(position_bias), 0 if position_bias is None else position_bias.shape[1]),
            (_address(time_bias), 0 if time_bias is None else time_bias.shape[1]),
            _address(times),
            _address(boundaries),
        )


def _inner(rows: Tensor) -> Tensor:
    """[rows, heads, dim] whose last stride is 1 and whose others are not negative or 0."""
    return rows if rows.stride(2) == 1 and rows.stride(0) > 0 else rows.contiguous()


def _rows(rows: Tensor) -> tuple[int, int, int, int]:
    return rows.data_ptr(), rows.stride(0), rows.stride(1), rows.shape[2]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
