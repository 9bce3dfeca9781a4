# SPDX-License-Identifier: Apache-2.0
"""What tests of several algorithms share: each runs the plans of all ranks and compares with the definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from sennit.transport.oracle import reference
from sennit.transport.plans.arithmetic import fold, narrow
from sennit.transport.plans.elements import COMPLEXES, FLOATS, Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan, Recv, Send
from sennit.transport.plans.plan_codec import decode, encode

Array = npt.NDArray[Any]
Run = Callable[[st.DataObject, Sequence[Plan], Sequence[Sequence[Array]]], None]
Kind = tuple[Dtype, ReduceOp]

SCALAR = 0.75


def hosts_of(widths: Sequence[int]) -> Hosts:
    hosts = Hosts.of([host for host, width in enumerate(widths) for _ in range(width)])
    assert hosts is not None
    return hosts


def cut(widths: Sequence[int], world: int) -> list[int]:
    """Widths of hosts with `world` ranks in all."""
    ends = sorted({min(end, world) for end in (*itertools.accumulate(widths), world)})
    return [high - low for low, high in itertools.pairwise([0, *ends])]


def inputs(seed: int, world: int, elements: int, dtype: Dtype) -> list[Array]:
    """Numbers of every size, so that a sum's last bits depend on its order."""
    rng = np.random.default_rng(seed)
    if dtype not in FLOATS | COMPLEXES:
        return [rng.integers(0, 256, elements * dtype.item_bytes, np.uint8) for _ in range(world)]
    part = {Dtype.C32: Dtype.F16, Dtype.C64: Dtype.F32, Dtype.C128: Dtype.F64}.get(dtype, dtype)
    wide = np.float64 if part is Dtype.F64 else np.float32
    parts = elements * dtype.item_bytes // part.item_bytes
    return [narrow((rng.standard_normal(parts) * 2.0 ** rng.integers(-6, 6)).astype(wide), part) for _ in range(world)]


def noise(size_bytes: int) -> Array:
    """Returns the content of an output before the operation."""
    return np.full(size_bytes, 0xA5, np.uint8)


def check_pair_order(plans: Sequence[Plan]) -> None:
    """Checks rules 4 and 2 of docs/reference/plans.md: receives are in their sender's order, and sizes fit."""
    for sender, receiver in itertools.permutations(plans, 2):
        sends = [(s.slot, s.size_bytes) for s in sender.steps if isinstance(s, Send) and s.peer == receiver.rank]
        recvs = [(s.slot, s.size_bytes) for s in receiver.steps if isinstance(s, Recv) and s.peer == sender.rank]
        assert sends == recvs


def check_plans(plans: Sequence[Plan], fixed: Sequence[Plan], buffers: Sequence[Sequence[Array]]) -> None:
    """Checks the binary form, the buffers and the messages. `fixed` are the plans with their counts."""
    for plan, fixed_plan, given_buffers in zip(plans, fixed, buffers, strict=True):
        assert decode(encode(plan)).steps == plan.steps
        assert tuple(buffer.size for buffer in given_buffers) == fixed_plan.buffer_bytes
    check_pair_order(fixed)


def run_in_any_order(
    draw: st.DataObject,
    plans: Sequence[Plan],
    buffers: Sequence[Sequence[Array]],
    counts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Runs the plans under a random schedule."""
    reference.run(
        plans,
        buffers,
        counts=counts,
        seed=draw.draw(st.integers(0, 2**32 - 1), "schedule"),
        scalar=SCALAR,
        loans_per_peer=draw.draw(st.integers(1, 4), "loans"),
        in_order=draw.draw(st.booleans(), "in_order"),
    )


def check_allreduce(
    run: Run, draw: st.DataObject, plans: list[Plan], inputs: list[Array], kind: Kind, in_place: bool
) -> None:
    buffers = [[x.copy()] if in_place else [x.copy(), noise(x.size)] for x in inputs]
    run(draw, plans, buffers)
    expected = fold(inputs, *kind, scalar=SCALAR)
    for given, posted in zip(inputs, buffers, strict=True):
        np.testing.assert_array_equal(posted[-1], expected)
        if not in_place:
            np.testing.assert_array_equal(posted[0], given)


def check_reduce_scatter(
    run: Run, draw: st.DataObject, plans: list[Plan], inputs: list[Array], kind: Kind, counts: list[int], form: str
) -> None:
    """`form` is "one" or "list" for the input, or "aliased": the output is this rank's share of the input."""
    item_bytes = kind[0].item_bytes
    bounds = np.cumsum([0, *counts]) * item_bytes
    buffers: list[list[Array]] = []
    for rank, x in enumerate(inputs):
        copy = x.copy()
        parts = [copy[low:high] for low, high in itertools.pairwise(bounds)]
        output = parts[rank] if form == "aliased" else noise(counts[rank] * item_bytes)
        buffers.append([*parts, output] if form == "list" else [copy, output])
    run(draw, plans, buffers)
    expected = fold(inputs, *kind, scalar=SCALAR)
    for rank, posted in enumerate(buffers):
        np.testing.assert_array_equal(posted[-1], expected[bounds[rank] : bounds[rank + 1]])


def check_reduce(
    run: Run, draw: st.DataObject, plans: list[Plan], inputs: list[Array], kind: Kind, root: int, in_place: bool
) -> None:
    buffers = [
        [x.copy(), noise(x.size)] if rank == root and not in_place else [x.copy()] for rank, x in enumerate(inputs)
    ]
    run(draw, plans, buffers)
    np.testing.assert_array_equal(buffers[root][-1], fold(inputs, *kind, scalar=SCALAR))
    for rank in set(range(len(plans))) - {root}:
        np.testing.assert_array_equal(buffers[rank][0], inputs[rank])
