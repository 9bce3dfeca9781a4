# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,type-arg,func-returns-value"
"""The calls of a round, drawn from its seed: every rank draws the same ones, with values of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from sennit.runtime.backend.torch_versions import coalescing, premul_sum

SHAPES: Final = ((), (0,), (1,), (7,), (3, 4), (2, 0, 3), (5, 2, 3), (2, 3, 4, 2), (257,), (31, 65), (3, 9_001))
OFTEN: Final = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16)
SELDOM: Final = (torch.int8, torch.bool, torch.complex64, torch.int16, torch.uint16, torch.float8_e5m2)
# Of these there is no product, or sennit takes none.
SELDOM_MULTIPLIED: Final = (torch.bool, torch.uint16, torch.float8_e5m2)
OPERATIONS: Final = ("SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

DIFFERENCES: Final = {
    "aliased": "outputs of a call share memory: over gloo one rank's data replaces another's",
    "expanded": "elements of an output share memory: gloo writes past the end of the tensor's memory",
    "scalar": "all_to_all_single of a tensor without dimensions, which cannot be split: gloo moves nothing",
}


@dataclass(kw_only=True)
class Call:
    """One call of this rank, with the values of its tensors."""

    kind: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    start: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], list[Any]]
    """Starts the call, given the group, inputs and outputs."""

    is_written: bool = True
    """Whether this rank's outputs are a result; if not, sennit leaves them as they were."""

    is_exact: bool = True
    difference: str = ""
    """A name of `DIFFERENCES`, or "mistake": neither takes it."""


def is_refused(call: Call) -> bool:
    """Whether the difference of `call` is one for its shapes."""
    if call.difference == "aliased":
        return bool(call.outputs[0].numel()) and len(call.outputs) > 1
    if call.difference == "expanded":
        return call.outputs[0].numel() > 1
    # torch gives a complex number to the backend as two real ones.
    return call.difference == "scalar" and not call.outputs[0].is_complex()


class Draw:
    """What one call draws: `same` gives the same on all ranks, `own` does not."""

    def __init__(self, seed: str, rank: int, size: int) -> None:
        self.same, self.own = random.Random(seed), random.Random(f"{seed}/{rank}")
        self.rank, self.size = rank, size
        self.dtype = self.same.choice(OFTEN if self.same.random() < 0.8 else SELDOM)
        self.is_whole = self.same.random() < 0.7
        self.is_async = self.same.random() < 0.7
        self.op_name, self.factor = "SUM", 1.0

    def values(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Small whole numbers, whose sums and products are exact; or, for some rounds, any."""
        dtype = dtype or self.dtype
        numbers = torch.Generator().manual_seed(self.own.getrandbits(60))
        if not self.is_whole and dtype.is_floating_point:
            return torch.randn(tuple(shape), generator=numbers).to(dtype)
        low = 0 if dtype in (torch.uint8, torch.uint16, torch.bool) else -3
        return torch.randint(low, 2 if dtype == torch.bool else 4, tuple(shape), generator=numbers).to(dtype)

    def shape(self) -> tuple[int, ...]:
        return self.same.choice(SHAPES[: -1 if self.same.random() < 0.95 else None])

    def rows(self) -> tuple[int, ...]:
        """A shape that has a first dimension, of any size."""
        return self.shape() or (2,)

    def root(self) -> int:
        """A root: of two hundred calls, one names a rank that the group does not have."""
        return self.size if self.same.random() < 0.005 else self.same.randrange(self.size)

    def operation(self) -> Callable[[Any], Any]:
        """Which operation a group gets. gloo has no PREMUL_SUM: it sums what `multiplied` gives."""
        self.op_name = self.same.choice(OPERATIONS)
        if self.op_name != "PREMUL_SUM":
            return lambda group: getattr(dist.ReduceOp, self.op_name)
        # Another factor on each rank. Small sums of such products are exact.
        is_real = self.dtype.is_floating_point or self.dtype.is_complex
        self.factor = self.own.choice((0.5, -1.5, 2.0) if is_real else (1.0, 3.0, 2.0))
        op = premul_sum(self.factor)
        return lambda group: dist.ReduceOp.SUM if self.is_multiplied and dist.get_backend(group) == "gloo" else op

    @staticmethod
    def plain_sum(group: Any) -> Any:
        return dist.ReduceOp.SUM

    @property
    def is_multiplied(self) -> bool:
        """Whether gloo gets products. Of some types there are none."""
        return self.op_name == "PREMUL_SUM" and self.dtype not in SELDOM_MULTIPLIED

    def multiplied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same tensors, or products of them with this rank's factor."""
        if not self.is_multiplied:
            return list(tensors)
        factor = self.factor if self.dtype.is_floating_point or self.dtype.is_complex else int(self.factor)
        return [one * factor for one in tensors]

    @property
    def has_exact_sums(self) -> bool:
        """torch divides complex numbers as such, with a rounding more."""
        return self.is_whole and not (self.dtype.is_complex and self.op_name == "AVG")

    def is_mistaken(self) -> bool:
        return self.same.random() < 0.04


def waited(work: Any) -> list[Any]:
    return [] if work is None else [work]


def all_reduce(draw: Draw) -> Call:
    op = draw.operation()
    return Call(
        kind="all_reduce",
        outputs=[draw.values(draw.shape())],
        start=lambda group, _, out: waited(dist.all_reduce(out[0], op(group), group=group, async_op=draw.is_async)),
        is_exact=draw.has_exact_sums,
        difference="expanded" if draw.same.random() < 0.03 else "",
    )


def reduce(draw: Draw) -> Call:
    op, root = draw.operation(), draw.root()
    return Call(
        kind="reduce",
        outputs=[draw.values(draw.shape())],
        start=lambda group, _, out: waited(
            dist.reduce(out[0], op=op(group), group=group, group_dst=root, async_op=draw.is_async)
        ),
        is_written=draw.rank == root,
        is_exact=draw.has_exact_sums,
    )


def broadcast(draw: Draw) -> Call:
    root = draw.root()
    return Call(
        kind="broadcast",
        outputs=[draw.values(draw.shape())],
        start=lambda group, _, out: waited(dist.broadcast(out[0], group=group, group_src=root, async_op=draw.is_async)),
        difference="expanded" if draw.same.random() < 0.03 else "",
    )


def all_gather(draw: Draw) -> Call:
    shape, mistaken = draw.shape(), draw.is_mistaken()
    outputs = [draw.values(shape) for _ in range(draw.size)]
    if mistaken:
        outputs = outputs[1:] if draw.same.random() < 0.5 else [draw.values(shape, torch.complex128) for _ in outputs]
    return Call(
        kind="all_gather",
        inputs=[draw.values(shape)],
        outputs=outputs,
        start=lambda group, given, out: waited(dist.all_gather(out, given[0], group=group, async_op=draw.is_async)),
        difference="mistake" if mistaken else "aliased" if draw.same.random() < 0.03 else "",
    )


def all_gather_single(draw: Draw) -> Call:
    shape, extra = draw.rows(), int(draw.is_mistaken())
    return Call(
        kind="all_gather_single",
        inputs=[draw.values(shape)],
        outputs=[draw.values((shape[0] * draw.size + extra, *shape[1:]))],
        start=lambda group, given, out: waited(
            dist.all_gather_single(out[0], given[0], group=group, async_op=draw.is_async)
        ),
        difference="mistake" if extra and math.prod(shape[1:]) else "",
    )


def gather(draw: Draw) -> Call:
    shape, root = draw.shape(), draw.root()
    is_root = draw.rank == root
    return Call(
        kind="gather",
        inputs=[draw.values(shape)],
        outputs=[draw.values(shape) for _ in range(draw.size if is_root else 0)],
        start=lambda group, given, out: waited(
            dist.gather(given[0], out if is_root else None, group=group, group_dst=root, async_op=draw.is_async)
        ),
    )


def scatter(draw: Draw) -> Call:
    shape, root = draw.shape(), draw.root()
    is_root = draw.rank == root
    return Call(
        kind="scatter",
        inputs=[draw.values(shape) for _ in range(draw.size if is_root else 0)],
        outputs=[draw.values(shape)],
        start=lambda group, given, out: waited(
            dist.scatter(out[0], given if is_root else None, group=group, group_src=root, async_op=draw.is_async)
        ),
    )


def reduce_scatter(draw: Draw) -> Call:
    shape, op = draw.shape(), draw.operation()
    return Call(
        kind="reduce_scatter",
        inputs=[draw.values(shape) for _ in range(draw.size)],
        outputs=[draw.values(shape)],
        start=lambda group, given, out: waited(
            dist.reduce_scatter(out[0], given, op(group), group=group, async_op=draw.is_async)
        ),
        is_exact=draw.has_exact_sums,
    )


def reduce_scatter_single(draw: Draw) -> Call:
    # With sizes that do not fit, gloo ends the process.
    shape, op = draw.rows(), draw.operation()
    return Call(
        kind="reduce_scatter_single",
        inputs=[draw.values((shape[0] * draw.size, *shape[1:]))],
        outputs=[draw.values(shape)],
        start=lambda group, given, out: waited(
            dist.reduce_scatter_single(out[0], given[0], op(group), group=group, async_op=draw.is_async)
        ),
        is_exact=draw.has_exact_sums,
    )


def all_to_all(draw: Draw) -> Call:
    # All ranks give lists of the group's size: gloo refuses other sizes on some ranks, and the others wait for them.
    shape = draw.shape()
    return Call(
        kind="all_to_all",
        inputs=[draw.values(shape) for _ in range(draw.size)],
        outputs=[draw.values(shape) for _ in range(draw.size)],
        start=lambda group, given, out: waited(dist.all_to_all(out, given, group=group, async_op=draw.is_async)),
        difference="aliased" if draw.same.random() < 0.03 else "",
    )


def all_to_all_single(draw: Draw) -> Call:
    shape, difference = draw.shape(), ""
    given_shape = taken = shape
    sent: list[int] | None = None
    received: list[int] | None = None
    if not shape:
        difference = "scalar"
    elif draw.same.random() < 0.5:
        given_shape = taken = (shape[0] * draw.size, *shape[1:])
    else:
        splits = [[draw.same.randrange(4) for _ in range(draw.size)] for _ in range(draw.size)]
        sent, received = splits[draw.rank], [splits[peer][draw.rank] for peer in range(draw.size)]
        given_shape, taken = (sum(sent), *shape[1:]), (sum(received), *shape[1:])
        if draw.is_mistaken():
            sent, difference = [*sent[:-1], sent[-1] + 1], "mistake"
    return Call(
        kind="all_to_all_single",
        inputs=[draw.values(given_shape)],
        outputs=[draw.values(taken)],
        start=lambda group, given, out: waited(
            dist.all_to_all_single(out[0], given[0], received, sent, group=group, async_op=draw.is_async)
        ),
        difference=difference,
    )


def batch(draw: Draw) -> Call:
    """Messages around a ring, some with tags."""
    shapes = [draw.shape() for _ in range(draw.same.randrange(1, 4))]
    right, left = (draw.rank + 1) % draw.size, (draw.rank - 1) % draw.size
    order = draw.same.sample(range(len(shapes)), len(shapes))

    def start(group: Any, given: list[torch.Tensor], out: list[torch.Tensor]) -> list[Any]:
        sends = [dist.P2POp(dist.isend, given[i], group=group, group_peer=right, tag=i) for i in order]
        receives = [dist.P2POp(dist.irecv, out[i], group=group, group_peer=left, tag=i) for i in range(len(shapes))]
        return dist.batch_isend_irecv([*sends, *receives])

    return Call(
        kind="batch",
        inputs=[draw.values(shape) for shape in shapes],
        outputs=[draw.values(shape) for shape in shapes],
        start=start,
    )


def coalesced(draw: Draw) -> Call:
    """A block of all_reduce, all_gather_single or reduce_scatter_single."""
    what = draw.same.choice((dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single))
    shapes = [draw.rows() for _ in range(draw.same.randrange(1, 4))]
    wide = [(shape[0] * draw.size, *shape[1:]) for shape in shapes]
    if draw.dtype.is_complex:
        # torch refuses some in the block, and leaves it open then, whatever the backend.
        draw.dtype = torch.float32
    op = draw.operation() if what is not dist.all_gather_single else draw.plain_sum

    def start(group: Any, given: list[torch.Tensor], out: list[torch.Tensor]) -> list[Any]:
        with coalescing(group, async_ops=True) as block:
            for index, tensor in enumerate(out):
                if what is dist.all_reduce:
                    dist.all_reduce(tensor, op(group), group=group)
                elif what is dist.all_gather_single:
                    dist.all_gather_single(tensor, given[index], group=group)
                else:
                    dist.reduce_scatter_single(tensor, given[index], op(group), group=group)
        return [block]

    taken = {dist.all_reduce: [], dist.all_gather_single: shapes, dist.reduce_scatter_single: wide}[what]
    written = wide if what is dist.all_gather_single else shapes
    return Call(
        kind=f"coalesced {what.__name__}",
        inputs=[draw.values(shape) for shape in taken],
        outputs=[draw.values(shape) for shape in written],
        start=start,
        is_exact=draw.has_exact_sums or what is dist.all_gather_single,
    )


KINDS: Final = (
    all_reduce, reduce, broadcast, all_gather, all_gather_single, gather, scatter, reduce_scatter,
    reduce_scatter_single, all_to_all, all_to_all_single, batch, coalesced,
)  # fmt: skip
