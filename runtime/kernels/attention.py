# SPDX-License-Identifier: Apache-2.0
"""Attention over jagged sequences for autograd and `torch.compile`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from sennit.runtime.kernels import reference_attention as reference
from sennit.runtime.kernels.attention_call import AttentionCall
from sennit.runtime.kernels.native_attention import NativeAttention
from sennit.transport.errors import ArgumentError, Unsupported

IMPLEMENTATIONS: Final = ("reference", "native", "native-avx512", "native-avx2", "native-portable", "triton")
"""Names that `jagged_attention` accepts. Three are for tests: the native implementation with fewer instructions.
AVX-512 is without the tiles that bfloat16 has otherwise."""


_watch: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def watch(enter: Callable[[], AbstractContextManager[object]] | None) -> None:
    """From now on what `enter` returns is entered around each forward and backward pass of attention in this process,
    in the thread that makes it. None: nothing is.
    """
    global _watch
    _watch = contextlib.nullcontext if enter is None else enter


class _Implementation(Protocol):
    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor | None = None,
    *,
    activation: Literal["softmax", "silu"] = "softmax",
    scale: float | None = None,
    divisor: float = 1.0,
    causal: bool = True,
    targets: Tensor | None = None,
    context: int = 0,
    window: int | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    boundaries: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attention within each of B sequences of different lengths, without padding.

    `query` and `key` are float32 or bfloat16 [rows, H, D], `value` is [rows, H, E] of the same dtype: the rows of all
    sequences, one after another. `offsets`, int64 [B + 1], says where they begin and where the last one ends. Or all
    three are nested, [B, *, H, D] of layout `torch.jagged`, without `offsets`. Returns the shape of `value`. Sums are
    made in float32. What a sequence gives does not depend on its neighbours, nor on the number of threads
    (`torch.get_num_threads`), to the bit: docs/reference/attention.md.

    Position i of a sequence attends to positions j <= i, with `causal=False` to all, each by
    `scale * query[i] . key[j]` (`scale` is 1 / sqrt(D) by default). `activation` makes weights of these scores:
    "softmax", or "silu", x * sigmoid(x) / `divisor`, as HSTU does (Zhai et al. 2024), where `divisor` is a constant of
    the model such as its longest history.

    - `targets`, int64 [B]: the last positions of a sequence are candidates. They attend to the history in front of
      them and to themselves. Nobody else attends to them.
    - `context`: the first positions, such as features of the user, attend to the whole history.
    - `window`: only positions at most so far apart attend. Candidates are one place behind the history, and
      the positions of the context share one place.
    - `position_bias`, float32 [H, P]: added to scores by distance; distances of P - 1 and more share the last entry.
    - `time_bias`, float32 [H, K + 1], with `times`, int64 [rows], and `boundaries`, int64 [K]: added to scores
      by the difference of times, entry k from `boundaries[k - 1]` up to below `boundaries[k]` (`torch.bucketize` with
      `right=True`). Times of a history never fall.

    - `implementation`: one of `IMPLEMENTATIONS`; None takes native on the CPU, and triton on a GPU.

    Raises `ArgumentError` where arguments do not fit each other, `Unsupported` for a device that an implementation
    cannot use.
    """
    # Torch's stubs know no nested tensors.
    nested: Any = query if query.is_nested else None
    if query.is_nested or key.is_nested or value.is_nested:
        if offsets is not None:
            raise ArgumentError("offsets beside nested tensors, which have their own; allowed: one of both")
        offsets, (query, key, value) = _of_nested(query, key, value)
    if offsets is None:
        raise ArgumentError("no offsets; allowed: offsets, or nested tensors of layout torch.jagged")
    if scale is None:
        scale = 1 / math.sqrt(max(1, query.shape[-1]))
    if implementation is None:
        implementation = "triton" if query.device.type == "cuda" else "native"
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(f"implementation {implementation!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    output: Tensor = torch.ops.sennit.jagged_attention(
        query,
        key,
        value,
        position_bias,
        time_bias,
        offsets,
        targets,
        times,
        boundaries,
        activation,
        scale,
        divisor,
        causal,
        context,
        window,
        implementation,
    )[0]
    if nested is None:
        return output
    return torch.nested.nested_tensor_from_jagged(output, nested.offsets())


def _of_nested(query: Any, key: Any, value: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if not rows.is_nested or rows.layout is not torch.jagged:
            raise ArgumentError(f"{name} of layout {rows.layout}; allowed: torch.jagged for query, key and value")
        if rows.dim() != 4 or isinstance(rows.shape[1], int) or rows.lengths() is not None:
            raise ArgumentError(
                f"{name} [{', '.join(map(str, rows.shape))}]; allowed: [B, *, H, D], contiguous (torch's own attention "
                "has [B, H, *, D]: use transpose(1, 2))"
            )
        if rows.offsets() is not query.offsets() and not torch.equal(rows.offsets(), query.offsets()):
            raise ArgumentError(f"{name} has other lengths than the query; allowed: equal lengths")
    return query.offsets(), (query.values(), key.values(), value.values())


def _implementation(name: str, device: torch.device) -> _Implementation:
    device_type = "cpu"
    found: _Implementation = reference
    if name == "triton":
        try:
            from sennit.runtime.kernels.triton_attention import TritonAttention
        except ModuleNotFoundError as error:
            raise Unsupported("implementation triton", str(error)) from error
        found = TritonAttention()
        device_type = found.device_type
    elif name != "reference":
        found = NativeAttention(name.removeprefix("native").removeprefix("-") or None, threads=torch.get_num_threads())
    if device.type != device_type:
        raise Unsupported(f"jagged attention by {name} on {device}", f"allowed: tensors on {device_type}")
    return found


# Of the operator and of its gradient; behind query, key and value the fields of AttentionCall.
_ARGUMENTS: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor? position_bias, Tensor? time_bias, Tensor offsets, "
    "Tensor? targets, Tensor? times, Tensor? boundaries, str activation, float scale, float divisor, bool causal, "
    "SymInt context, SymInt? window, str implementation"
)


@torch.library.custom_op("sennit::jagged_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, implementation = rest
    call = AttentionCall(*fields)
    call.check(query, key, value)
    with _watch():
        return _implementation(implementation, query.device).attend(call, query, key, value)


@_attend.register_fake
def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    is_softmax = AttentionCall(*rest[:-1]).is_softmax
    return (
        torch.empty_like(value, memory_format=torch.contiguous_format),
        query.new_empty((query.shape[0], query.shape[1], 2 if is_softmax else 0), dtype=torch.float32),
    )


@torch.library.custom_op(
    "sennit::jagged_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor statistics, bool wants_bias, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _differentiate(
    gradient: Tensor, statistics: Tensor, wants_bias: bool, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *fields, implementation = rest
    call = AttentionCall(*fields)
    with _watch():
        of_query, of_key, of_value, of_bias = _implementation(implementation, query.device).differentiate(
            call, query, key, value, gradient, statistics, wants_bias=wants_bias
        )
    positions = 0 if call.position_bias is None or not wants_bias else call.position_bias.shape[1]
    return of_query, of_key, of_value, of_bias[:, :positions].clone(), of_bias[:, positions:].clone()


@_differentiate.register_fake
def _differentiate_shape(
    gradient: Tensor,
    statistics: Tensor,
    wants_bias: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def of(bias: Tensor | None) -> Tensor:
        shape = (query.shape[1], 0 if bias is None or not wants_bias else bias.shape[1])
        return query.new_empty(shape, dtype=torch.float32)

    of_query, of_key, of_value = (
        torch.empty_like(rows, memory_format=torch.contiguous_format) for rows in (query, key, value)
    )
    return of_query, of_key, of_value, of(position_bias), of(time_bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = inputs[9:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *inputs[:9])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    statistics, *inputs = ctx.saved_tensors
    wants_position, wants_time = ctx.needs_input_grad[3:5]
    of_query, of_key, of_value, of_position, of_time = torch.ops.sennit.jagged_attention_backward(
        gradient, statistics, wants_position or wants_time, *inputs, *ctx.rest
    )
    return (
        of_query,
        of_key,
        of_value,
        of_position if wants_position else None,
        of_time if wants_time else None,
        *[None] * 11,
    )


_attend.register_autograd(_backward, setup_context=_keep)
